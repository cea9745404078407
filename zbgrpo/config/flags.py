"""The command line of a run: one table of flags, the parser and the help made from it.

A flag is another name of one key of the schema: type, bounds and default are the schema's. Keys without a flag are
set with `section.key=value`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from zbgrpo.config import fields, yamlio
from zbgrpo.errors import ConfigError

Kind = Literal["str", "int", "float", "json", "switch"]


class Flag(NamedTuple):
    """One flag. `path` is the leaf that it sets; `short` is None where there is only a long name."""

    short: str | None
    long: str
    path: str
    kind: Kind
    group: str
    help: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.short, self.long) if self.short else (self.long,)

    def __str__(self) -> str:
        return "/".join(self.names)


class Setting(NamedTuple):
    """A value for a leaf, and what set it: the words that an error about it begins with."""

    path: str
    value: Any
    source: str


class CommandLine(NamedTuple):
    """What a command line says, before any of it is combined with a file and defaults."""

    config_file: str | None
    overrides: list[tuple[str, str]]
    """`section.key=value` arguments in order: (key, text after the equals sign)."""
    settings: list[Setting]
    """From flags, unchecked but of the right kind."""
    notes: list[str]
    dry_run: bool


_RUN = "run"
_DATA = "model and data"
_ROLES = "roles and parallelism"
_GENERATION = "generation"
_ALGORITHM = "algorithm and reward"
_TRAINING = "training"
_FRESHNESS = "how far generation runs ahead"
_OUTPUT = "evaluation and output"

_R, _D, _P, _G, _A, _T, _F, _O = _RUN, _DATA, _ROLES, _GENERATION, _ALGORITHM, _TRAINING, _FRESHNESS, _OUTPUT

# fmt: off
FLAGS: tuple[Flag, ...] = (
    Flag("-p", "--project", "project", "str", _R,
         "name of the run and of its folders"),
    Flag(None, "--seed", "seed", "int", _R,
         "seed of everything that is random"),
    Flag(None, "--max-steps", "ledger.max_steps", "int", _R,
         "optimizer steps after which the run ends, if the data lasts"),
    Flag(None, "--resume", "checkpoint.resume", "str", _R,
         "auto: go on from the newest complete state, if any; never: start anew; or the path of a state folder"),
    Flag("-m", "--model", "model.path", "str", _D,
         "model to train: folder or hub name"),
    Flag(None, "--tokenizer-path", "model.tokenizer_path", "str", _D,
         "folder or hub name of the tokenizer; the model's if left out"),
    Flag("-d", "--dataset", "data.path", "str", _D,
         "training data: JSON Lines (.gz too), parquet or a data set's name"),
    Flag("-e", "--num-episodes", "data.num_episodes", "int", _D,
         "passes over the data"),
    Flag("-mpt", "--max-prompt-tokens", "data.max_prompt_tokens", "int", _D,
         "longer prompts are dropped and counted"),
    Flag("-s", "--system-prompt", "data.system_prompt", "str", _D,
         'system message; by reward type if left out, "" for none'),
    Flag(None, "--skip-bad-rows", "data.skip_bad_rows", "switch", _D,
         "count and skip unusable rows instead of stopping at the first"),
    Flag("-t", "--num-trainers", "cluster.num_trainers", "int", _P,
         "ranks that train; -t and -i both left out: half of the world each"),
    Flag("-i", "--num-inferencer", "cluster.num_inferencer", "int", _P,
         "producers, each of -ptp ranks, that generate"),
    Flag("-tp", "--tensor-parallel-size", "trainer.tensor_parallel_size", "int", _P,
         "ranks that share the matrices of the trainer (tensor parallel)"),
    Flag("-pp", "--pipeline-parallel-size", "trainer.pipeline_parallel_size", "int", _P,
         "pipeline stages of the trainer"),
    Flag("-zero", "--zero-stage", "trainer.zero_stage", "int", _P,
         "what data-parallel ranks share: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too"),
    Flag("-ptp", "--producer-tensor-parallel-size", "cluster.producer_tensor_parallel_size", "int", _P,
         "ranks that make up one producer (with -b vllm)"),
    Flag(None, "--consumer-python", "cluster.consumer_python", "str", _P,
         "interpreter that the consumers run under, if another (for --trainer colossalai)"),
    Flag("-b", "--backend", "inference.backend", "str", _G,
         "engine that generates"),
    Flag("-g", "--num-generations", "inference.num_generations", "int", _G,
         "responses per prompt"),
    Flag("-ibs", "--inference-batch-size", "inference.inference_batch_size", "int", _G,
         "most prompts that one producer holds; a multiple of -imbs"),
    Flag("-imbs", "--inference-microbatch-size", "inference.inference_microbatch_size", "int", _G,
         "prompts that one producer decodes together"),
    Flag("-mnt", "--max-new-tokens", "inference.max_new_tokens", "int", _G,
         "most tokens of a response"),
    Flag("-temp", "--temperature", "inference.temperature", "float", _G,
         "sampling temperature"),
    Flag("-topk", "--top-k", "inference.top_k", "int", _G,
         "sample among the k likeliest tokens; no truncation if left out"),
    Flag("-topp", "--top-p", "inference.top_p", "float", _G,
         "sample within this probability mass"),
    Flag("-a", "--algo", "algorithm.name", "str", _A,
         "preset of the algorithm; an explicit flag or key beats it"),
    Flag("-kl", "--kl-coeff", "algorithm.kl_coeff", "float", _A,
         "weight of the KL to the reference model, 0 loads none; GRPO 0.01, DAPO 0 if left out"),
    Flag("-rt", "--reward-type", "reward.type", "str", _A,
         "think_answer_tags, boxed, code, module:function or file.py:function"),
    Flag(None, "--code-sandbox-url", "reward.code_sandbox_url", "str", _A,
         "run programs of -rt code in a remote sandbox: address of its run_code endpoint"),
    Flag(None, "--trainer", "trainer.backend", "str", _T,
         "library that trains"),
    Flag("-tbs", "--train-batch-size", "trainer.train_batch_size", "int", _T,
         "prompts per optimizer step and data-parallel rank"),
    Flag("-tMbs", "--train-minibatch-size", "trainer.train_minibatch_size", "int", _T,
         "prompts per minibatch and data-parallel rank; divides -tbs"),
    Flag("-tmbs", "--train-microbatch-size", "trainer.train_microbatch_size", "int", _T,
         "responses per forward and backward pass"),
    Flag("-lr", "--learning-rate", "trainer.learning_rate", "float", _T,
         "learning rate of AdamW"),
    Flag(None, "--precision", "trainer.precision", "str", _T,
         "bf16 with float32 master weights, or fp32"),
    Flag(None, "--max-staleness", "ledger.max_staleness", "int", _F,
         "versions that generation may start ahead of training; 0 is synchronous"),
    Flag(None, "--max-token-lag", "ledger.max_token_lag", "int", _F,
         "tokens older than this, in versions, are left out of the loss"),
    Flag(None, "--stale", "ledger.stale", "str", _F,
         "mask: nobody waits for slow responses; wait: no group trains with a lag above --max-staleness"),
    Flag("-cbsl", "--data_actor_buffer_size_limit", "ledger.buffer_limit", "int", _F,
         "groups that wait for training; not positive: 2 x tMbs x data-parallel size"),
    Flag(None, "--weight-transport", "weights.transport", "str", _F,
         "how new weights get to producers; ipc: through memory, on one node"),
    Flag(None, "--weight-staging", "weights.staging", "str", _F,
         "where a version waits for its broadcast"),
    Flag("-ed", "--eval-dataset", "evaluation.datasets", "json", _O,
         """evaluation files as JSON: '{"task": "path", ...}'"""),
    Flag("-ei", "--eval-interval", "evaluation.interval", "int", _O,
         "optimizer steps between evaluations"),
    Flag("-si", "--save-interval", "checkpoint.save_interval", "int", _O,
         "optimizer steps between saves; the last step is always saved"),
    Flag("-sd", "--save-dir", "checkpoint.save_dir", "str", _O,
         "folder for models and states; the project's name is added"),
    Flag("-esd", "--eval-save-dir", "evaluation.save_dir", "str", _O,
         "folder for evaluations; the project's name is added"),
    Flag("-rsd", "--rollout-save-dir", "observe.rollout_save_dir", "str", _O,
         "folder for sampled rollouts; the project's name is added"),
    Flag(None, "--log-dir", "observe.log_dir", "str", _O,
         "folder for logs and metrics; the project's name is added"),
    Flag(None, "--enable_profiling", "observe.enable_profiling", "switch", _O,
         "profile some steps of every rank with torch's profiler"),
)
# fmt: on

WITHOUT_MEANING: dict[str, str] = {
    "--ray_dir": "there is no Ray; torchrun starts the processes and --log-dir says where logs go",
    "--master_address": "torchrun sets it: torchrun --master-addr HOST, or --rdzv-endpoint HOST:PORT for several nodes",
    "--master_port": "torchrun sets it: torchrun --master-port PORT, or --rdzv-endpoint HOST:PORT for several nodes",
}
"""Flags of a launch with Ray that are accepted and ignored, each with what is used instead."""

_BY_PATH = {flag.path: flag for flag in FLAGS}
_OTHER_NAMES = ("--config", "--dry-run", "-h", "--help", *WITHOUT_MEANING)
_NEGATIVE_NUMBER = re.compile(r"^-\.?\d")


def label(path: str) -> str:
    """How a message names the leaf `path`: its flag where it has one, else its key."""
    return str(_BY_PATH.get(path, path))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags. It converts nothing, and its errors are ConfigErrors."""
    parser = _Parser(
        prog="python -m zbgrpo.launch",
        usage="torchrun --nproc-per-node N -m zbgrpo.launch [flags] [section.key=value ...]",
        description="Train a language model with GRPO or DAPO: some ranks generate, the others train.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        group = groups[flag.group]
        if flag.kind == "switch":
            group.add_argument(*flag.names, dest=flag.path, action="store_true", help=flag.help)
        else:
            group.add_argument(*flag.names, dest=flag.path, metavar=_metavar(flag), help=_help(flag))
    run = groups[_RUN]
    run.add_argument("--config", metavar="FILE.yaml", help="settings from a file; keys and flags given beside it win")
    run.add_argument("--dry-run", action="store_true", help="print the resolved plan and exit")
    ignored = parser.add_argument_group("accepted and ignored")
    for name in WITHOUT_MEANING:
        ignored.add_argument(name, metavar="X", help="has no meaning without Ray")
    return parser


def _metavar(flag: Flag) -> str:
    described = fields.describe(fields.leaves()[flag.path].type)
    if described.startswith("one of "):
        return "{" + described.removeprefix("one of ").replace(", ", ",") + "}"
    return {"int": "N", "float": "X", "json": "JSON", "str": "TEXT"}[flag.kind]


def _help(flag: Flag) -> str:
    default = fields.leaves()[flag.path].default
    text = flag.help if default is None or default == {} else f"{flag.help} (default: {default})"
    return text.replace("%", "%%")


def _epilog() -> str:
    lines = [
        f"  {leaf.path}={_yaml_word(leaf.default)}" for leaf in fields.leaves().values() if leaf.path not in _BY_PATH
    ]
    return "\n".join(
        [
            "keys without a flag, with their defaults (every flag has a key too):",
            *lines,
            "",
            "What wins: flags, then section.key=value, then --config, then the defaults.",
        ]
    )


def _yaml_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, tuple) else yamlio.dump([value]).removeprefix("- ").strip()


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Reads a command line (without the program's name).

    Flags must be written out in full. Unknown flags, flags without their value and values of another kind are
    ConfigErrors that begin with the flag. `--help` prints and raises SystemExit(0).
    """
    _reject_unknown_flags(argv)
    namespace, rest = build_parser().parse_known_args(list(argv))
    given: dict[str, Any] = vars(namespace)
    overrides = []
    for argument in rest:
        key, equals, text = argument.partition("=")
        if argument == "--":
            continue
        if not equals:
            raise ConfigError(f"{argument}: expected a flag or section.key=value")
        overrides.append((key, text))
    return CommandLine(
        config_file=given.get("config"),
        overrides=overrides,
        settings=[Setting(f.path, _value(f, given[f.path]), str(f)) for f in FLAGS if f.path in given],
        notes=[f"{name} is ignored: {why}" for name, why in WITHOUT_MEANING.items() if name[2:] in given],
        dry_run=given.get("dry_run", False),
    )


def _reject_unknown_flags(argv: Sequence[str]) -> None:
    # argparse would take `-tem` for `-temp` and `-tps` for `-t ps`, whatever allow_abbrev says.
    known = {name for flag in FLAGS for name in flag.names} | set(_OTHER_NAMES)
    for argument in argv:
        name = argument.partition("=")[0]
        if not name.startswith("-") or name in known or name in ("-", "--"):
            continue
        if " " in name or _NEGATIVE_NUMBER.match(name):
            continue  # a value
        close = fields.nearest(name, known)
        hint = f"; did you mean {close}?" if close else "; --help lists all flags"
        raise ConfigError(f"{name}: unknown flag{hint}")


def _value(flag: Flag, text: Any) -> Any:
    expected = fields.describe(fields.leaves()[flag.path].type)
    try:
        if flag.kind == "int":
            return int(text)
        if flag.kind == "float":
            return float(text)
        if flag.kind == "json":
            return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"""{flag}: expected JSON such as '{{"task": "path"}}', got {text!r}: {error}""") from None
    except ValueError:
        raise ConfigError(f"{flag}: expected {expected}, got {text!r}") from None
    return text
