"""The parts of the ledger one by one: who trains what, the data order, evaluation rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from zbgrpo.ledger import planning
from zbgrpo.ledger.evaluation import EvaluationBook, EvaluationLease, EvaluationResult
from zbgrpo.ledger.order import DataOrder
from zbgrpo.ledger.records import Lease, LiveGroup, PlanEntry, PlanKind
from zbgrpo.types import Uid


def live(
    lease_id: int, *, tokens: int = 0, oldest: int = 0, row: int | None = None, attempt: int = 0, producer: int = 0
) -> LiveGroup:
    return LiveGroup(Lease(lease_id, 0, lease_id if row is None else row, attempt), producer, oldest, tokens)


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
    entry = PlanEntry(3, PlanKind.TRAIN, 1, 2, True, True, [[1], [2]])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=PlanEntry) == entry
    assert Lease(1, 2, 3, 0).uid == Uid(2, 3)


# ---------------------------------------------------------------- evaluation


def result(lease: EvaluationLease, error: str | None = None) -> EvaluationResult:
    return EvaluationResult(lease.task, lease.row, lease.version, [1.0], [1.0], [1.0], [7], [False], ["text"], error)


def test_evaluation_example() -> None:
    book = EvaluationBook({"math": 3}, num_producers=2, leases_per_producer=8)
    book.start(4)
    assert book.grant(1) == []
    assert [(lease.task, lease.row, lease.version) for lease in book.grant(0)] == [("math", row, 4) for row in range(3)]
    assert book.evaluators == (0,)


@pytest.mark.parametrize(("num_producers", "evaluators"), [(1, 1), (3, 1), (4, 1), (7, 1), (8, 2), (16, 4)])
def test_a_quarter_of_the_producers_and_at_least_one_evaluates(num_producers: int, evaluators: int) -> None:
    book = EvaluationBook({"a": 100}, num_producers, leases_per_producer=2)
    book.start(0)
    assert [len(book.grant(p)) for p in range(num_producers)] == [2] * evaluators + [0] * (num_producers - evaluators)


def test_one_evaluation_at_a_time() -> None:
    book = EvaluationBook({"a": 1}, 1, 1)
    assert book.version is None and book.grant(0) == []
    book.start(3)
    assert book.version == 3
    with pytest.raises(AssertionError, match="one evaluation at a time"):
        book.start(4)


def test_rows_of_all_tasks_are_leased_once_within_the_limit_of_a_producer() -> None:
    book = EvaluationBook({"a": 2, "b": 3}, 8, leases_per_producer=2)
    book.start(0)
    first, second = book.grant(0), book.grant(1)
    assert book.grant(0) == []
    assert book.deliver(first[0].lease_id, result(first[0]))
    third = book.grant(0)
    leased = [(lease.task, lease.row) for lease in [*first, *second, *third]]
    assert leased == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]
    assert len({lease.lease_id for lease in [*first, *second, *third]}) == 5


def test_an_evaluation_is_done_when_every_row_is_and_returns_each_once_by_task_and_row() -> None:
    book = EvaluationBook({"b": 2, "a": 2}, 1, 8)
    book.start(6)
    leases = book.grant(0)
    for lease in reversed(leases):
        assert book.finish() is None
        assert book.deliver(lease.lease_id, result(lease))
    results = book.finish()
    assert results is not None
    assert [(r.task, r.row) for r in results] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert book.finish() is None and book.version is None
    book.start(7)
    assert [lease.version for lease in book.grant(0)] == [7] * 4


def test_a_duplicate_evaluation_result_is_refused_also_in_the_next_evaluation() -> None:
    book = EvaluationBook({"a": 1}, 1, 1)
    book.start(0)
    (lease,) = book.grant(0)
    assert book.deliver(lease.lease_id, result(lease))
    assert not book.deliver(lease.lease_id, result(lease)) and not book.give_back(lease.lease_id)
    assert len(book.finish() or []) == 1
    assert not book.deliver(lease.lease_id, result(lease))
    book.start(1)
    (new,) = book.grant(0)
    assert new.lease_id != lease.lease_id
    assert not book.deliver(lease.lease_id, result(lease)) and book.finish() is None


def test_an_evaluation_row_that_is_given_back_is_leased_again_and_awaited() -> None:
    book = EvaluationBook({"a": 2}, 1, 2)
    book.start(0)
    one, two = book.grant(0)
    assert book.give_back(one.lease_id)
    assert not book.deliver(one.lease_id, result(one))
    assert book.deliver(two.lease_id, result(two)) and book.finish() is None
    (again,) = book.grant(0)
    assert (again.task, again.row) == (one.task, one.row) and again.lease_id != one.lease_id
    assert book.deliver(again.lease_id, result(again, error="no answer"))
    assert [r.error for r in book.finish() or []] == ["no answer", None]


def test_an_evaluation_without_rows_is_done_at_once() -> None:
    book = EvaluationBook({"a": 0}, 1, 1)
    book.start(0)
    assert book.grant(0) == [] and book.finish() == []
