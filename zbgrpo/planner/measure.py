"""Rates from the logs of a short run: `zbgrpo plan --from logs/PROJECT`.

What is read, beside config.yaml:

- `decode` lines of producers: sums over decode steps, and over turns of the loop between them, to which the cost of a
  step and of a response is fitted;
- `sent` and `filtered` lines of producers: lengths, scoring time;
- `minibatch` and `commit` lines of consumers: training time, accounts of their time;
- `published` lines of the source, `applied` lines of producers, `buffered` lines of the hub.

The first versions are left out, since whatever runs for the first time takes longer. A step's own cost and that of a
slot can only be told apart if the slots were not always equally full: with `--max-staleness 0` they are full and nearly
empty in every step. But where generation and training share memory, both are slower while the other one works, and only
a run that is as asynchronous as the planned one measures that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from zbgrpo.config.load import load_yaml
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import RunFolderError
from zbgrpo.planner.rates import DecodeRates, LengthRates, Rates, TrainRates, WeightRates

Event = dict[str, Any]

_NUM_WARMUP_VERSIONS = 2
_MAX_GROUPS = 4096  # whose lengths are kept
_KNOTS = [4**n for n in range(1, 8)]
_LEAST_SPREAD = 0.05
"""Of tokens, as a share of their mean: below it a fixed cost cannot be told from one by token."""
_MOST_HUB_SECONDS = 0.1  # more is a difference between the clocks of two nodes


@dataclass(frozen=True)
class Measured:
    """What a run was and how fast its parts were."""

    rates: Rates
    config: RunConfig
    num_versions: int
    """That the rates come from."""


def measure(log_dir: str | Path) -> Measured:
    """Rates of a run, from its log folder. Raises RunFolderError when there is too little in it."""
    folder = Path(log_dir)
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        raise RunFolderError(f"{folder}: no config.yaml: not the log folder of a run (logs/PROJECT)") from None
    config = load_yaml(text, str(folder / "config.yaml"))
    logs = _Logs(folder)
    if logs.num_versions <= 2 * _NUM_WARMUP_VERSIONS:
        raise RunFolderError(
            f"{folder}: {logs.num_versions} optimizer steps are too few to measure rates; run at least "
            f"{2 * _NUM_WARMUP_VERSIONS + 1} (--max-steps)"
        )
    verdicts = [*logs.of("sent"), *logs.of("filtered")]
    verdicts = [verdict for verdict in verdicts if "lengths" in verdict]
    if not logs.of("decode") or not logs.of("minibatch") or not verdicts:
        raise RunFolderError(f"{folder}: the event logs do not say what decoding and training cost")
    hub_seconds = _hub_seconds(logs)
    rates = Rates(
        decode=_decode_rates(logs, config.inference.num_generations),
        train=_train_rates(logs, config),
        weights=_weight_rates(logs),
        lengths=LengthRates(groups=_lengths(logs, "sent"), filtered_groups=_lengths(logs, "filtered")),
        prompt_tokens=_mean([verdict["prompt_tokens"] for verdict in verdicts]),
        filtered_share=len(logs.of("filtered")) / len(verdicts),
        reward_seconds=_mean([verdict["scoring_seconds"] for verdict in verdicts]),
        hub_seconds=hub_seconds,
        save_seconds=max(0.0, logs.seconds_after_last_commit() - 2 * hub_seconds),
    )
    return Measured(rates.check(), config, logs.num_versions)


class _Logs:
    """The event logs of a run: those of the hub, and of ranks by rank."""

    def __init__(self, folder: Path) -> None:
        events = folder / "events"
        self.hub = list(_read(events / "hub.jsonl")) if (events / "hub.jsonl").exists() else []
        self.ranks = {int(path.stem.partition("-")[2]): list(_read(path)) for path in events.glob("rank-*.jsonl")}
        self.num_versions = sum(event["kind"] == "commit" for event in self.hub)

    def of(self, kind: str) -> list[Event]:
        """Lines of one kind, of all ranks."""
        return [event for events in self.ranks.values() for event in events if event["kind"] == kind]

    def steps(self, rank: int, kind: str) -> list[Event]:
        """Lines of one kind of a rank, without the first versions."""
        events = [event for event in self.ranks[rank] if event["kind"] == kind]
        return [e for e in events if int(e.get("step", e.get("version", 0)) or 0) >= _NUM_WARMUP_VERSIONS]

    def intervals(self, rank: int, kind: str) -> Iterator[tuple[dict[str, float], Event]]:
        """What each account got between two lines of a rank, and the second line; not across a restart."""
        lines = [event for event in self.steps(rank, kind) if "times" in event]
        for before, event in pairwise(lines):
            passed = {name: value - before["times"].get(name, 0.0) for name, value in event["times"].items()}
            if min(passed.values()) >= -1e-3:
                yield passed, event

    def seconds_after_last_commit(self) -> float:
        """How long producers were kept after the last commit."""
        commits = [event["time"] for event in self.of("commit")]
        last = [event["time"] for event in self.of("decode")]
        ended = any(event["kind"] == "plan" and event["entry"] == "end" for event in self.hub)
        return max(0.0, max(last) - max(commits)) if ended else 0.0


def _read(path: Path) -> Iterator[Event]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline is nothing, or a torn line
        try:
            yield msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError as error:
            raise RunFolderError(f"{path}:{number}: not a JSON object: {error}") from None


def _decode_rates(logs: _Logs, generations: int) -> DecodeRates:
    steps: list[list[float]] = []
    turns: list[list[float]] = []
    for rank in logs.ranks:
        for event in logs.steps(rank, "decode"):
            for num, occupied, started, finished, seconds, _ in event["rows"]:
                steps.append([num, occupied, num if started else 0, started, finished, seconds])
        for passed, event in logs.intervals(rank, "decode"):
            if not passed.get("eval"):  # rows of an evaluation are sent with their texts
                turns += event["turns"]
    if not steps:
        raise RunFolderError("no decode steps behind the first versions: measure with a longer run")
    step, slots, (prompt_step, start, finish) = _fit_bent(steps)
    loop, finished, scored = _fit(turns) if turns else (0.0, 0.0, 0.0)
    return DecodeRates(
        step_seconds=step,
        slot_seconds=slots[0][1],
        bends=[(knot, bend) for (_, before), (knot, slope) in pairwise(slots) if (bend := round(slope - before, 12))],
        prompt_step_seconds=prompt_step,
        prompt_seconds=start * generations,
        finish_seconds=finish,
        response_seconds=finished + scored,
        loop_seconds=loop,
    )


def _train_rates(logs: _Logs, config: RunConfig) -> TrainRates:
    rows: list[list[float]] = []
    overheads: list[float] = []
    for rank in logs.ranks:
        spent: dict[int, float] = defaultdict(float)
        for event in logs.steps(rank, "minibatch"):
            num = -(-event["responses"] // config.trainer.train_microbatch_size)
            rows.append([num, event["tokens"], event["seconds"]])
            spent[event["step"]] += event["seconds"]
        for passed, event in logs.intervals(rank, "commit"):
            if not passed.get("eval"):
                # Up to the commit that makes a version it is the version before that is trained.
                overheads.append(passed["busy"] + passed.get("unbooked", 0.0) - spent[event["version"] - 1])
    tokens = np.array([row[1] for row in rows])
    if tokens.std() < _LEAST_SPREAD * tokens.mean():
        microbatch, token = 0.0, sum(row[2] for row in rows) / float(tokens.sum())
    else:
        microbatch, token = _fit(rows)
    return TrainRates(
        microbatch_seconds=microbatch, token_seconds=token, commit_seconds=max(0.0, _mean(overheads) if rows else 0.0)
    )


def _weight_rates(logs: _Logs) -> WeightRates:
    copies = [passed["blocked_on_weights"] for rank in logs.ranks for passed, _ in logs.intervals(rank, "commit")]
    blocked, applied = 0.0, 0
    for events in logs.ranks.values():
        lines = [event for event in events if event["kind"] == "decode"]
        if lines:
            blocked += lines[-1]["times"]["blocked_on_weights"]
            applied += sum(event["kind"] == "applied" and event["version"] > 0 for event in events)
    sent = [event["seconds"] for event in logs.of("published") if event["version"] >= _NUM_WARMUP_VERSIONS]
    return WeightRates(
        copy_seconds=max(0.0, _mean(copies)),
        broadcast_seconds=_mean(sent),
        apply_seconds=blocked / applied if applied else 0.0,
    )


def _hub_seconds(logs: _Logs) -> float:
    """Mean time of a message to the hub, without the slowest twentieth."""
    sent = {event["lease"]: event["time"] for event in logs.of("sent")}
    taken = [e["time"] - sent[e["lease"]] for e in logs.hub if e["kind"] == "buffered" and e["lease"] in sent]
    taken = sorted(taken)[: max(1, len(taken) * 19 // 20)]
    return min(_MOST_HUB_SECONDS, max(0.0, _mean(taken)))


def _lengths(logs: _Logs, kind: str) -> list[list[int]]:
    groups = [event["lengths"] for event in logs.of(kind) if event.get("lengths")]
    return groups[:: max(1, -(-len(groups) // _MAX_GROUPS))]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _fit_bent(steps: Sequence[Sequence[float]]) -> tuple[float, list[tuple[int, float]], list[float]]:
    """Rows as of `_fit`, of which the second column is occupied slots: what a step takes by itself; (slots, seconds of
    each slot beyond them) from 0 on; the coefficients of the other columns.

    The cost of a step rises with its slots, along straight lines between powers of four: caches and the shapes of
    matrices make it neither one line nor always convex.
    """
    table = np.array(steps, float)
    occupied = table[:, 1] / np.maximum(table[:, 0], 1)
    knots = [knot for knot in _KNOTS if occupied.min() <= knot < occupied.max()]
    edges = [0, *knots, np.inf]
    parts = [table[:, 0] * np.clip(occupied - low, 0, high - low) for low, high in pairwise(edges)]
    step, *found = _fit(np.column_stack([table[:, :1], *parts, table[:, 2:]]).tolist())
    return step, list(zip([0, *knots], found[: len(parts)], strict=True)), found[len(parts) :]


def _fit(rows: Sequence[Sequence[float]]) -> list[float]:
    """Coefficients, none negative, with which the columns but the last add up to the last.

    Least squares; a row is a sum over as many steps (or passes) as its first column says, and weighs accordingly. A
    column whose coefficient comes out negative explains nothing: it is left out, one at a time.
    """
    table = np.array(rows, float)
    table /= np.sqrt(np.maximum(table[:, :1], 1.0))
    columns, wanted = table[:, :-1], table[:, -1]
    kept = [index for index in range(columns.shape[1]) if columns[:, index].any()]
    found = np.zeros(columns.shape[1])
    while kept:
        scale = np.linalg.norm(columns[:, kept], axis=0)
        solution = np.linalg.lstsq(columns[:, kept] / scale, wanted, rcond=1e-6)[0] / scale
        if (solution >= 0).all():
            found[kept] = solution
            break
        kept.pop(int(np.argmin(solution * scale)))
    return [float(value) for value in found]
