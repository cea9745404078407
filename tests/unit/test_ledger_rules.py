"""The ledger's sentences, one test each: states of a group, who may generate, modes, snapshots, options."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.support.ledger_steps import (
    END,
    SAVE,
    TRAIN,
    deliver,
    grant,
    names,
    options,
    play,
    started,
    step,
    train,
)
from zbgrpo.errors import ConfigError, ProtocolError
from zbgrpo.ledger.ledger import Ledger
from zbgrpo.types import DropReason, Uid

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
