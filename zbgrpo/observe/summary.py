"""summary.json: what a run did, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from zbgrpo.observe.timeledger import ACCOUNTS, bubble_time, inside, shares_of
from zbgrpo.types import Role


class RankTime(NamedTuple):
    """Final `TimeLedger.snapshot()` of one rank."""

    rank: int
    role: Role
    seconds: Mapping[str, float]


class ByRole(TypedDict):
    """A figure for each role; None for a role without ranks."""

    consumers: float | None
    producers: float | None


class RankShares(TypedDict):
    """Shares of one rank's wall time by account; they add up to 1."""

    role: str
    shares: dict[str, float]


class RunSummary(TypedDict):
    """The content of summary.json. The closing table and `zbgrpo report` read nothing else."""

    run: str
    """Id of the start that wrote it, as in the hub's log: a later start leaves it as it is until it ends itself."""
    steps: int
    """Of the whole run."""
    steps_of_this_start: int
    """Without those of earlier starts; seconds, tokens, samples and time shares are of this start too."""
    seconds: float
    exit_reason: str
    accuracy_before: float | None
    """Of the first evaluation set, 0 to 1; None where not measured."""
    accuracy_after: float | None
    accuracy_before_by_task: dict[str, float | None]
    accuracy_after_by_task: dict[str, float | None]
    ledger: dict[str, int]
    """Groups: leased, consumed, filtered, dropped, live, as the hub gave them."""
    dropped_by_reason: dict[str, int]
    completion_tokens: int
    samples: int
    completion_tokens_per_s: float
    samples_per_s: float
    bubble: ByRole
    time_by_role: dict[str, dict[str, float]]
    """"consumers" and "producers": shares by account over all ranks of the role; empty without ranks."""
    time_shares: dict[str, RankShares]
    """By rank."""
    paths: dict[str, str]


def build_summary(
    *,
    run: str,
    steps: int,
    steps_of_this_start: int | None = None,
    seconds: float,
    exit_reason: str,
    tasks: Sequence[str],
    accuracy_before: Mapping[str, float | None],
    accuracy_after: Mapping[str, float | None],
    ledger: Mapping[str, int],
    dropped_by_reason: Mapping[str, int],
    ranks: Sequence[RankTime],
    num_completion_tokens: int,
    num_samples: int,
    paths: Mapping[str, str | Path],
) -> RunSummary:
    """Put summary.json together.

    `tasks`: evaluation sets in their order; a task that an accuracy lacks is None there. `seconds`,
    `num_completion_tokens` and `num_samples` (trained responses) are of this process, not of earlier lives of the
    run. Rates are per second between startup and shutdown of the consumers, or per second of `seconds` where no time
    was booked. A role's bubble is the lost time of its ranks by their time between startup and shutdown.
    """
    by_role = {
        "consumers": [entry for entry in ranks if entry.role is Role.CONSUMER],
        "producers": [entry for entry in ranks if entry.role is Role.PRODUCER],
    }
    consumers = by_role["consumers"]
    active = sum(inside(entry.seconds) for entry in consumers) / len(consumers) if consumers else 0.0
    rate_seconds = active if active > 0 else seconds
    before = {task: accuracy_before.get(task) for task in tasks}
    after = {task: accuracy_after.get(task) for task in tasks}
    return {
        "run": run,
        "steps": steps,
        "steps_of_this_start": steps if steps_of_this_start is None else steps_of_this_start,
        "seconds": seconds,
        "exit_reason": exit_reason,
        "accuracy_before": next(iter(before.values()), None),
        "accuracy_after": next(iter(after.values()), None),
        "accuracy_before_by_task": before,
        "accuracy_after_by_task": after,
        "ledger": dict(ledger),
        "dropped_by_reason": dict(dropped_by_reason),
        "completion_tokens": num_completion_tokens,
        "samples": num_samples,
        "completion_tokens_per_s": num_completion_tokens / rate_seconds if rate_seconds > 0 else 0.0,
        "samples_per_s": num_samples / rate_seconds if rate_seconds > 0 else 0.0,
        "bubble": {
            "consumers": role_bubble([entry.seconds for entry in consumers]),
            "producers": role_bubble([entry.seconds for entry in by_role["producers"]]),
        },
        "time_by_role": {name: _role_shares(entries) for name, entries in by_role.items()},
        "time_shares": {
            str(entry.rank): {"role": entry.role.value, "shares": shares_of(entry.seconds)} for entry in ranks
        },
        "paths": {name: str(path) for name, path in paths.items()},
    }


def role_bubble(ranks: Sequence[Mapping[str, float]]) -> float | None:
    """Bubble over several ranks, from their seconds by account: lost time by time. None without any such time.

    What is unbooked counts rank by rank, so that a well-kept ledger cannot hide a careless one. For the bubble of one
    step, pass `TimeLedger.delta` of each rank.
    """
    span = sum(inside(seconds) for seconds in ranks)
    return sum(bubble_time(seconds) for seconds in ranks) / span if span > 0 else None


def _role_shares(entries: Sequence[RankTime]) -> dict[str, float]:
    if not entries:
        return {}
    return shares_of({name: sum(entry.seconds.get(name, 0.0) for entry in entries) for name in ACCOUNTS})
