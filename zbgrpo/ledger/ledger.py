"""The ledger: a pure state machine over groups. The hub feeds it messages and sends what it returns.

States of a group (design: one lease is the only credit there is):

    PENDING -> LEASED -> BUFFERED -> PLANNED -> CONSUMED      when the step that trained it commits
                  |-> FILTERED                                 statistics kept, payload never sent
                  |-> PENDING, attempt + 1                     infrastructure error, at most `max_attempts` attempts
                  |-> DROPPED with a reason                    also from BUFFERED and PLANNED at the end of a run

Invariants (`check` asserts them, tests call it after every event):
- leased in total = consumed + filtered + dropped + returned + live, and a uid is consumed at most once;
- a lease to producer p is only made while consumed + planned + buffered + leased < (a_p + 1 + max_staleness) x S,
  so a group that arrives in turn trains with a lag within max_staleness;
- plan entries have consecutive numbers; TRAIN entries of a step name exactly S groups.

Example: S = 2, max_staleness = 1, one producer with version 0 applied: it gets leases for (0 + 1 + 1) x 2 = 4 groups.
When the first step commits (consumed 2) nothing changes until the producer applies version 1: then 2 more.
"""

from __future__ import annotations

from typing import Any

from zbgrpo.errors import ProtocolError
from zbgrpo.ledger import planning
from zbgrpo.ledger.order import DataOrder
from zbgrpo.ledger.records import Lease, LedgerOptions, LiveGroup, PlanEntry, PlanKind
from zbgrpo.types import DropReason


