"""What `--dry-run` prints: the resolved plan of a run, from its configuration and a few file headers."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, Any

from zbgrpo.config import memory
from zbgrpo.config.flags import label
from zbgrpo.config.model_size import ModelSize, read_model_size
from zbgrpo.config.schema import DataConfig, RunConfig
from zbgrpo.config.sizes import ring_bytes
from zbgrpo.config.validate import groups_in_flight, staleness_for_no_bubble, staleness_hint
from zbgrpo.errors import DataError, ModelError

_DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_GIB = 1024**3
_MIB = 1024**2

Row = tuple[str, str]
"""A line of the plan: what, and its value."""


def count_rows(path: str) -> int | None:
    """Rows of a training file: its lines that are not blank. None where only a library could tell (parquet, a data
    set's name).

    Raises DataError when the file is missing or cannot be read, and when it has no rows.
    """
    file = Path(path).expanduser()
    if not file.exists():
        if path.endswith(_DATA_SUFFIXES) or path.startswith((".", "/", "~")):
            hint = (
                "; give one with -d, or run `bash launch/quickstart.sh`, which makes its own data and model"
                if path == DataConfig().path
                else f"; {label('data.path')} names the training file"
            )
            raise DataError(f"{path}: no such file{hint}")
        return None
    if not path.endswith((".jsonl", ".jsonl.gz")):
        return None
    try:
        with _open(file) as lines:
            rows = sum(1 for line in lines if line.strip())
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb")  # type: ignore[return-value]


def num_steps(config: RunConfig, num_rows: int) -> int:
    """Most optimizer steps of a run over `num_rows` usable rows: min(max_steps, episodes x rows // S).

    Filtered groups and prompts that are too long make them fewer. Raises DataError when there is not even one.
    """
    uses, needed = config.data.num_episodes * num_rows, config.groups_per_step
    if uses < needed:
        raise DataError(
            f"{config.data.path}: {num_rows} rows x {config.data.num_episodes} episodes = {uses} groups, fewer than "
            f"the {needed} of one optimizer step ({config.trainer.train_batch_size} x data-parallel size "
            f"{config.dp_size}); use more data or a smaller {label('trainer.train_batch_size')}"
        )
    return min(uses // needed, config.ledger.max_steps or uses)


def describe_plan(config: RunConfig, num_rows: int | None) -> str:
    """The plan of a resolved and validated configuration, for people. `num_rows`: `count_rows` of the data.

    Raises DataError when the rows do not fill one step, ModelError when a local model folder is missing or damaged.
    """
    size = _model_size(config.model.path)
    parts: list[tuple[str, list[Row]]] = [
        ("Roles", _roles(config)),
        ("Batches", _batches(config)),
        ("Steps", _steps(config, num_rows)),
        ("Algorithm", _algorithm(config)),
        ("Memory of a consumer rank, at most", _consumer_memory(config, size)),
        ("Other memory", _other_memory(config, size)),
        ("Written to", _written(config)),
    ]
    width = max(len(name) for _, rows in parts for name, _ in rows)
    lines = [f"Plan of {config.project!r}: {config.algorithm.name} on {config.model.path}, reward {config.reward.type}"]
    for title, rows in parts:
        lines += ["", title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join(lines)


def _model_size(path: str) -> ModelSize | None:
    size = read_model_size(path)
    if size is None and path.startswith((".", "/", "~")):
        raise ModelError(f"{path}: no such folder; {label('model.path')} names the model")
    return size


def _roles(config: RunConfig) -> list[Row]:
    cluster, trainer = config.cluster, config.trainer
    trainers, producers = cluster.num_trainers or 0, cluster.num_inferencer or 0
    ranks_each = cluster.producer_tensor_parallel_size
    mesh = f"dp {config.dp_size} x pp {trainer.pipeline_parallel_size} x tp {trainer.tensor_parallel_size}"
    return [
        ("world", f"{config.world_size} = {trainers} trainers + {producers} inferencers x {ranks_each}"),
        ("consumers", f"{_ranks(0, trainers)}: {trainer.backend}, {mesh}, ZeRO {trainer.zero_stage}"),
        (
            "producers",
            f"{_ranks(trainers, config.world_size)}: {config.inference.backend}, {producers} x {ranks_each}",
        ),
        ("precision", config.trainer.precision),
    ]


def _ranks(start: int, stop: int) -> str:
    return f"rank {start}" if stop - start == 1 else f"ranks {start}-{stop - 1}"


def _batches(config: RunConfig) -> list[Row]:
    trainer, inference = config.trainer, config.inference
    group_size, dp_size = inference.num_generations, config.dp_size
    step = config.groups_per_step
    responses = trainer.train_minibatch_size * group_size
    microbatches = -(-responses // trainer.train_microbatch_size)
    return [
        (
            "optimizer step, S",
            f"{step} groups = {trainer.train_batch_size} x dp {dp_size}; {step * group_size} responses",
        ),
        (
            "minibatch",
            f"{config.groups_per_minibatch} groups = {trainer.train_minibatch_size} x dp {dp_size}; "
            f"{trainer.train_batch_size // trainer.train_minibatch_size} per step",
        ),
        ("microbatch", f"{trainer.train_microbatch_size} responses; {microbatches} per minibatch and rank"),
        (
            "decode slots per producer",
            f"{config.num_slots} = {inference.inference_microbatch_size} prompts x {group_size} responses",
        ),
        ("leases held per producer", f"at most {inference.inference_batch_size} groups"),
        ("groups in flight", f"at most {groups_in_flight(config)}"),
        ("buffer", f"{config.buffer_limit} groups"),
        ("staleness", _staleness(config)),
        *([("hint", hint)] if (hint := staleness_hint(config)) else []),
    ]


def _staleness(config: RunConfig) -> str:
    staleness = config.ledger.max_staleness
    if staleness == 0:
        return "0: synchronous, generation and training take turns"
    needed = staleness_for_no_bubble(config)
    verdict = "enough" if staleness >= needed else "too little"
    return (
        f"{staleness} versions; zero bubble needs {needed} = {groups_in_flight(config)} in flight / "
        f"{config.groups_per_step} per step + 1: {verdict}"
    )


def _steps(config: RunConfig, num_rows: int | None) -> list[Row]:
    data, limit = config.data, config.ledger.max_steps
    rows: list[Row] = [("data", f"{data.path}, {'unknown number of' if num_rows is None else num_rows} rows")]
    if num_rows is None:
        steps = "episodes x rows // S" if limit is None else f"at most {limit} (max_steps)"
    else:
        formula = f"{data.num_episodes} episodes x {num_rows} rows // {config.groups_per_step}"
        if limit is not None:
            formula = f"min({formula}, {limit} max_steps)"
        steps = f"at most {num_steps(config, num_rows)} = {formula}"
    return [*rows, ("steps", steps)]


def _algorithm(config: RunConfig) -> list[Row]:
    algorithm = config.algorithm
    low, high = algorithm.filter_range
    kept = f"groups with an accuracy in ({low}, {high})" if algorithm.dynamic_batching else "all groups"
    ramp = f"over the last {algorithm.overlong_cache_tokens} tokens" if algorithm.overlong_penalty else "off"
    return [
        ("clip", f"{algorithm.clip_low} / {algorithm.clip_high}"),
        ("loss", str(algorithm.loss)),
        ("KL", f"{algorithm.kl_coeff}" + ("" if algorithm.kl_coeff else ", no reference model")),
        ("trains on", kept + (", without truncated responses" if algorithm.mask_truncated else "")),
        ("overlong penalty", ramp),
    ]


def _not_counted(config: RunConfig) -> str:
    if config.trainer.backend == "torch":
        return "what libraries need for themselves"
    return "ColossalAI's own buffers: the torch trainer is what is estimated"


def _consumer_memory(config: RunConfig, size: ModelSize | None) -> list[Row]:
    unknown = _unknown(size)
    if size is None or unknown:
        return [("unknown", unknown)]
    found = memory.estimate(config, size)
    stage = f", on pipeline stage {found.stage}" if config.trainer.pipeline_parallel_size > 1 else ""
    shape = memory.largest_microbatch(config)
    rows = [
        ("parameters", f"{size.num_parameters / 1e6:,.1f} million"),
        ("largest microbatch", f"{shape.rows} x {shape.positions} positions, {shape.response_tokens} response tokens"),
        ("worst moment", f"when {found.moment}{stage}"),
        *((f"- {part.what}", _bytes(part.num_bytes)) for part in found.on_device),
        ("together", f"{_bytes(found.device_bytes)}, without {_not_counted(config)}"),
        *((f"- {part.what}, in the host's memory", _bytes(part.num_bytes)) for part in found.on_host),
    ]
    limit = memory.device_bytes(config)
    if limit is None:
        return [*rows, ("fits", f"give {label('cluster.memory_gib')}=N to hear whether it does")]
    if found.device_bytes <= limit:
        return [*rows, ("fits", f"yes, {_bytes(limit - found.device_bytes)} of {_bytes(limit)} are left")]
    rows.append(("fits", f"NO: {_bytes(found.device_bytes - limit)} more than the {_bytes(limit)} of a device"))
    help_found = memory.what_helps(config, size)
    return [*rows, *(("what helps", _help(change, needed, limit)) for change, needed in help_found)]


def _help(change: dict[str, Any], needed: int, limit: int) -> str:
    settings = " ".join(
        f"{label(path)} {value}" if label(path) != path else f"{path}={str(value).lower()}"
        for path, value in change.items()
    )
    return f"{settings}: {_bytes(needed)}" + (", fits" if needed <= limit else "")


def _unknown(size: ModelSize | None) -> str:
    """Why memory cannot be estimated; empty if it can."""
    if size is None:
        return "the model is not a local folder"
    return (
        "" if size.is_complete else "the model's folder does not say what its config.json and safetensors usually say"
    )


def _other_memory(config: RunConfig, size: ModelSize | None) -> list[Row]:
    ring = ("ring in /dev/shm, per consumer node", _bytes(ring_bytes(config)))
    unknown = _unknown(size)
    if size is None or unknown:
        return [ring, ("producer, per rank", f"unknown: {unknown}")]
    width_bytes = 2 if config.trainer.precision == "bf16" else 4
    ranks_each = config.cluster.producer_tensor_parallel_size
    tokens = config.data.max_prompt_tokens + config.inference.max_new_tokens
    weights = 2 * width_bytes * size.num_parameters // ranks_each
    cache = config.num_slots * tokens * size.kv_values_per_token * width_bytes // ranks_each
    rows = [
        ring,
        ("producer, per rank", f"{_bytes(weights)} (weights and shadow copy)"),
        ("- key-value cache", f"{_bytes(cache)} ({config.num_slots} slots x {tokens} tokens)"),
    ]
    limit = memory.device_bytes(config)
    if limit is not None and weights + cache > limit:
        smaller = ", ".join(label(path) for path in ("inference.inference_microbatch_size", "inference.max_new_tokens"))
        rows.append(("- fits", f"NO: {_bytes(weights + cache - limit)} more than the {_bytes(limit)}; lower {smaller}"))
    return rows


def _bytes(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB else f"{count / _MIB:,.1f} MiB"


def _written(config: RunConfig) -> list[Row]:
    rows = [
        ("models and states", config.checkpoint.save_dir, f"every {config.checkpoint.save_interval} steps"),
        ("rollouts", config.observe.rollout_save_dir, f"every {config.observe.rollout_interval} steps"),
        ("logs and metrics", config.observe.log_dir, "every step"),
    ]
    if config.evaluation.datasets:
        tasks = ", ".join(config.evaluation.datasets)
        rows.insert(
            1, ("evaluations", config.evaluation.save_dir, f"{tasks}, every {config.evaluation.interval} steps")
        )
    return [(name, f"{Path(folder, config.project)}, {when}") for name, folder, when in rows]
