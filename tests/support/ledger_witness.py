"""Independent books over a `Ledger`: what it says in public (events and plan entries) must keep all its promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import LedgerOptions, PlanEntry, PlanKind
from zbgrpo.types import DropReason, Uid


class Witness:
    """Books of its own over one ledger, and all that must hold of it."""

    def __init__(self, options: LedgerOptions) -> None:
        self.options = options
        self.order = {
            Uid(episode, row): (episode, position)
            for episode in range(options.num_episodes)
            for position, row in enumerate(options.order(episode))
        }
        self.outcome: dict[Uid, str] = {}  # consumed, filtered, dropped, end
        self.attempts: Counter[Uid] = Counter()  # times the uid was given back
        self.leases: Counter[tuple[Uid, int]] = Counter()
        self.totals: Counter[str] = Counter()
        self.version = 0
        self.begin()

    def begin(self) -> None:
        """A new ledger takes over: live groups are pending again, with the attempt they had."""
        for uid, _ in [*getattr(self, "leased", {}).values(), *getattr(self, "buffered", {}).values()]:
            self._forget(uid)
        for uid, _, _ in getattr(self, "planned", {}).values():
            self._forget(uid)
        self.leased: dict[int, tuple[Uid, int]] = {}  # lease id -> uid, applied version at its lease
        self.buffered: dict[int, tuple[Uid, int]] = {}  # lease id -> uid, oldest version; in order of arrival
        self.planned: dict[int, tuple[Uid, int, int]] = {}  # ... and the step that trains it
        self.applied = [-1] * self.options.num_producers
        self.held: Counter[int] = Counter()
        self.owner: dict[int, int] = {}
        self.entries: list[PlanEntry] = []
        self.step, self.in_step, self.minibatch = self.version, 0, 0
        self.outstanding: set[int] = set()
        self.evaluating = False
        self.stopping = False  # set by whoever asks the ledger to stop
        self.due: list[PlanKind] = []
        self.saved = self.evaluated = self.version
        self.last_place = (-1, -1)

    def _forget(self, uid: Uid) -> None:
        self.leases[uid, self.attempts[uid]] -= 1
        self.totals["leased"] -= 1

    @property
    def occupied(self) -> int:
        return self.totals["consumed"] + len(self.planned) + len(self.buffered) + len(self.leased)

    @property
    def ended(self) -> bool:
        return bool(self.entries) and self.entries[-1].kind in (PlanKind.STOP, PlanKind.END)

    def bound(self, producer: int) -> int:
        versions = self.applied[producer] + 1 + self.options.max_staleness
        if self.options.max_steps is not None:
            versions = min(versions, self.options.max_steps)
        return versions * self.options.groups_per_step

    # ------------------------------------------------------------ what the ledger says

    def watch(self, ledger: Ledger) -> None:
        """Take the events since the last call and compare the books."""
        for event in ledger.events:
            assert event["kind"] != "leased" or event["producer"] not in ledger.reserved
            getattr(self, f"_see_{event['kind']}")(event)
        ledger.events.clear()
        ledger.check()
        assert ledger.version == self.version
        assert list(ledger.leased) == list(self.leased)
        assert list(ledger.buffered) == list(self.buffered)
        assert set(ledger.planned) == set(self.planned)
        assert ledger.totals == {
            name: self.totals[name] for name in ("leased", "returned", "consumed", "filtered", "dropped")
        }
        ends = sum(self.totals[name] for name in ("returned", "consumed", "filtered", "dropped"))
        assert self.totals["leased"] == ends + len(self.leased) + len(self.buffered) + len(self.planned)
        assert sum(ledger.dropped_by_reason.values()) == self.totals["dropped"]

    def _see_leased(self, event: dict[str, Any]) -> None:
        uid, attempt, producer = Uid(*event["uid"]), event["attempt"], event["producer"]
        assert uid in self.order and uid not in self.outcome
        assert not self.stopping and not self.ended
        assert attempt == self.attempts[uid] < self.options.max_attempts
        assert self.leases[uid, attempt] == 0, "leased twice with one attempt number"
        assert event["applied"] == self.applied[producer] >= 0
        assert event["place"] == self.occupied < self.bound(producer), "admission"
        if self.options.synchronous:
            assert all(applied == self.version for applied in self.applied)
        else:
            assert len(self.buffered) < self.options.buffer_limit
            assert self.held[producer] < self.options.leases_per_producer
        self.leases[uid, attempt] += 1
        self.totals["leased"] += 1
        self.held[producer] += 1
        self.owner[event["lease"]] = producer
        self.leased[event["lease"]] = (uid, event["applied"])

    def _leave(self, event: dict[str, Any]) -> tuple[Uid, int]:
        self.held[self.owner[event["lease"]]] -= 1
        uid, applied = self.leased.pop(event["lease"])
        assert uid == Uid(*event["uid"]) and event["attempt"] == self.attempts[uid]
        return uid, applied

    def _see_buffered(self, event: dict[str, Any]) -> None:
        uid, applied = self._leave(event)
        assert event["oldest"] >= applied
        self.buffered[event["lease"]] = (uid, event["oldest"])

    def _see_filtered(self, event: dict[str, Any]) -> None:
        uid, _ = self._leave(event)
        self._end(uid, "filtered", "filtered")

    def _see_returned(self, event: dict[str, Any]) -> None:
        uid, _ = self._leave(event)
        self.attempts[uid] += 1
        self.totals["returned"] += 1

    def _see_dropped(self, event: dict[str, Any]) -> None:
        if event["reason"] == DropReason.END.value:
            lease_id = event["lease"]
            if lease_id in self.planned:
                assert self.planned[lease_id][2] == self.step, "a group of a full step was dropped"
            uid = (self.planned if lease_id in self.planned else self.buffered).pop(lease_id)[0]
            self._end(uid, "end", "dropped")
        else:
            self._end(self._leave(event)[0], "dropped", "dropped")

    def _see_consumed(self, event: dict[str, Any]) -> None:
        uid, oldest, step = self.planned.pop(event["lease"])
        assert (uid, oldest, step) == (Uid(*event["uid"]), event["oldest"], event["step"])
        self._end(uid, "consumed", "consumed")

    def _end(self, uid: Uid, outcome: str, total: str) -> None:
        assert uid not in self.outcome, "ended twice"
        self.outcome[uid] = outcome
        self.totals[total] += 1

    def _see_commit(self, event: dict[str, Any]) -> None:
        self.version += 1
        assert event["version"] == self.version
        assert self.totals["consumed"] == self.version * self.options.groups_per_step

    # ------------------------------------------------------------ the plan

    def _see_plan(self, event: dict[str, Any]) -> None:
        assert not self.ended, "an entry after the last"
        assert not self.stopping or event["entry"] == PlanKind.STOP.value, "STOP comes next"
        entry = PlanEntry(
            sequence=event["sequence"],
            kind=PlanKind(event["entry"]),
            version=event["version"],
            minibatch=event["minibatch"],
            closes_step=event["closes"],
            ranks=event["ranks"],
        )
        assert entry.sequence == len(self.entries)
        assert entry.version == self.step, "versions of the plan go up one by one"
        self.entries.append(entry)
        getattr(self, f"_see_{entry.kind.value}")(entry)

    def _see_train(self, entry: PlanEntry) -> None:
        options = self.options
        assert not self.due, "SAVE and EVAL stand directly behind the step they belong to"
        assert options.max_steps is None or self.step < options.max_steps
        assert [len(rank) for rank in entry.ranks] == [
            options.groups_per_minibatch // options.dp_size
        ] * options.dp_size
        lease_ids = [lease_id for rank in entry.ranks for lease_id in rank]
        assert len(set(lease_ids)) == options.groups_per_minibatch
        if not options.strict:
            assert set(lease_ids) == set(list(self.buffered)[: len(lease_ids)]), "not in order of arrival"
        places = []
        for lease_id in lease_ids:
            uid, oldest = self.buffered.pop(lease_id)
            if options.strict:
                assert self.step - oldest <= options.max_staleness, "too old in strict mode"
            self.planned[lease_id] = (uid, oldest, self.step)
            places.append(self.order[uid])
        if options.synchronous:
            assert min(places) > self.last_place, "not in data order"
            self.last_place = max(places)
        assert entry.minibatch == self.minibatch
        self.outstanding.add(entry.sequence)
        assert len(self.outstanding) <= options.plan_ahead
        self.in_step, self.minibatch = self.in_step + len(lease_ids), self.minibatch + 1
        assert entry.closes_step == (self.in_step == options.groups_per_step)
        if entry.closes_step:
            self.step, self.in_step, self.minibatch = self.step + 1, 0, 0
            for kind, interval in ((PlanKind.SAVE, options.save_interval), (PlanKind.EVAL, options.eval_interval)):
                if interval and self.step % interval == 0:
                    self.due.append(kind)

    def _see_save(self, entry: PlanEntry) -> None:
        if self.due:
            assert self.due.pop(0) is PlanKind.SAVE
        assert entry.version > self.saved, "saved twice"
        self.saved = entry.version

    def _see_eval(self, entry: PlanEntry) -> None:
        if self.due:
            assert self.due.pop(0) is PlanKind.EVAL
        assert self.options.eval_interval and entry.version > self.evaluated, "evaluated twice"
        assert not self.evaluating, "two evaluations at a time"
        self.evaluated, self.evaluating = entry.version, True

    def _see_stop(self, entry: PlanEntry) -> None:
        pass

    def _see_end(self, entry: PlanEntry) -> None:
        assert not self.due and not self.evaluating and not self.leased and not self.buffered
        assert self.saved == self.step, "the last step was not saved"
        assert not self.options.eval_interval or self.evaluated == self.step, "the last step was not evaluated"
        assert all(step < self.step for _, _, step in self.planned.values()), "a half step is left"

    # ------------------------------------------------------------ nothing is held back

    def check_grant(self, ledger: Ledger, wanted: list[int]) -> None:
        """After `grant`: whoever may have a lease and asked for one has it."""
        if self.options.synchronous or self.ended or self.stopping:
            return
        if not ledger.data.has_next or len(self.buffered) >= self.options.buffer_limit:
            return
        for producer in set(range(self.options.num_producers)) - ledger.reserved:
            room = min(wanted[producer], self.options.leases_per_producer - self.held[producer])
            assert room <= 0 or self.applied[producer] < 0 or self.occupied >= self.bound(producer)

    def check_plan(self, ledger: Ledger) -> None:
        """After `plan`: nothing waits that need not wait."""
        options = self.options
        if self.ended:
            return
        if self.due:
            # A state does not overtake an evaluation that the next one has to wait for.
            assert self.due[-1] is PlanKind.EVAL and self.evaluating
            return
        exhausted = not ledger.data.has_next and not self.leased
        full = options.max_steps is not None and self.step >= options.max_steps
        if full or (exhausted and len(self.buffered) + self.in_step < options.groups_per_step):
            assert self.evaluating, "END is due"
        elif len(self.outstanding) < options.plan_ahead:
            awaited = self.leased or (options.synchronous and ledger.data.first_retried)
            if not (options.strict and awaited):
                assert len(self.buffered) < options.groups_per_minibatch, "a full minibatch waits"

    def check_end(self) -> None:
        """After END and the last commit: every uid has one end, and as many steps as possible were made."""
        options, totals = self.options, self.totals
        assert not self.leased and not self.buffered and not self.planned
        assert totals["leased"] == sum(totals[name] for name in ("consumed", "filtered", "dropped", "returned"))
        assert set(self.leases.values()) <= {0, 1}
        outcomes = Counter(self.outcome.values())
        effective = outcomes["consumed"] + outcomes["end"]
        assert outcomes["consumed"] == self.version * options.groups_per_step
        assert outcomes["end"] < options.groups_per_step
        if options.max_steps is not None and self.version >= options.max_steps:
            assert self.version == options.max_steps and outcomes["end"] == 0
        else:
            assert set(self.outcome) == set(self.order), "uids were never leased"
            assert self.version == effective // options.groups_per_step
        for uid in self.outcome:
            assert [self.leases[uid, a] for a in range(self.attempts[uid] + 1)] == [1] * (self.attempts[uid] + 1)
