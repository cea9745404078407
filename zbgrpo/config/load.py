"""From a command line to a checked configuration, and back to YAML.

What wins: flags, then `section.key=value`, then the file, then the schema's defaults. Every message about a value
begins with what set it: the flag, the key, or the file and the key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from zbgrpo.config import fields, yamlio
from zbgrpo.config.flags import Setting, label, parse_command_line
from zbgrpo.config.schema import AlgorithmConfig, ClusterConfig, RunConfig
from zbgrpo.config.validate import validate
from zbgrpo.errors import ConfigError


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved and validated configuration, with what the user should be told about it."""

    config: RunConfig
    notes: list[str]
    """Flags that were accepted but mean nothing here, one line each."""
    warnings: list[str]
    """Combinations that work but are probably not what was meant, one line each."""
    dry_run: bool


def load_config(argv: Sequence[str], world_size: int | None = None) -> LoadedConfig:
    """The configuration that `argv` (without the program's name) asks for in a world of `world_size` ranks.

    `world_size` None: not known (a dry run without torchrun); the sum of the roles is then not checked. Raises
    ConfigError; `--help` prints and raises SystemExit(0). Loads nothing heavier than yaml and msgspec.
    """
    line = parse_command_line(argv)
    settings = read_file(line.config_file) if line.config_file is not None else []
    for key, text in line.overrides:
        settings.append(_override(key, text, settings))
    config = resolve(_combine([*settings, *line.settings]), world_size)
    warnings = validate(config, world_size)
    return LoadedConfig(config=config, notes=line.notes, warnings=warnings, dry_run=line.dry_run)


def load_yaml(text: str, name: str = "config.yaml") -> RunConfig:
    """The configuration of a YAML text over the schema's defaults, neither resolved nor validated as a whole."""
    return _combine(_flatten(yamlio.parse(text, name), name))


