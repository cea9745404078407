"""The ledger's sentences, one test each: what the texts of ledger, planning, order and records promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from zbgrpo.errors import ConfigError, ProtocolError
from zbgrpo.ledger import planning
from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.order import DataOrder
from zbgrpo.ledger.records import Lease, LedgerOptions, LiveGroup, PlanEntry, PlanKind
from zbgrpo.types import DropReason, Uid

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


def live(
    lease_id: int, *, tokens: int = 0, oldest: int = 0, row: int | None = None, attempt: int = 0, producer: int = 0
) -> LiveGroup:
    return LiveGroup(Lease(lease_id, 0, lease_id if row is None else row, attempt), producer, oldest, tokens)


# ---------------------------------------------------------------- states of a group


def test_a_group_goes_from_pending_to_consumed_when_its_step_commits() -> None:
    ledger = started()
    one, two = grant(ledger)[:2]
    assert ledger.counts()["live_leased"] == 4
    deliver(ledger, one, two)
    assert (ledger.counts()["live_leased"], ledger.counts()["buffered"]) == (2, 2)
    (entry,) = ledger.plan()
    assert (ledger.counts()["buffered"], ledger.counts()["planned"]) == (0, 2)
    ledger.trained(entry.sequence)
    assert ledger.counts()["consumed"] == 0
    ledger.commit(1)
    assert (ledger.counts()["planned"], ledger.counts()["consumed"]) == (0, 2)
    assert ledger.data.is_settled(Uid(0, 0)) and ledger.data.is_settled(Uid(0, 1))
    ledger.check()


def test_a_filtered_group_has_ended_and_its_statistics_are_in_the_events() -> None:
    ledger = started()
    lease_id = grant(ledger)[0]
    ledger.events.clear()
    assert ledger.filter(lease_id, mean_accuracy=0.0)
    assert ledger.events == [{"kind": "filtered", "lease": lease_id, "uid": [0, 0], "attempt": 0, "accuracy": 0.0}]
    assert ledger.totals["filtered"] == 1 and ledger.data.is_settled(Uid(0, 0))


@pytest.mark.parametrize("reason", [DropReason.REWARD_ERROR, DropReason.NON_FINITE, DropReason.INFRASTRUCTURE])
def test_a_dropped_group_has_ended_with_its_reason(reason: DropReason) -> None:
    ledger = started()
    lease_id = grant(ledger)[0]
    assert ledger.drop(lease_id, reason, "why")
    assert ledger.events[-1]["reason"] == reason.value and ledger.events[-1]["detail"] == "why"
    assert ledger.dropped_by_reason == {r.value: int(r is reason) for r in DropReason}
    assert ledger.data.is_settled(Uid(0, 0))


def test_a_group_that_is_given_back_is_leased_again_with_the_next_attempt_and_dropped_after_the_last() -> None:
    ledger = started()
    grant(ledger)
    lease_id, attempts = 0, []
    while lease_id in ledger.leased:
        attempts.append(ledger.leased[lease_id].lease.attempt)
        assert ledger.give_back(lease_id, "engine restarted")
        granted = [lease for _, lease in ledger.grant() if lease.row == 0]
        lease_id = granted[0].lease_id if granted else -1
    assert attempts == [0, 1, 2]
    assert ledger.totals["returned"] == 2
    assert ledger.dropped_by_reason["infrastructure"] == 1 and ledger.totals["dropped"] == 1
    ledger.check()


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_the_number_of_attempts_is_an_option(max_attempts: int) -> None:
    ledger = started(max_attempts=max_attempts, num_rows=2, max_staleness=0)
    for attempt in range(max_attempts):
        for _, lease in ledger.grant():
            assert lease.attempt == attempt
            ledger.give_back(lease.lease_id)
    assert ledger.dropped_by_reason["infrastructure"] == 2
    assert names(ledger.plan()) == [(END, 0)]


@pytest.mark.parametrize("first", ["deliver", "filter", "drop", "give_back"])
@pytest.mark.parametrize("second", ["deliver", "filter", "drop", "give_back"])
def test_a_lease_that_is_not_live_is_refused_and_nothing_changes(first: str, second: str) -> None:
    ledger = started()
    act: dict[str, Callable[[], bool]] = {
        "deliver": lambda: ledger.deliver(0, 10, 0, 0),
        "filter": lambda: ledger.filter(0, 0.0),
        "drop": lambda: ledger.drop(0, DropReason.REWARD_ERROR),
        "give_back": lambda: ledger.give_back(0),
    }
    grant(ledger)
    assert act[first]()
    before, events = ledger.counts(), len(ledger.events)
    assert not act[second]()
    assert ledger.counts() == before and len(ledger.events) == events


def test_an_old_attempt_that_arrives_late_is_refused() -> None:
    ledger = started()
    grant(ledger)
    ledger.give_back(0)
    (again,) = grant(ledger)
    assert not ledger.deliver(0, 10, 0, crc=1)
    assert ledger.deliver(again, 10, 0, crc=1)


# ---------------------------------------------------------------- admission


def test_example_of_the_class() -> None:
    ledger = started(groups_per_step=2, max_staleness=1)
    assert len(grant(ledger)) == (0 + 1 + 1) * 2
    deliver(ledger, 0, 1)
    train(ledger, ledger.plan())
    assert ledger.totals["consumed"] == 2 and grant(ledger) == []
    ledger.apply(0, 1)
    assert len(grant(ledger)) == 2


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_admission_counts_all_groups_before_this_one(max_staleness: int) -> None:
    ledger = started(max_staleness=max_staleness, num_rows=100, groups_per_step=4, groups_per_minibatch=2)
    assert len(grant(ledger)) == (0 + 1 + max_staleness) * 4
    assert [e["place"] for e in ledger.events] == list(range((1 + max_staleness) * 4))
    assert ledger.occupied_places == (1 + max_staleness) * 4 and ledger.filled_places == 0
    deliver(ledger, 0, 1, 2)
    ledger.plan()
    assert ledger.filled_places == 2 and ledger.num_live == ledger.occupied_places
    assert grant(ledger) == []


@pytest.mark.parametrize("free", ["filter", "drop", "give_back"])
def test_filtering_and_drops_free_their_place(free: str) -> None:
    ledger = started(num_rows=20)
    grant(ledger)
    {
        "filter": lambda: ledger.filter(0, 1.0),
        "drop": lambda: ledger.drop(0, DropReason.NON_FINITE),
        "give_back": lambda: ledger.give_back(0),
    }[free]()
    assert len(grant(ledger)) == 1


def test_each_producer_is_bound_by_the_version_it_has_applied() -> None:
    ledger = started(num_producers=2, num_rows=100)
    step(ledger, apply=False)
    assert grant(ledger) == []
    ledger.apply(1, ledger.version)
    assert {producer for producer, _ in ledger.grant()} == {1}


def test_no_lease_before_a_version_is_applied() -> None:
    ledger = Ledger(options())
    ledger.request(0, 5)
    assert ledger.grant() == []


def test_no_lease_while_the_buffer_is_full() -> None:
    ledger = started(max_staleness=4, buffer_limit=3, groups_per_step=4, groups_per_minibatch=2, plan_ahead=1)
    ledger.request(0, 5)
    deliver(ledger, *grant(ledger))
    ledger.plan()
    assert len(ledger.buffered) == 3 and ledger.occupied_places < 5 * 4
    ledger.request(0, 1)
    assert grant(ledger) == []
    ledger.trained(0)
    ledger.plan()
    assert len(ledger.buffered) == 1 and len(grant(ledger)) == 1


def test_a_producer_gets_no_more_than_it_asked_for_and_the_newest_request_counts() -> None:
    ledger = started(max_staleness=4)
    ledger.request(0, 7)
    ledger.request(0, 3)
    assert len(grant(ledger)) == 3
    assert grant(ledger) == []


def test_a_producer_holds_no_more_than_its_limit() -> None:
    ledger = started(max_staleness=4, leases_per_producer=3)
    one, *_ = leased = grant(ledger)
    assert len(leased) == 3
    deliver(ledger, one)
    assert len(grant(ledger)) == 1


def test_leases_go_to_producers_in_turn() -> None:
    ledger = started(num_producers=3, max_staleness=2)
    assert [producer for producer, _ in ledger.grant()] == [0, 1, 2, 0, 1, 2]


def test_a_producer_that_evaluates_takes_no_training_leases() -> None:
    ledger = started(num_producers=2)
    ledger.reserved.add(0)
    assert {producer for producer, _ in ledger.grant()} == {1}
    ledger.reserved.clear()
    assert not ledger.admits(0)  # the other took all places


def test_versions_never_go_back() -> None:
    ledger = started()
    ledger.apply(0, 3)
    ledger.apply(0, 3)
    with pytest.raises(ProtocolError, match="producer 0 went back from version 3 to 2"):
        ledger.apply(0, 2)


def test_with_max_steps_nothing_is_leased_that_could_not_be_trained() -> None:
    ledger = started(max_steps=1, max_staleness=4)
    assert len(grant(ledger)) == 2


# ---------------------------------------------------------------- plans


def test_minibatches_are_taken_in_order_of_arrival_and_nobody_waits_for_a_slow_response() -> None:
    ledger = started(max_staleness=2)
    grant(ledger)
    deliver(ledger, 5, 3, 4, 1)
    assert [sorted(entry.ranks[0]) for entry in ledger.plan()] == [[3, 5], [1, 4]]
    assert sorted(ledger.leased) == [0, 2]


def test_minibatches_of_a_step_are_numbered_and_the_last_closes_it() -> None:
    ledger = started(groups_per_step=6, plan_ahead=9)
    deliver(ledger, *grant(ledger))
    entries = ledger.plan()[:5]
    assert [(e.sequence, e.version, e.minibatch, e.closes_step) for e in entries] == [
        (0, 0, 0, False),
        (1, 0, 1, False),
        (2, 0, 2, True),
        (3, 1, 0, False),
        (4, 1, 1, False),
    ]


@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
def test_no_more_than_plan_ahead_train_entries_are_on_their_way(plan_ahead: int) -> None:
    ledger = started(groups_per_minibatch=1, max_staleness=4, plan_ahead=plan_ahead)
    deliver(ledger, *grant(ledger)[:8])
    assert len(ledger.plan()) == plan_ahead
    assert ledger.plan() == []
    ledger.trained(0)
    assert [entry.sequence for entry in ledger.plan()] == [plan_ahead]


def test_ranks_of_a_step_are_balanced_over_its_minibatches() -> None:
    ledger = started(groups_per_step=4, dp_size=2)
    grant(ledger)
    for lease_id, num_tokens in enumerate((90, 10, 50, 20)):
        deliver(ledger, lease_id, num_tokens=num_tokens)
    first, second = ledger.plan()
    assert first.ranks == [[0], [1]]
    assert second.ranks == [[3], [2]]  # the long one goes to the rank that had the short one


def test_steps_cross_the_ends_of_episodes() -> None:
    ledger = started(num_rows=3, num_episodes=2, max_steps=None)
    entries = play(ledger)
    assert names(entries) == [(TRAIN, 0), (TRAIN, 1), (TRAIN, 2), (SAVE, 3), (END, 3)]
    assert ledger.totals["consumed"] == 6


def test_groups_of_a_step_that_cannot_be_filled_are_dropped_and_the_end_is_planned() -> None:
    ledger = started(num_rows=7, groups_per_step=4, groups_per_minibatch=2, max_staleness=4)
    deliver(ledger, *grant(ledger)[:6])
    assert names(entries := ledger.plan()) == [(TRAIN, 0), (TRAIN, 0)]
    train(ledger, entries)
    assert names(entries := ledger.plan()) == [(TRAIN, 1)]  # lease 6 is still under way and one more is needed ...
    ledger.filter(6, 1.0)  # ... which cannot come any more
    assert names(ledger.plan()) == [(SAVE, 1), (END, 1)]
    assert ledger.ended and ledger.num_live == 0
    assert ledger.dropped_by_reason["end"] == 2 and ledger.totals["consumed"] == 4
    ledger.check()


def test_the_end_waits_for_leases_that_are_under_way_or_were_given_back() -> None:
    ledger = started(num_rows=3)
    deliver(ledger, *grant(ledger)[:2])
    train(ledger, ledger.plan())
    assert ledger.plan() == []
    ledger.give_back(2)
    assert ledger.plan() == []
    ledger.apply(0, 1)
    ledger.filter(grant(ledger)[0], 0.0)
    assert names(ledger.plan()) == [(SAVE, 1), (END, 1)]


def test_if_no_group_is_ever_effective_the_run_ends_with_the_counts() -> None:
    ledger = started()
    while not ledger.ended:
        for lease_id in grant(ledger):
            ledger.filter(lease_id, 1.0)
        entries = ledger.plan()
    assert names(entries) == [(END, 0)]
    assert ledger.totals["filtered"] == 10 and ledger.totals["leased"] == 10


def test_max_steps_ends_a_run_whose_data_last() -> None:
    ledger = started(max_steps=2)
    assert names(play(ledger)) == [(TRAIN, 0), (TRAIN, 1), (SAVE, 2), (END, 2)]
    assert ledger.totals == {"leased": 4, "returned": 0, "consumed": 4, "filtered": 0, "dropped": 0}


def test_saves_and_evaluations_stand_behind_their_step_and_the_last_step_has_both_once() -> None:
    ledger = started(save_interval=2, eval_interval=2, max_steps=5)
    entries = play(ledger)
    assert names(entries) == [
        (TRAIN, 0),
        (TRAIN, 1),
        (SAVE, 2),
        (EVAL, 2),
        (TRAIN, 2),
        (TRAIN, 3),
        (SAVE, 4),
        (EVAL, 4),
        (TRAIN, 4),
        (SAVE, 5),
        (EVAL, 5),
        (END, 5),
    ]
    assert [entry.version for entry in entries if entry.pin_version] == [1, 3]
    assert [entry.sequence for entry in entries] == list(range(12))


def test_a_last_step_on_the_interval_is_saved_and_evaluated_once() -> None:
    entries = play(started(save_interval=2, eval_interval=2, max_steps=2))
    assert names(entries) == [(TRAIN, 0), (TRAIN, 1), (SAVE, 2), (EVAL, 2), (END, 2)]


def test_the_next_evaluation_and_the_end_wait_for_the_one_that_runs() -> None:
    ledger = started(eval_interval=1, max_steps=2)
    assert names(step(ledger)) == [(TRAIN, 0), (EVAL, 1), (TRAIN, 1)]
    assert ledger.evaluating and ledger.plan() == []
    ledger.evaluating = False
    assert names(ledger.plan()) == [(EVAL, 2), (SAVE, 2)]
    assert ledger.plan() == [] and not ledger.ended
    ledger.evaluating = False
    assert names(ledger.plan()) == [(END, 2)]


def test_stop_is_planned_next_whatever_is_buffered() -> None:
    ledger = started(max_staleness=3, plan_ahead=1)
    deliver(ledger, *grant(ledger)[:6])
    assert names(ledger.plan()) == [(TRAIN, 0)]
    ledger.request_stop()
    (stop,) = ledger.plan()
    # Consumers reach it behind the step that is planned, so the last commit by then is version 1.
    assert (stop.kind, stop.version) == (STOP, 1)
    assert ledger.ended and ledger.plan() == [] and grant(ledger) == []
    ledger.trained(0)
    ledger.commit(1)
    assert ledger.counts()["buffered"] == 4
    ledger.check()


def test_nothing_is_leased_once_a_stop_is_asked_for() -> None:
    ledger = started()
    ledger.request_stop()
    assert grant(ledger) == []


def test_commits_come_one_by_one_and_of_full_steps() -> None:
    ledger = started(groups_per_step=4)
    with pytest.raises(ProtocolError, match="commit of version 2 after version 0"):
        ledger.commit(2)
    deliver(ledger, *grant(ledger)[:3])
    train(ledger, ledger.plan())
    with pytest.raises(ProtocolError, match="step 0 commits 2 groups instead of 4"):
        ledger.commit(1)
    assert ledger.version == 0


def test_a_skipped_step_advances_the_version_and_is_in_the_events() -> None:
    ledger = started()
    deliver(ledger, *grant(ledger)[:2])
    ledger.plan()
    ledger.commit(1, skipped=True)
    assert ledger.events[-1] == {"kind": "commit", "version": 1, "skipped": True}
    assert ledger.totals["consumed"] == 2


def test_events_are_plain_and_say_what_happened() -> None:
    ledger = started()
    step(ledger)
    assert [event["kind"] for event in ledger.events] == (
        ["leased"] * 4
        + ["buffered"] * 4
        + ["plan", "plan"]
        + ["consumed"] * 2
        + ["commit"]
        + ["consumed"] * 2
        + ["commit"]
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.events)) == ledger.events
    consumed = [event for event in ledger.events if event["kind"] == "consumed"]
    assert consumed[0] == {
        "kind": "consumed",
        "lease": 0,
        "uid": [0, 0],
        "attempt": 0,
        "step": 0,
        "crc": 0,
        "oldest": 0,
    }


def test_check_finds_a_count_that_is_off_and_a_uid_that_is_live_twice() -> None:
    ledger = started()
    step(ledger)
    ledger.check()
    ledger.totals["filtered"] += 1
    with pytest.raises(AssertionError):
        ledger.check()
    ledger.totals["filtered"] -= 1
    grant(ledger)
    first, second, *_ = ledger.leased
    ledger.leased[first].lease = ledger.leased[second].lease
    with pytest.raises(AssertionError, match="live twice"):
        ledger.check()


# ---------------------------------------------------------------- strict and synchronous modes


def test_the_strict_mode_keeps_the_place_of_a_slow_response() -> None:
    ledger = started(stale="wait", max_staleness=1)
    grant(ledger)
    deliver(ledger, 1, 2, 3)
    train(ledger, ledger.plan())  # 1 and 2 are step 0, which leaves two places in step 1 for 0 and 3
    assert ledger.version == 1
    ledger.apply(0, 1)
    grant(ledger)
    deliver(ledger, 4, 5)
    assert ledger.plan() == []  # 3 and 4 would take the place of 0
    deliver(ledger, 0)
    entries = ledger.plan()
    assert sorted(entries[0].ranks[0]) == [0, 3]
    assert ledger.options.strict and not ledger.options.synchronous


def test_synchronous_leases_go_out_in_rounds_dealt_in_data_order() -> None:
    ledger = started(max_staleness=0, groups_per_step=4, num_producers=3, order=lambda episode: range(9, -1, -1))
    assert [(producer, lease.row) for producer, lease in ledger.grant()] == [(0, 9), (1, 8), (2, 7), (0, 6)]
    ledger.filter(1, 0.0)
    ledger.filter(2, 0.0)
    assert grant(ledger) == []  # not before the round is complete
    deliver(ledger, 3, 0)
    assert [(producer, lease.row) for producer, lease in ledger.grant()] == [(0, 5), (1, 4)]


def test_a_synchronous_round_waits_until_everybody_holds_the_newest_version() -> None:
    ledger = started(max_staleness=0, num_producers=2)
    step(ledger, apply=False)
    assert ledger.version == 1
    ledger.apply(0, 1)
    assert grant(ledger) == []
    ledger.apply(1, 1)
    assert len(grant(ledger)) == 2


def test_a_synchronous_round_needs_no_request_and_fits_any_buffer() -> None:
    ledger = Ledger(options(max_staleness=0, groups_per_step=8, buffer_limit=2, leases_per_producer=1))
    ledger.apply(0, 0)
    assert len(grant(ledger)) == 8
    deliver(ledger, *range(7, 0, -1))
    assert len(ledger.buffered) == 7 and ledger.plan() == []
    deliver(ledger, 0)
    assert [sorted(entry.ranks[0]) for entry in ledger.plan()] == [[0, 1], [2, 3]]


def test_a_synchronous_plan_waits_for_an_earlier_group_that_was_given_back() -> None:
    ledger = started(max_staleness=0, groups_per_step=4)
    grant(ledger)
    ledger.give_back(0)
    deliver(ledger, 3, 2, 1)
    assert ledger.plan() == []
    (again,) = grant(ledger)
    deliver(ledger, again)
    assert [sorted(entry.ranks[0]) for entry in ledger.plan()] == [[1, again], [2, 3]]


# ---------------------------------------------------------------- snapshot


def test_a_snapshot_is_plain_and_takes_live_groups_as_pending_with_their_attempt() -> None:
    ledger = started(num_rows=12, order=lambda episode: range(11, -1, -1), groups_per_minibatch=1, plan_ahead=1)
    deliver(ledger, *grant(ledger)[:3])  # rows 11, 10, 9 of 11 .. 8
    train(ledger, ledger.plan())
    train(ledger, ledger.plan())  # version 1 has consumed rows 11 and 10
    ledger.plan()  # row 9 is planned
    ledger.apply(0, 1)
    grant(ledger)  # rows 7 and 6
    ledger.filter(4, 0.0)  # row 7
    ledger.give_back(3)  # row 8
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.snapshot()))

    resumed = Ledger(ledger.options)
    resumed.restore(state)
    resumed.check()
    assert resumed.version == 1
    assert resumed.totals == {"leased": 4, "returned": 1, "consumed": 2, "filtered": 1, "dropped": 0}
    resumed.apply(0, 1)
    resumed.request(0, 3)
    leases = [lease for _, lease in resumed.grant()]
    assert [(lease.row, lease.attempt) for lease in leases] == [(9, 0), (8, 1), (6, 0)]
    assert [lease.lease_id for lease in leases] == [6, 7, 8]  # lease ids go on


def test_a_resumed_run_trains_the_rest_and_counts_the_whole() -> None:
    ledger = started(num_rows=7, num_episodes=3)
    step(ledger)
    resumed = Ledger(ledger.options)
    resumed.restore(ledger.snapshot())
    resumed.apply(0, resumed.version)
    resumed.request(0, 100)
    entries = play(resumed)
    assert names(entries)[0] == (TRAIN, ledger.version) and entries[0].sequence == 0
    assert names(entries)[-2:] == [(SAVE, 10), (END, 10)]
    assert resumed.totals == {"leased": 21, "returned": 0, "consumed": 20, "filtered": 0, "dropped": 1}


def test_a_run_that_is_resumed_at_its_end_ends_at_once() -> None:
    ledger = started(max_steps=1)
    play(ledger)
    resumed = Ledger(ledger.options)
    resumed.restore(ledger.snapshot())
    assert names(resumed.plan()) == [(END, 1)]


# ---------------------------------------------------------------- options


def test_too_few_rows_for_one_step_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"3 usable rows x 2 episodes give 6 groups, one optimizer step needs 8"):
        options(num_rows=3, num_episodes=2, groups_per_step=8)
    options(num_rows=4, num_episodes=2, groups_per_step=8)


def test_a_buffer_below_one_minibatch_is_an_error() -> None:
    with pytest.raises(ConfigError, match="buffer limit 1 is below one minibatch"):
        options(buffer_limit=1)
    options(buffer_limit=2)


def test_total_steps_are_full_steps_of_the_data_up_to_max_steps() -> None:
    assert options(num_rows=7, num_episodes=3).total_steps == 10
    assert options(num_rows=7, num_episodes=3, max_steps=4).total_steps == 4
    assert options(num_rows=7, num_episodes=3, max_steps=40).total_steps == 10


@pytest.mark.parametrize(
    ("max_staleness", "stale", "synchronous", "strict"),
    [(0, "mask", True, True), (0, "wait", True, True), (2, "mask", False, False), (2, "wait", False, True)],
)
def test_modes(max_staleness: int, stale: str, synchronous: bool, strict: bool) -> None:
    opts = options(max_staleness=max_staleness, stale=stale)
    assert (opts.synchronous, opts.strict) == (synchronous, strict)


# ---------------------------------------------------------------- planning


def test_balance_example() -> None:
    groups = [live(i, tokens=tokens) for i, tokens in enumerate((9, 5, 4, 2))]
    assert planning.balance(groups, [0, 0]) == [[0, 3], [1, 2]]


def test_balance_gives_every_rank_the_same_number_and_counts_what_it_has() -> None:
    groups = [live(i, tokens=tokens) for i, tokens in enumerate((100, 1, 1, 1, 1, 1))]
    assert [len(rank) for rank in planning.balance(groups, [0, 0, 0])] == [2, 2, 2]
    assert planning.balance([live(0, tokens=5), live(1, tokens=4)], [10, 0]) == [[1], [0]]


def test_balance_breaks_ties_by_order() -> None:
    assert planning.balance([live(i, tokens=3) for i in (7, 5, 6, 4)], [0, 0]) == [[7, 6], [5, 4]]


def test_in_arrival_order_takes_the_first_or_none() -> None:
    groups = [live(3), live(1), live(2)]
    assert planning.in_arrival_order(groups, 2) == groups[:2]
    assert planning.in_arrival_order(groups, 3) == groups
    assert planning.in_arrival_order(groups, 4) is None


def test_in_uid_order_takes_the_first_in_data_order_unless_one_that_is_generated_could_come_before() -> None:
    place = lambda uid: (uid.episode, {5: 0, 3: 1, 1: 2, 7: 3}[uid.row])
    buffered = [live(0, row=1), live(1, row=5)]
    assert planning.in_uid_order(buffered, [], 2, place) == [buffered[1], buffered[0]]
    assert planning.in_uid_order(buffered, [], 3, place) is None
    assert planning.in_uid_order(buffered, [live(2, row=3)], 2, place) is None
    assert planning.in_uid_order(buffered, [live(2, row=3)], 1, place) == [buffered[1]]
    assert planning.in_uid_order(buffered, [live(2, row=7)], 2, place) == [buffered[1], buffered[0]]


def test_by_deadline_example() -> None:
    # One place left in step 5; last chances: buffered 6, still generated 5.
    filled = 5 * 2 + 1
    arguments: dict[str, Any] = {"filled_places": filled, "groups_per_step": 2, "max_staleness": 2}
    assert planning.by_deadline([live(0, oldest=4)], [live(1, oldest=3)], 1, **arguments) is None
    assert planning.by_deadline([live(0, oldest=4)], [live(1, oldest=4)], 1, **arguments) is not None
    assert planning.by_deadline([live(0, oldest=4)], [], 1, **arguments) is not None


def test_by_deadline_takes_the_earliest_last_chance_first_and_looks_at_every_later_step() -> None:
    arguments: dict[str, Any] = {"groups_per_step": 2, "max_staleness": 1}
    late, early = live(0, oldest=1), live(1, oldest=0)
    assert planning.by_deadline([late, early], [], 1, filled_places=0, **arguments) == [early]
    assert planning.by_deadline([late], [], 2, filled_places=0, **arguments) is None
    # Two under way with last chance 1 and two with last chance 2: places 2 .. 5 are theirs, one less will not do.
    under_way = [live(i, oldest=oldest) for i, oldest in ((2, 0), (3, 0), (4, 1), (5, 1))]
    assert planning.by_deadline([live(6, oldest=5)], under_way, 1, filled_places=1, **arguments) is not None
    assert planning.by_deadline([live(6, oldest=5)], under_way, 1, filled_places=2, **arguments) is None


# ---------------------------------------------------------------- data order


def test_order_example() -> None:
    order = DataOrder(3, 1, lambda episode: (2, 0, 1))
    assert [order.next(), order.next()] == [(Uid(0, 2), 0), (Uid(0, 0), 0)]
    order.give_back(Uid(0, 2), 1)
    assert order.first_retried == (0, 0)
    assert [order.next(), order.next()] == [(Uid(0, 2), 1), (Uid(0, 1), 0)]
    assert not order.has_next and order.first_retried is None


def test_every_uid_is_handed_out_once_episode_by_episode() -> None:
    orders = {0: [1, 0, 2], 1: [2, 1, 0]}
    order = DataOrder(3, 2, orders.__getitem__)
    seen = []
    while order.has_next:
        seen.append(order.next())
    assert seen == [(Uid(e, r), 0) for e in (0, 1) for r in orders[e]]


def test_retried_uids_come_in_data_order() -> None:
    order = DataOrder(3, 2, lambda episode: (2, 0, 1))
    for _ in range(4):
        order.next()
    for uid in (Uid(1, 2), Uid(0, 1), Uid(0, 0)):
        order.give_back(uid, 1)
    assert [order.next()[0] for _ in range(4)] == [Uid(0, 0), Uid(0, 1), Uid(1, 2), Uid(1, 0)]


def test_a_uid_given_back_at_the_very_end_is_still_there() -> None:
    order = DataOrder(1, 1, lambda episode: (0,))
    order.next()
    assert not order.has_next
    order.give_back(Uid(0, 0), 2)
    assert order.has_next and order.next() == (Uid(0, 0), 2)


def test_place_says_where_a_uid_stands() -> None:
    order = DataOrder(3, 2, lambda episode: (2, 0, 1) if episode == 0 else (0, 1, 2))
    assert [order.place(Uid(0, row)) for row in range(3)] == [(0, 1), (0, 2), (0, 0)]
    assert [order.place(Uid(1, row)) for row in range(3)] == [(1, 0), (1, 1), (1, 2)]


def test_settled_uids_are_skipped_after_a_resume_and_whole_episodes_too() -> None:
    make = lambda: DataOrder(9, 3, lambda episode: np.arange(9)[::-1])
    order = make()
    for row in range(9):
        order.settle(Uid(0, row))
    order.settle(Uid(1, 8))
    order.settle(Uid(1, 6))
    resumed = make()
    resumed.restore(order.snapshot({Uid(1, 5): 2}))
    assert order.is_settled(Uid(1, 8)) and resumed.is_settled(Uid(1, 8)) and not resumed.is_settled(Uid(2, 8))
    assert [resumed.next() for _ in range(3)] == [(Uid(1, 7), 0), (Uid(1, 5), 2), (Uid(1, 4), 0)]


def test_a_second_resume_keeps_attempts_that_were_not_handed_out_yet() -> None:
    make = lambda: DataOrder(4, 1, lambda episode: range(4))
    first, second, third = make(), make(), make()
    first.next()
    first.give_back(Uid(0, 0), 1)
    second.restore(first.snapshot({Uid(0, 3): 2}))
    third.restore(second.snapshot({}))
    assert [third.next() for _ in range(4)] == [(Uid(0, 0), 1), (Uid(0, 1), 0), (Uid(0, 2), 0), (Uid(0, 3), 2)]


def test_a_run_that_is_complete_has_nothing_to_hand_out_after_a_resume() -> None:
    order, resumed = DataOrder(2, 1, lambda episode: range(2)), DataOrder(2, 1, lambda episode: range(2))
    for row in range(2):
        order.settle(Uid(0, row))
    resumed.restore(order.snapshot({}))
    assert not resumed.has_next


def test_records_travel_as_msgpack() -> None:
    entry = PlanEntry(3, TRAIN, 1, 2, True, True, [[1], [2]])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=PlanEntry) == entry
    assert Lease(1, 2, 3, 0).uid == Uid(2, 3)
