"""The ledger under any order of events: its invariants hold, it never gets stuck, nothing is lost or trained twice.

Two things drive a ledger before the eyes of a `Witness`: a state machine that does whatever is allowed next, and the
obedient `World`, which must always come to the end of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.ledger_witness import Witness
from tests.support.ledger_world import Behaviour, Consumer, World, behaviours, evaluators, ledger_options, play
from zbgrpo.errors import ProtocolError
from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import LedgerOptions, PlanKind
from zbgrpo.types import DropReason

LOST = [DropReason.REWARD_ERROR, DropReason.NON_FINITE, DropReason.INFRASTRUCTURE]


def msgpack_copy(state: dict[str, Any]) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


class LedgerMachine(RuleBasedStateMachine):
    """Any order of allowed events; at the end an obedient world takes over and must come to the end of the run."""

    @initialize(options=ledger_options())
    def start(self, options: LedgerOptions) -> None:
        self.options, self.witness = options, Witness(options)
        self.ended_leases: list[int] = []
        self._attach(Ledger(options))

    def _attach(self, ledger: Ledger) -> None:
        self.ledger, self.consumer = ledger, Consumer(ledger, self.witness)
        self.wanted = [0] * self.options.num_producers

    @rule(data=st.data(), num_wanted=st.integers(0, 12))
    def request(self, data: st.DataObject, num_wanted: int) -> None:
        producer = data.draw(st.integers(0, self.options.num_producers - 1))
        self.ledger.request(producer, num_wanted)
        self.wanted[producer] = num_wanted

    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        producer = data.draw(st.integers(0, self.options.num_producers - 1))
        if producer in self.ledger.reserved:
            return  # it keeps its version until its rows are done
        version = data.draw(st.integers(max(0, self.ledger.applied[producer]), max(0, self.ledger.version)))
        self.ledger.apply(producer, version)
        self.witness.applied[producer] = version

    @precondition(lambda self: max(self.ledger.applied) > 0)
    @rule()
    def apply_older(self) -> None:
        producer = self.ledger.applied.index(max(self.ledger.applied))
        with pytest.raises(ProtocolError):
            self.ledger.apply(producer, self.ledger.applied[producer] - 1)

    @rule()
    def grant(self) -> None:
        for producer, lease in self.ledger.grant():
            self.wanted[producer] -= 1
            assert self.ledger.leased[lease.lease_id].producer == producer
        self.witness.watch(self.ledger)
        self.witness.check_grant(self.ledger, self.wanted)

    @rule()
    def everybody_works(self) -> None:
        for producer in set(range(self.options.num_producers)) - self.ledger.reserved:
            self.ledger.apply(producer, self.ledger.version)
            self.witness.applied[producer] = self.ledger.version
            self.request_all(producer)
        self.grant()

    def request_all(self, producer: int) -> None:
        self.ledger.request(producer, 100)
        self.wanted[producer] = 100

    def _draw_lease(self, data: st.DataObject) -> int:
        lease_id = data.draw(st.sampled_from(sorted(self.ledger.leased)))
        self.ended_leases.append(lease_id)
        return lease_id

    @precondition(lambda self: self.ledger.leased)
    @rule(data=st.data(), num_tokens=st.integers(1, 1000))
    def deliver(self, data: st.DataObject, num_tokens: int) -> None:
        lease_id = self._draw_lease(data)
        applied = self.ledger.leased[lease_id].oldest_version
        oldest = data.draw(st.integers(applied, max(applied, self.ledger.version)))
        assert self.ledger.deliver(lease_id, num_tokens, oldest, crc=lease_id)

    @rule(stragglers=st.integers(0, 3), rounds=st.integers(1, 6))
    def all_goes_on_but_for_stragglers(self, stragglers: int, rounds: int) -> None:
        for _ in range(rounds):
            self.everybody_works()
            for lease_id, group in list(self.ledger.leased.items())[stragglers:]:
                self.ended_leases.append(lease_id)
                assert self.ledger.deliver(lease_id, 7, group.oldest_version, crc=lease_id)
            self.plan()
            while self.consumer.waiting:
                self.consume()

    @precondition(lambda self: self.ledger.leased)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        assert self.ledger.filter(self._draw_lease(data), mean_accuracy=0.0)

    @precondition(lambda self: self.ledger.leased)
    @rule(data=st.data(), reason=st.sampled_from(LOST))
    def drop(self, data: st.DataObject, reason: DropReason) -> None:
        before = self.ledger.dropped_by_reason[reason.value]
        assert self.ledger.drop(self._draw_lease(data), reason)
        assert self.ledger.dropped_by_reason[reason.value] == before + 1

    @precondition(lambda self: self.ledger.leased)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        assert self.ledger.give_back(self._draw_lease(data))

    @precondition(lambda self: self.ended_leases)
    @rule(data=st.data())
    def repeat_a_message(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.ended_leases))
        before = self.ledger.counts()
        repeats: list[Callable[[], bool]] = [
            lambda: self.ledger.deliver(lease_id, 1, 0, 0),
            lambda: self.ledger.filter(lease_id, 0.5),
            lambda: self.ledger.drop(lease_id, DropReason.NON_FINITE),
            lambda: self.ledger.give_back(lease_id),
        ]
        assert not any(repeat() for repeat in repeats)
        assert self.ledger.counts() == before and not self.ledger.events

    @rule()
    def plan(self) -> None:
        self.consumer.waiting.extend(self.ledger.plan())
        self.witness.watch(self.ledger)
        self.witness.check_plan(self.ledger)

    @precondition(lambda self: self.consumer.waiting)
    @rule()
    def consume(self) -> None:
        if self.consumer.act() is PlanKind.EVAL:
            self.ledger.reserved |= evaluators(self.options)

    @rule(ahead=st.sampled_from([0, 2]))
    def commit_out_of_turn(self, ahead: int) -> None:
        with pytest.raises(ProtocolError):
            self.ledger.commit(self.ledger.version + ahead)

    @precondition(lambda self: self.ledger.evaluating and self.ledger.reserved)
    @rule()
    def evaluation_finishes(self) -> None:
        self.ledger.reserved.clear()
        self.ledger.evaluating = self.witness.evaluating = False

    @rule(chance=st.integers(0, 30))
    def stop(self, chance: int) -> None:
        if chance == 30:
            self.ledger.request_stop()
            self.witness.stopping = True

    @precondition(lambda self: not self.ledger.ended)
    @rule()
    def resume(self) -> None:
        state = self.ledger.snapshot()
        restored = Ledger(self.options)
        restored.restore(msgpack_copy(state))
        assert msgpack_copy(restored.snapshot()) == msgpack_copy(state)
        self.ended_leases = []  # what producers of the former process still send does not reach the new one
        self.witness.begin()
        self.witness.evaluated = restored.version - 1  # an evaluation that was running is lost: it is due again
        self._attach(restored)

    @invariant()
    def books_agree(self) -> None:
        self.witness.watch(self.ledger)
        if not self.options.synchronous:
            most = self.options.buffer_limit - 1 + self.options.num_producers * self.options.leases_per_producer
            assert len(self.ledger.buffered) + len(self.ledger.leased) <= most

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        World(self.ledger, self.witness, self.consumer, Behaviour(slow=0.2)).run()
        assert self.consumer.last is not None
        if self.consumer.last.kind is PlanKind.END:
            self.witness.check_end()


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, database=None)
TestLedgerMachine = LedgerMachine.TestCase

worlds = settings(max_examples=150, deadline=None, database=None)


@worlds
@given(ledger_options(), behaviours)
def test_an_obedient_world_always_reaches_the_end(options: LedgerOptions, behaviour: Behaviour) -> None:
    world = play(options, behaviour)
    assert world.consumer.last is not None and world.consumer.last.kind is PlanKind.END
    world.witness.check_end()


@worlds
@given(ledger_options(), st.sampled_from([0.0, 0.8]))
def test_when_all_is_filtered_the_run_ends_without_a_step(options: LedgerOptions, slow: float) -> None:
    world = play(options, Behaviour(filtered=1.0, slow=slow))
    assert [entry.kind for entry in world.witness.entries] == [PlanKind.END]
    world.witness.check_end()
    assert world.ledger.totals["filtered"] == options.num_rows * options.num_episodes
    assert world.ledger.version == 0


@worlds
@given(ledger_options(), behaviours, st.integers(1, 60))
def test_a_stop_ends_the_run_at_the_last_commit(options: LedgerOptions, behaviour: Behaviour, rounds: int) -> None:
    ledger, witness = Ledger(options), Witness(options)
    world = World(ledger, witness, Consumer(ledger, witness), behaviour)
    for _ in range(rounds):
        world.round()
    ended = ledger.ended
    ledger.request_stop()
    witness.stopping = True
    world.run()
    assert world.consumer.last is not None
    assert world.consumer.last.kind is (PlanKind.END if ended else PlanKind.STOP)
    assert world.consumer.last.version == ledger.version
    assert all(group.step == ledger.version for group in ledger.planned.values())


@worlds
@given(ledger_options(max_staleness=0, max_attempts=3), behaviours, behaviours)
def test_the_synchronous_mode_trains_the_same_whatever_is_slow_or_fails(
    options: LedgerOptions, one: Behaviour, other: Behaviour
) -> None:
    # What the filter and the scorer say is a function of the data; timing and infrastructure are not.
    one = dataclasses.replace(one, returned=0.0)
    other = dataclasses.replace(other, filtered=one.filtered, dropped=one.dropped, returned=0.2)
    first, second = play(options, one), play(options, other)
    if second.ledger.dropped_by_reason[DropReason.INFRASTRUCTURE.value]:
        return  # three attempts failed: the data themselves differ
    assert first.ledger.version == second.ledger.version
    assert first.committed == second.committed