def read_file(path: str) -> list[Setting]:
    """The settings of a YAML file. Raises ConfigError if it cannot be read, is not YAML or has an unknown key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text: {error}") from None
    return _flatten(yamlio.parse(text, path), path)


def _flatten(tree: Any, name: str) -> list[Setting]:
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: expected a mapping of sections, got {type(tree).__name__}")
    settings = []
    for key, value in tree.items():
        if key not in fields.sections():
            settings.append(_setting(str(key), value, name))
        elif isinstance(value, dict):
            settings.extend(_setting(f"{key}.{inner}", inner_value, name) for inner, inner_value in value.items())
        elif value is not None:
            raise ConfigError(f"{name}: {key}: expected a mapping of keys to values, got {value!r}")
    return settings


def _setting(path: str, value: Any, name: str) -> Setting:
    if path not in fields.leaves():
        raise fields.unknown_key_error(path, f"{name}: ")
    return Setting(path, value, f"{name}: {path}")


def _override(key: str, text: str, earlier: list[Setting]) -> Setting:
    """A `section.key=value` argument. `evaluation.datasets.TASK=PATH` adds one entry to a mapping."""
    mapping, _, entry = key.rpartition(".")
    if key not in fields.leaves() and mapping in fields.leaves() and fields.is_mapping(mapping):
        before = next((setting.value for setting in reversed(earlier) if setting.path == mapping), None)
        return Setting(mapping, {**(before if isinstance(before, dict) else {}), entry: text}, key)
    if key not in fields.leaves():
        raise fields.unknown_key_error(key, "")
    value = yamlio.parse(text, key)
    if fields.is_text(key) and not isinstance(value, (str, type(None))):
        value = text  # project=2024 means the name "2024", and `Note: be brief` is no mapping
    return Setting(key, value, key)


def _combine(settings: Sequence[Setting]) -> RunConfig:
    """Later settings win; every one is checked, so that a bad value does not hide behind a better one."""
    return fields.build({s.path: fields.convert(s.path, s.value, s.source) for s in settings})


_PRESETS: dict[str, dict[str, Any]] = {
    "GRPO": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "loss": "response_mean",
        "kl_coeff": 0.01,
        "dynamic_batching": False,
        "mask_truncated": False,
        "overlong_penalty": False,
    },
    "DAPO": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "loss": "token_mean",
        "kl_coeff": 0.0,
        "dynamic_batching": True,
        "mask_truncated": True,
        "overlong_penalty": True,
    },
}


def resolve(config: RunConfig, world_size: int | None) -> RunConfig:
    """`config` with the fields filled in that a preset, another field or the world decides.

    Left alone: fields whose None has a meaning of its own, and those that the reward type decides
    (`data.system_prompt`, `inference.stop`). Raises ConfigError when no number of roles fits `world_size`.
    Resolving twice changes nothing.
    """
    return msgspec.structs.replace(
        config,
        algorithm=_resolve_algorithm(config.algorithm, config.inference.max_new_tokens),
        cluster=_resolve_roles(config.cluster, world_size),
    )


def _resolve_algorithm(algorithm: AlgorithmConfig, max_new_tokens: int) -> AlgorithmConfig:
    defaults = {**_PRESETS[algorithm.name], "overlong_cache_tokens": max(1, min(1024, max_new_tokens // 4))}
    missing = {key: value for key, value in defaults.items() if getattr(algorithm, key) is None}
    return msgspec.structs.replace(algorithm, **missing)


def _resolve_roles(cluster: ClusterConfig, world_size: int | None) -> ClusterConfig:
    trainers, inferencer = cluster.num_trainers, cluster.num_inferencer
    ranks_each = cluster.producer_tensor_parallel_size
    if trainers is not None and inferencer is not None:
        return cluster
    t, i = label("cluster.num_trainers"), label("cluster.num_inferencer")
    if world_size is None:
        trainers, inferencer = trainers or 2, inferencer or 2
    elif world_size < 2:
        raise ConfigError(
            f"world of {world_size} rank: training and generation need a rank each; start at least two "
            f"(torchrun --nproc-per-node 2)"
        )
    else:
        if trainers is None and inferencer is None and world_size % 2:
            raise ConfigError(f"world of {world_size} ranks cannot be halved: set {t} and {i}")
        if trainers is None:
            trainers = world_size - inferencer * ranks_each if inferencer is not None else world_size // 2
        producer_ranks = world_size - trainers
        inferencer = producer_ranks // ranks_each if inferencer is None else inferencer
        if trainers < 1 or inferencer < 1 or inferencer * ranks_each != producer_ranks:
            raise ConfigError(
                f"world of {world_size} ranks does not fit: {trainers} for {t} leave {producer_ranks} for {i}, "
                f"of {ranks_each} each ({label('cluster.producer_tensor_parallel_size')}); set both or start more"
            )
    return msgspec.structs.replace(cluster, num_trainers=trainers, num_inferencer=inferencer)


def to_tree(config: RunConfig) -> dict[str, Any]:
    """`config` as nested dicts of lists, text and numbers, as JSON and YAML hold them."""
    tree = msgspec.json.decode(msgspec.json.encode(config))
    assert isinstance(tree, dict)
    return tree


def dump_yaml(config: RunConfig) -> str:
    """`config` as YAML, every key written out; `load_yaml` of it is equal to `config`."""
    return yamlio.dump(to_tree(config))


_FREE_ON_RESUME = frozenset(
    {
        "project",
        # Other numbers of producers or slots give the same training from the same groups; so do other microbatches.
        "cluster",
        "inference.inference_batch_size",
        "inference.inference_microbatch_size",
        "vllm",
        "reward.num_workers",
        "trainer.train_microbatch_size",
        # How the trainer is spread decides nothing as long as a step has as many groups (which is compared instead).
        "trainer.train_batch_size",
        "trainer.train_minibatch_size",
        "trainer.zero_stage",
        "trainer.tensor_parallel_size",
        "trainer.pipeline_parallel_size",
        "trainer.gradient_checkpointing",
        "trainer.logprob_chunk_tokens",
        "ledger.buffer_limit",
        "ledger.max_steps",
        "transport",
        "weights",
        "checkpoint",
        "evaluation.datasets",
        "evaluation.interval",
        "evaluation.save_dir",
        "observe",
    }
)
"""Keys and sections that a resumed run may change. Every other key, and any added later, has to stay."""


GROUPS_PER_STEP = "-tbs/--train-batch-size x data-parallel size"
"""What a fingerprint calls the number of groups per optimizer step."""


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """The settings of a resolved configuration that decide what a run computes, by key, as JSON holds them.

    A state may be resumed only by a run with an equal fingerprint. The number of groups per step is part of it, but not
    the layout of the trainer that it is the product of.
    """
    tree = to_tree(config)
    values = {path: functools.reduce(lambda node, key: node[key], path.split("."), tree) for path in fields.leaves()}
    kept = {path: value for path, value in values.items() if not {path, path.split(".")[0]} & _FREE_ON_RESUME}
    return {GROUPS_PER_STEP: config.groups_per_step, **kept}


def compare_fingerprints(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """None when equal, else a line that names the first key that differs, with the saved value and this run's."""
    for path in [*new, *(path for path in old if path not in new)]:
        if path not in old or path not in new or old[path] != new[path]:
            was, now = old.get(path, "(not set)"), new.get(path, "(not set)")
            return f"{label(path)}: the saved run has {was!r}, this one {now!r}"
    return None
