"""Which evaluation rows are leased, and what came of them. One evaluation, of one version, at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct


class EvaluationLease(Struct, frozen=True):
    """Permission to answer one row of one task with exactly this version."""

    lease_id: int
    task: str
    row: int
    version: int


class EvaluationResult(Struct, frozen=True):
    """What became of one row: one entry per response. `text` is kept for the evaluation file."""

    task: str
    row: int
    version: int
    rewards: list[float]
    ans_acc: list[float]
    format_acc: list[float]
    lengths: list[int]
    truncated: list[bool]
    texts: list[str]
    error: str | None = None


@dataclass
class _Running:
    version: int
    pending: deque[tuple[str, int]]
    leased: dict[int, tuple[int, EvaluationLease]] = field(default_factory=dict)  # by lease id: producer, lease
    results: list[EvaluationResult] = field(default_factory=list)


class EvaluationBook:
    """States of a row: PENDING -> LEASED -> DONE; back to PENDING when its producer gives it back.

    Invariant: while an evaluation runs, every row of every task is in exactly one state; it is done when all are DONE,
    and then `finish` returns each row exactly once. Only `evaluators` of the producers take part: max(1, P // 4).
    Example: 2 producers, 3 rows: producer 0 gets all three, producer 1 goes on with training leases.
    """

    def __init__(self, num_rows: dict[str, int], num_producers: int, leases_per_producer: int) -> None:
        self.num_rows = num_rows
        self.evaluators = tuple(range(max(1, num_producers // 4)))
        self._limit = leases_per_producer
        self._next_lease_id = 0
        self._running: _Running | None = None

    @property
    def version(self) -> int | None:
        """The version under evaluation; None between evaluations."""
        return None if self._running is None else self._running.version

    def start(self, version: int) -> None:
        """Begin to evaluate a version; none may be running."""
        assert self._running is None, "one evaluation at a time"
        rows = [(task, row) for task, count in self.num_rows.items() for row in range(count)]
        self._running = _Running(version, deque(rows))

    def grant(self, producer: int) -> list[EvaluationLease]:
        """All rows that this producer, which holds the version, may answer now."""
        running, granted = self._running, []
        if running is None or producer not in self.evaluators:
            return []
        held = sum(owner == producer for owner, _ in running.leased.values())
        while running.pending and held < self._limit:
            task, row = running.pending.popleft()
            lease = EvaluationLease(self._next_lease_id, task, row, running.version)
            self._next_lease_id += 1
            running.leased[lease.lease_id] = (producer, lease)
            granted.append(lease)
            held += 1
        return granted

    def deliver(self, lease_id: int, result: EvaluationResult) -> bool:
        """A row was answered; False when its lease is not live (a duplicate)."""
        if self._running is None or self._running.leased.pop(lease_id, None) is None:
            return False
        self._running.results.append(result)
        return True

    def give_back(self, lease_id: int) -> bool:
        """The row was not answered and is leased again; False when its lease is not live."""
        if self._running is None or (held := self._running.leased.pop(lease_id, None)) is None:
            return False
        self._running.pending.append((held[1].task, held[1].row))
        return True

    def finish(self) -> list[EvaluationResult] | None:
        """The results by task and row when every row is done, and ready for the next; None before that."""
        running = self._running
        if running is None or running.pending or running.leased:
            return None
        self._running = None
        tasks = list(self.num_rows)
        return sorted(running.results, key=lambda r: (tasks.index(r.task), r.row))