class Ledger:
    """See the module's text. Methods are events; `grant` and `plan` give what may happen next, and record it."""

    def __init__(self, options: LedgerOptions) -> None:
        self.options = options
        self.version = 0
        """Committed optimizer steps."""
        self.leased: dict[int, LiveGroup] = {}
        self.buffered: dict[int, LiveGroup] = {}
        self.planned: dict[int, LiveGroup] = {}
        self.totals = dict.fromkeys(("leased", "returned", "consumed", "filtered", "dropped"), 0)
        self.dropped_by_reason: dict[str, int] = {reason.value: 0 for reason in DropReason}
        self.events: list[dict[str, Any]] = []
        """What happened since the caller last emptied the list, for the hub's log."""
        self.applied = [-1] * options.num_producers
        self.reserved: set[int] = set()
        """Producers that evaluate and take no training leases."""
        self.evaluating = False
        """Set by the caller while an evaluation runs: the next one, and the end, wait for it."""
        self.ended = False
        self.saved_version = 0
        self.evaluated_version = 0
        self._wanted = [0] * options.num_producers
        self._held = [0] * options.num_producers
        self._asking: set[int] = set()  # producers that want leases and may hold more
        self._next_lease_id = 0
        self.data = DataOrder(options.num_rows, options.num_episodes, options.order)
        self._sequence = 0
        self._stop_requested = False
        self._open = self._open_step(0)
        self._outstanding: set[int] = set()  # TRAIN entries not yet trained
        self._marks: list[PlanKind] = []  # SAVE and EVAL entries due behind the step just planned
        self._turn = 0

    # ---------------------------------------------------------------- leases

    @property
    def num_live(self) -> int:
        return len(self.leased) + len(self.buffered) + len(self.planned)

    @property
    def filled_places(self) -> int:
        """consumed + planned: places that are taken for good."""
        return self.version * self.options.groups_per_step + len(self.planned)

    @property
    def occupied_places(self) -> int:
        """consumed + planned + buffered + leased: the place at which one more group would be trained."""
        return self.filled_places + len(self.buffered) + len(self.leased)

    def admits(self, producer: int) -> bool:
        """Whether one more training lease may go to this producer now."""
        applied = self.applied[producer]
        return applied >= 0 and producer not in self.reserved and self._has_room(applied)

    def _has_room(self, applied: int) -> bool:
        """Whether one more group may be begun with this version."""
        options = self.options
        if self.ended or self._stop_requested or not self.data.has_next:
            return False
        places = (applied + 1 + options.max_staleness) * options.groups_per_step
        if options.max_steps is not None:
            places = min(places, options.max_steps * options.groups_per_step)
        if self.occupied_places >= places:
            return False
        # In the synchronous mode a whole round waits in the buffer for its first group, so S is the bound there.
        return options.synchronous or len(self.buffered) < options.buffer_limit

    def request(self, producer: int, num_wanted: int) -> None:
        """Producer has room for this many more leases (the newest request counts)."""
        self._wanted[producer] = num_wanted
        self._note(producer)

    def _note(self, producer: int) -> None:
        """What the producer wants or holds has changed."""
        asks = self._wanted[producer] > 0 and self._held[producer] < self.options.leases_per_producer
        (self._asking.add if asks else self._asking.discard)(producer)

    def apply(self, producer: int, version: int) -> None:
        """Producer generates with `version` from now on. Versions never go back."""
        if version < self.applied[producer]:
            raise ProtocolError(f"producer {producer} went back from version {self.applied[producer]} to {version}")
        self.applied[producer] = version

    def grant(self) -> list[tuple[int, Lease]]:
        """Make all leases admitted and asked for now (synchronous: a round, asked for or not): producer, lease."""
        return self._grant_round() if self.options.synchronous else self._grant_turns()

    def _grant_turns(self) -> list[tuple[int, Lease]]:
        # One lease each, round after round from `_turn` on, as long as anybody who asks is admitted.
        granted: list[tuple[int, Lease]] = []
        num_producers, before = self.options.num_producers, -1
        while before < len(granted) and self._has_room(self.version):
            before = len(granted)
            for producer in sorted(self._asking, key=lambda p: (p - self._turn) % num_producers):
                if self.admits(producer):
                    granted.append((producer, self._lease(producer)))
                    self._wanted[producer] -= 1
                    self._note(producer)
            self._turn = (granted[-1][0] + 1) % num_producers if granted else self._turn
        return granted

    def _grant_round(self) -> list[tuple[int, Lease]]:
        # A round starts when nothing is being generated and everybody holds the newest version, and deals its groups
        # in data order, so that what a producer decodes together depends on nothing but the data.
        if self.leased or self.reserved or any(applied != self.version for applied in self.applied):
            return []
        granted = []
        for turn in range(self.options.groups_per_step):
            producer = turn % self.options.num_producers
            if not self.admits(producer):
                break
            granted.append((producer, self._lease(producer)))
        return granted

    def _lease(self, producer: int) -> Lease:
        (episode, row), attempt = self.data.next()
        lease = Lease(self._next_lease_id, episode, row, attempt)
        self._next_lease_id += 1
        place = self.occupied_places
        self.leased[lease.lease_id] = LiveGroup(lease, producer, self.applied[producer])
        self._held[producer] += 1
        self.totals["leased"] += 1
        self._emit("leased", lease, producer=producer, applied=self.applied[producer], place=place)
        return lease

    # ---------------------------------------------------------------- what becomes of a lease

    def deliver(self, lease_id: int, num_tokens: int, oldest_version: int, crc: int) -> bool:
        """A finished group has arrived; False when its lease is not live any more (a duplicate or an old attempt)."""
        if (group := self._end_lease(lease_id)) is None:
            return False
        group.num_tokens, group.oldest_version, group.crc = num_tokens, oldest_version, crc
        self.buffered[lease_id] = group
        self._emit("buffered", group.lease, crc=crc, oldest=oldest_version, tokens=num_tokens)
        return True

    def filter(self, lease_id: int, mean_accuracy: float) -> bool:
        """The group was not effective; False when its lease is not live."""
        if (group := self._end_lease(lease_id)) is None:
            return False
        self._settle(group, "filtered", accuracy=mean_accuracy)
        return True

    def drop(self, lease_id: int, reason: DropReason, detail: str = "") -> bool:
        """The group is lost for good; False when its lease is not live."""
        if (group := self._end_lease(lease_id)) is None:
            return False
        self._settle(group, "dropped", reason=reason.value, detail=detail)
        return True

    def give_back(self, lease_id: int, detail: str = "") -> bool:
        """Generation failed for no fault of the response: lease again, or drop after the last attempt."""
        group = self.leased.get(lease_id)
        if group is None:
            return False
        lease = group.lease
        if lease.attempt + 1 >= self.options.max_attempts:
            return self.drop(lease_id, DropReason.INFRASTRUCTURE, detail)
        self._end_lease(lease_id)
        self.totals["returned"] += 1
        self.data.give_back(lease.uid, lease.attempt + 1)
        self._emit("returned", lease, detail=detail)
        return True

    def _end_lease(self, lease_id: int) -> LiveGroup | None:
        """Its group, which the producer does not hold any more; None if it is not live."""
        if (group := self.leased.pop(lease_id, None)) is not None:
            self._held[group.producer] -= 1
            self._note(group.producer)
        return group

    def _settle(self, group: LiveGroup, kind: str, **fields: Any) -> None:
        lease = group.lease
        self.totals[kind] += 1
        if kind == "dropped":
            self.dropped_by_reason[fields["reason"]] += 1
        self.data.settle(lease.uid)
        self._emit(kind, lease, **fields)

    # ---------------------------------------------------------------- the plan

    def request_stop(self) -> None:
        """Plan STOP next, whatever is buffered."""
        self._stop_requested = True

    def plan(self) -> list[PlanEntry]:
        """All entries that can be planned now, in order."""
        entries: list[PlanEntry] = []
        while not self.ended and (entry := self._plan_next()) is not None:
            entries.append(entry)
        return entries

    def _plan_next(self) -> PlanEntry | None:
        if self._stop_requested:
            self.ended = True
            return self._entry(PlanKind.STOP, self._open.version)
        if self._marks:
            return self._plan_mark(self._marks[0])
        options = self.options
        full = options.max_steps is not None and self._open.version >= options.max_steps
        if not full and len(self._outstanding) < options.plan_ahead and (taken := self._take()) is not None:
            return self._plan_train(taken)
        if full or self._cannot_fill_step():
            return self._plan_end()
        return None

    def _plan_mark(self, kind: PlanKind) -> PlanEntry | None:
        if kind is PlanKind.SAVE:
            # No state overtakes an evaluation where training has to wait for that anyway, or is over.
            overtakes = self.evaluating and self.evaluated_version < self._open.version
            if overtakes and (not self._marks or PlanKind.EVAL in self._marks):
                return None
            self.saved_version = self._open.version
        elif self.evaluating:
            return None
        else:
            self.evaluated_version = self._open.version
            self.evaluating = True
        del self._marks[:1]  # empty when the end of the run asks for it
        return self._entry(kind, self._open.version)

    def _cannot_fill_step(self) -> bool:
        return not self.data.has_next and not self.leased and len(self.buffered) < self._open.num_missing

    def _take(self) -> list[LiveGroup] | None:
        options, count = self.options, self.options.groups_per_minibatch
        if len(self.buffered) < count or self._cannot_fill_step():
            return None
        if options.synchronous:
            taken = planning.in_uid_order(self.buffered.values(), self.leased.values(), count, self.data.place)
            retried = self.data.first_retried
            return None if taken and retried and retried < self.data.place(taken[-1].lease.uid) else taken
        if options.strict:
            return planning.by_deadline(
                list(self.buffered.values()),
                list(self.leased.values()),
                count,
                filled_places=self.filled_places,
                groups_per_step=options.groups_per_step,
                max_staleness=options.max_staleness,
            )
        return planning.in_arrival_order(self.buffered.values(), count)

    def _open_step(self, version: int) -> planning.OpenStep:
        return planning.OpenStep(version, self.options.groups_per_step, self.options.dp_size)

    def _plan_train(self, taken: list[LiveGroup]) -> PlanEntry:
        options, step = self.options, self._open
        minibatch = step.num_minibatches
        ranks, closes = step.add(taken)
        for group in taken:
            del self.buffered[group.lease.lease_id]
            self.planned[group.lease.lease_id] = group
        pin = False
        if closes:
            made = step.version + 1
            self._open = self._open_step(made)
            if options.save_interval and made % options.save_interval == 0:
                self._marks.append(PlanKind.SAVE)
            if options.eval_interval and made % options.eval_interval == 0:
                self._marks.append(PlanKind.EVAL)
                pin = True
        entry = self._entry(PlanKind.TRAIN, step.version, minibatch=minibatch, closes=closes, pin=pin, ranks=ranks)
        self._outstanding.add(entry.sequence)
        return entry

    def _plan_end(self) -> PlanEntry | None:
        for group in [g for g in self.planned.values() if g.step == self._open.version]:
            del self.planned[group.lease.lease_id]
            self._settle(group, "dropped", reason=DropReason.END.value, detail="")
        for group in list(self.buffered.values()):
            self._settle(group, "dropped", reason=DropReason.END.value, detail="")
        self.buffered.clear()
        if self.saved_version < self._open.version:
            return self._plan_mark(PlanKind.SAVE)
        if self.options.eval_interval and self.evaluated_version < self._open.version:
            return self._plan_mark(PlanKind.EVAL)
        if self.evaluating:
            return None
        self.ended = True
        return self._entry(PlanKind.END, self._open.version)

    def _entry(
        self,
        kind: PlanKind,
        version: int,
        *,
        minibatch: int = 0,
        closes: bool = False,
        pin: bool = False,
        ranks: list[list[int]] | None = None,
    ) -> PlanEntry:
        entry = PlanEntry(self._sequence, kind, version, minibatch, closes, pin, ranks or [])
        self._sequence += 1
        event = {"kind": "plan", "sequence": entry.sequence, "entry": kind.value, "version": version}
        self.events.append(event | {"minibatch": minibatch, "closes": closes, "ranks": entry.ranks})
        return entry

    def trained(self, sequence: int) -> None:
        """Consumers are done with the forward and backward passes of this TRAIN entry."""
        self._outstanding.discard(sequence)

    def commit(self, version: int, skipped: bool = False) -> None:
        """The step that trained version - 1 has committed; `skipped` when its gradient was not finite."""
        if version != self.version + 1:
            raise ProtocolError(f"commit of version {version} after version {self.version}")
        groups = [g for g in self.planned.values() if g.step == self.version]
        if len(groups) != self.options.groups_per_step:
            raise ProtocolError(
                f"step {self.version} commits {len(groups)} groups instead of {self.options.groups_per_step}"
            )
        for group in groups:
            del self.planned[group.lease.lease_id]
            self._settle(group, "consumed", step=self.version, crc=group.crc, oldest=group.oldest_version)
        self.version = version
        self.events.append({"kind": "commit", "version": version, "skipped": skipped})

    # ---------------------------------------------------------------- order, bookkeeping

    def _emit(self, kind: str, lease: Lease, **fields: Any) -> None:
        self.events.append(
            {
                "kind": kind,
                "lease": lease.lease_id,
                "uid": [lease.episode, lease.row],
                "attempt": lease.attempt,
                **fields,
            }
        )

    def counts(self) -> dict[str, int]:
        """Totals and the numbers of live groups, for metrics and the summary."""
        live = {"live_leased": len(self.leased), "buffered": len(self.buffered), "planned": len(self.planned)}
        return {**self.totals, **live}

    def check(self) -> None:
        """Assert the invariants of the class."""
        totals = self.totals
        ends = sum(totals[kind] for kind in ("consumed", "filtered", "dropped", "returned"))
        assert totals["leased"] == ends + self.num_live, (totals, self.num_live)
        assert totals["consumed"] == self.version * self.options.groups_per_step
        assert sum(self._held) == len(self.leased)
        live = [g.lease.uid for d in (self.leased, self.buffered, self.planned) for g in d.values()]
        assert len(set(live)) == len(live), "a uid is live twice"
        assert not any(self.data.is_settled(uid) for uid in live), "a uid is settled and live"

    def snapshot(self) -> dict[str, Any]:
        """State as of the last commit, as plain msgpack types. Live groups count as pending with the same attempt."""
        live = {g.lease.uid: g.lease.attempt for d in (self.leased, self.buffered, self.planned) for g in d.values()}
        return {
            "version": self.version,
            "num_rows": self.options.num_rows,
            "next_lease_id": self._next_lease_id,
            "totals": {**self.totals, "leased": self.totals["leased"] - len(live)},
            "dropped_by_reason": dict(self.dropped_by_reason),
            "data": self.data.snapshot(live),
        }

    def restore(self, state: dict[str, Any], saved: bool = True) -> None:
        """Take a snapshot; only on a fresh ledger with the same data order. Its version counts as not evaluated, and
        as saved unless told otherwise: at the end of a run it is saved then."""
        self.version = state["version"]
        self.saved_version = self.version if saved else self.version - 1
        self._open = self._open_step(self.version)
        self.evaluated_version = self.version - 1
        self._next_lease_id = state["next_lease_id"]
        self.totals = dict(state["totals"])
        self.dropped_by_reason = dict(state["dropped_by_reason"])
        self.data.restore(state["data"])
