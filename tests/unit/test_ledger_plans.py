"""What the ledger plans, and when: minibatches, saves, evaluations, the end; commits and events."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.ledger_steps import (
    END,
    EVAL,
    SAVE,
    STOP,
    TRAIN,
    deliver,
    grant,
    names,
    play,
    started,
    step,
    train,
)
from zbgrpo.errors import ProtocolError

# ---------------------------------------------------------------- plans


def test_minibatches_are_taken_in_order_of_arrival_and_nobody_waits_for_a_slow_response() -> None:
    ledger = started(max_staleness=2)
    grant(ledger)
    deliver(ledger, 5, 3, 4, 1)
    assert [sorted(entry.ranks[0]) for entry in ledger.plan()] == [[3, 5], [1, 4]]
    assert sorted(ledger.leased) == [0, 2]


def test_minibatches_of_a_step_are_numbered_and_the_last_closes_it() -> None:
    ledger = started(groups_per_step=6, plan_ahead=9, num_rows=20)
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
    ledger = started(groups_per_step=6, dp_size=2, plan_ahead=4, num_rows=20)
    grant(ledger)
    for lease_id, num_tokens in enumerate((90, 10, 50, 40, 30, 20, 7, 5)):
        deliver(ledger, lease_id, num_tokens=num_tokens)
    # Tokens before each minibatch: (0, 0), (90, 10), (130, 60); the longer one goes where fewer are.
    # The last one is of the next step, which begins with (0, 0).
    assert [entry.ranks for entry in ledger.plan()] == [[[0], [1]], [[3], [2]], [[5], [4]], [[6], [7]]]


def test_steps_cross_the_ends_of_episodes() -> None:
    ledger = started(num_rows=3, num_episodes=2, max_steps=None)
    entries = play(ledger)
    assert names(entries) == [(TRAIN, 0), (TRAIN, 1), (TRAIN, 2), (SAVE, 3), (END, 3)]
    assert ledger.totals["consumed"] == 6


def test_groups_of_a_step_that_cannot_be_filled_are_dropped_and_the_end_is_planned() -> None:
    ledger = started(num_rows=7, groups_per_step=4, groups_per_minibatch=2, max_staleness=4)
    deliver(ledger, *grant(ledger)[:6])
    entries = ledger.plan()
    assert names(entries) == [(TRAIN, 0), (TRAIN, 0)]
    train(ledger, entries)
    entries = ledger.plan()
    assert names(entries) == [(TRAIN, 1)]  # lease 6 is still under way and one more is needed ...
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
    for lease_ids in iter(lambda: grant(ledger), []):
        assert ledger.plan() == []
        for lease_id in lease_ids:
            ledger.filter(lease_id, 1.0)
    assert names(ledger.plan()) == [(END, 0)]
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


def test_no_state_overtakes_an_evaluation_that_training_waits_for() -> None:
    """Or a run that is killed then would resume behind it, without the weights that it needs."""
    ledger = started(eval_interval=1, save_interval=1, max_steps=2)
    assert names(step(ledger)) == [(TRAIN, 0), (SAVE, 1), (EVAL, 1), (TRAIN, 1)]
    assert ledger.evaluating and ledger.plan() == []
    ledger.evaluating = False
    assert names(ledger.plan()) == [(SAVE, 2), (EVAL, 2)]
    free = started(eval_interval=2, save_interval=1, max_steps=4, max_staleness=9)
    planned = [name for _ in range(3) for name in names(step(free))]
    assert free.evaluating and (SAVE, 3) in planned, "here training need not wait, and does not"


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
