"""Small steps of a small ledger, for example tests."""

from __future__ import annotations

from typing import Any

from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import LedgerOptions, PlanEntry, PlanKind

TRAIN, SAVE, EVAL, STOP, END = PlanKind.TRAIN, PlanKind.SAVE, PlanKind.EVAL, PlanKind.STOP, PlanKind.END


def options(**changes: Any) -> LedgerOptions:
    """S = 2, one producer, one minibatch per step, 10 rows in their own order."""
    values: dict[str, Any] = {
        "num_rows": 10,
        "num_episodes": 1,
        "groups_per_step": 2,
        "groups_per_minibatch": 2,
        "dp_size": 1,
        "num_producers": 1,
        "leases_per_producer": 100,
        "buffer_limit": 100,
        "max_staleness": 1,
    } | changes
    values.setdefault("order", lambda episode: range(values["num_rows"]))
    return LedgerOptions(**values)


def started(**changes: Any) -> Ledger:
    """A ledger whose producers all hold version 0 and ask for as much as they can get."""
    ledger = Ledger(options(**changes))
    for producer in range(ledger.options.num_producers):
        ledger.apply(producer, 0)
        ledger.request(producer, 100)
    return ledger


def grant(ledger: Ledger) -> list[int]:
    return [lease.lease_id for _, lease in ledger.grant()]


def rows(ledger: Ledger) -> list[int]:
    return [lease.row for _, lease in ledger.grant()]


def deliver(ledger: Ledger, *lease_ids: int, num_tokens: int = 10) -> None:
    for lease_id in lease_ids:
        assert ledger.deliver(lease_id, num_tokens, ledger.leased[lease_id].oldest_version, crc=lease_id)


def train(ledger: Ledger, entries: list[PlanEntry]) -> None:
    for entry in entries:
        if entry.kind is TRAIN:
            ledger.trained(entry.sequence)
            if entry.closes_step:
                ledger.commit(entry.version + 1)


def step(ledger: Ledger, *, apply: bool = True) -> list[PlanEntry]:
    """Lease, deliver, plan, train and commit everything that is admitted now."""
    deliver(ledger, *grant(ledger))
    entries = ledger.plan()
    train(ledger, entries)
    ledger.check()
    if apply:
        for producer in range(ledger.options.num_producers):
            ledger.apply(producer, ledger.version)
    return entries


def play(ledger: Ledger) -> list[PlanEntry]:
    """To the end, with evaluations that finish at once."""
    entries: list[PlanEntry] = []
    while not ledger.ended:
        before = len(entries)
        entries += step(ledger)
        assert len(entries) > before or ledger.evaluating, "stuck"
        ledger.evaluating = False
    return entries


def names(entries: list[PlanEntry]) -> list[tuple[PlanKind, int]]:
    return [(entry.kind, entry.version) for entry in entries]
