"""What became of the groups of a run, counted from the hub's event log; how old they were, from the consumers'."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

ENDS = ("consumed", "filtered", "dropped", "returned")


@dataclass
class _Live:
    producer: int
    state: str
    since: float | None


@dataclass
class Start:
    """One start of the run."""

    version: int
    """The version that it began with."""
    time: float | None
    taken_back: int
    """Groups that were under way when the start before it ended, and are generated again."""


@dataclass
class GroupBook:
    """Hand every event of the hub's log to `handle`, in order."""

    starts: list[Start] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    by_producer: dict[int, Counter[str]] = field(default_factory=dict)
    """Per producer: leased, buffered (arrived), filtered, dropped, returned, tokens."""
    drop_reasons: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"generation": [], "buffer": [], "training": []})
    """How long groups took: from the lease to their arrival, from there to the plan, from there to the commit."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Peer name (`producer:0`) to rank."""
    version: int = 0
    run: str = ""
    """Id of the last start."""
    end: str | None = None
    """`end` or `stop` where the plan of the last start has come there."""
    failure: str | None = None
    stop_reason: str | None = None
    last_time: float | None = None
    _live: dict[int, _Live] = field(default_factory=dict)

    def handle(self, event: dict[str, Any]) -> None:
        """Take one event. Raises KeyError or TypeError for one that lacks what it should have."""
        kind, now = event["kind"], event.get("time")
        self.last_time = now if now is not None else self.last_time
        if kind == "started":
            self._start(event, now)
        elif kind == "hello":
            self.ranks[event["peer"]] = event["rank"]
        elif kind == "leased":
            self.totals["leased"] += 1
            self._live[event["lease"]] = _Live(event["producer"], "leased", now)
            self._count(event["producer"], "leased")
        elif kind == "buffered":
            group = self._move(event["lease"], "buffered", now, "generation")
            if group is not None:
                self._count(group.producer, "buffered")
                self._count(group.producer, "tokens", event["tokens"])
        elif kind == "plan":
            for lease in (lease for rank in event["ranks"] for lease in rank):
                self._move(lease, "planned", now, "buffer")
            if event["entry"] in ("end", "stop"):
                self.end = event["entry"]
        elif kind in ENDS:
            self._settle(event, now)
        elif kind == "commit":
            self.version = event["version"]
        elif kind == "failed":
            self.failure = event["error"]
        elif kind == "stop_request":
            self.stop_reason = event["reason"]

    @property
    def live(self) -> Counter[str]:
        """Groups under way by state: leased, buffered, planned."""
        return Counter(group.state for group in self._live.values())

    @property
    def num_taken_back(self) -> int:
        return sum(start.taken_back for start in self.starts)

    def _start(self, event: dict[str, Any], now: float | None) -> None:
        # Groups that were under way are pending again in a resumed run, and leased anew.
        self.starts.append(Start(event["version"], now, len(self._live)))
        self._live.clear()
        self.run, self.version = event["run"], event["version"]
        self.end, self.failure, self.stop_reason = None, None, None

    def _count(self, producer: int, what: str, number: int = 1) -> None:
        self.by_producer.setdefault(producer, Counter())[what] += number

    def _move(self, lease: int, state: str, now: float | None, measured: str) -> _Live | None:
        group = self._live.get(lease)
        if group is not None:
            if now is not None and group.since is not None:
                self.seconds[measured].append(now - group.since)
            group.state, group.since = state, now
        return group

    def _settle(self, event: dict[str, Any], now: float | None) -> None:
        kind, group = event["kind"], self._live.pop(event["lease"], None)
        if group is None:
            return
        if kind == "consumed" and now is not None and group.since is not None:
            self.seconds["training"].append(now - group.since)
        self.totals[kind] += 1
        self._count(group.producer, kind)
        if kind == "dropped":
            self.drop_reasons[event["reason"]] += 1


@dataclass
class Lags:
    """Ages of trained groups, in versions, each group once."""

    oldest: Counter[int] = field(default_factory=Counter)
    """Groups by the lag of their oldest token."""
    newest: Counter[int] = field(default_factory=Counter)
    _seen: set[int] = field(default_factory=set)

    def add(self, lease: int, step: int, oldest: int, newest: int) -> None:
        """A consumer has trained a group; the ranks of one data-parallel group all say so."""
        if lease not in self._seen:
            self._seen.add(lease)
            self.oldest[step - oldest] += 1
            self.newest[step - newest] += 1


def quantile(values: list[float], share: float) -> float | None:
    """The value that `share` of the others do not exceed; None of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None
