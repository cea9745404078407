"""The time ledger: all wall time booked once, the bubble by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbgrpo.observe import timeledger as tl
from zbgrpo.observe.timeledger import TimeLedger, bubble, shares_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nested_phase_pauses_the_outer_one(clock: Clock) -> None:
    ledger = TimeLedger(clock)
    clock.pass_(1)
    with ledger.phase(tl.BUSY):
        clock.pass_(10)
        with ledger.phase(tl.IMBALANCE):
            clock.pass_(2)
            with ledger.phase(tl.BUSY):
                clock.pass_(0.5)
        clock.pass_(6.5)
    seconds = ledger.snapshot()
    assert seconds[tl.BUSY] == pytest.approx(17)
    assert seconds[tl.IMBALANCE] == pytest.approx(2)
    assert seconds[tl.UNBOOKED] == pytest.approx(1)
    assert ledger.shares()[tl.BUSY] == pytest.approx(17 / 20)
    assert sum(ledger.shares().values()) == pytest.approx(1)


def test_an_open_phase_shows_in_snapshot_and_delta(clock: Clock) -> None:
    ledger = TimeLedger(clock)
    with ledger.phase(tl.STARVED):
        clock.pass_(3)
        before = ledger.snapshot()
        clock.pass_(4)
        assert ledger.delta(before) == {**dict.fromkeys(tl.ACCOUNTS, 0.0), tl.STARVED: pytest.approx(4)}
    assert before[tl.STARVED] == pytest.approx(3)


def test_a_phase_that_raises_is_closed(clock: Clock) -> None:
    ledger = TimeLedger(clock)
    with pytest.raises(KeyError), ledger.phase(tl.BUSY), ledger.phase(tl.EVAL):
        clock.pass_(1)
        raise KeyError
    clock.pass_(1)
    assert ledger.snapshot()[tl.EVAL] == pytest.approx(1)
    assert ledger.snapshot()[tl.UNBOOKED] == pytest.approx(1)


def test_weights_split_a_decode_step(clock: Clock) -> None:
    ledger = TimeLedger(clock)
    with ledger.phase_weighted(tl.BUSY, 6 / 8):
        clock.pass_(4)
        with ledger.phase(tl.BLOCKED_ON_WEIGHTS):
            clock.pass_(1)
        clock.pass_(4)
    clock.pass_(8)
    ledger.book_split(8, 1 / 4, rest=tl.EVAL)
    seconds = ledger.snapshot()
    assert seconds[tl.BUSY] == pytest.approx(6 + 2)
    assert seconds[tl.STARVED] == pytest.approx(2)
    assert seconds[tl.EVAL] == pytest.approx(6)
    assert seconds[tl.BLOCKED_ON_WEIGHTS] == pytest.approx(1)
    assert seconds[tl.UNBOOKED] == pytest.approx(0)


def test_book_moves_time_and_never_makes_any(clock: Clock) -> None:
    ledger = TimeLedger(clock)
    clock.pass_(2)
    ledger.book(tl.BUSY, 1.5)
    ledger.book(tl.CHECKPOINT, 99)  # measured with a worse clock: only what is there can move
    seconds = ledger.snapshot()
    assert (seconds[tl.BUSY], seconds[tl.CHECKPOINT], seconds[tl.UNBOOKED]) == pytest.approx((1.5, 0.5, 0))


def test_time_before_construction_is_startup(clock: Clock) -> None:
    ledger = TimeLedger(clock, started=clock.now - 7)
    clock.pass_(1)
    assert ledger.snapshot()[tl.STARTUP] == pytest.approx(7)
    assert sum(ledger.snapshot().values()) == pytest.approx(8)


def test_unknown_names_and_bad_seconds_are_errors(clock: Clock) -> None:
    ledger = TimeLedger(clock)
    for name in ("bussy", tl.UNBOOKED):
        with pytest.raises(ValueError, match="unknown phase"):
            ledger.phase(name)
        with pytest.raises(ValueError, match="unknown phase"):
            ledger.book(name, 1)
        with pytest.raises(ValueError, match=f"unknown phase '{name}'"):
            ledger.phase_weighted(tl.BUSY, 0.5, rest=name)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot book"):
            ledger.book(tl.BUSY, seconds)


def test_no_time_at_all_is_unbooked(clock: Clock) -> None:
    assert TimeLedger(clock).shares() == {**dict.fromkeys(tl.PHASES, 0.0), tl.UNBOOKED: 1.0}


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "weighted", "close", "book", "split"]),
        st.sampled_from(tl.PHASES),
        st.floats(0, 50),
        st.floats(-0.5, 1.5),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_shares_add_up_whatever_is_booked(actions: list[tuple[str, str, float, float]]) -> None:
    clock = Clock()
    ledger = TimeLedger(clock)
    opened = []
    for action, name, seconds, share in actions:
        clock.pass_(seconds / 2)
        if action in ("open", "weighted"):
            opened.append(ledger.phase(name) if action == "open" else ledger.phase_weighted(name, share))
            opened[-1].__enter__()
        elif action == "close" and opened:
            opened.pop().__exit__(None, None, None)
        elif action == "book":
            ledger.book(name, seconds)
        elif action == "split":
            ledger.book_split(seconds, share, name)
    snapshot = ledger.snapshot()
    assert sum(snapshot.values()) == pytest.approx(clock.now - 100)
    assert min(snapshot.values()) >= -1e-9
    assert sum(ledger.shares().values()) == pytest.approx(1)


HAND = {"busy": 70.0, "starved": 4.0, "blocked_on_weights": 3.0, "imbalance": 2.0, "eval": 15.0, "checkpoint": 6.0}


def test_bubble_by_hand() -> None:
    # 100 s between startup and shutdown, 9 of them lost.
    times = {**HAND, "startup": 50.0, "shutdown": 10.0}
    assert bubble(times) == pytest.approx(0.09)
    assert bubble(shares_of(times)) == pytest.approx(0.09)


def test_unbooked_counts_beyond_one_percent() -> None:
    one_percent = {**HAND, "busy": 69.0, "unbooked": 1.0, "startup": 50.0}
    assert bubble(one_percent) == pytest.approx(0.09)
    five_percent = {**HAND, "busy": 65.0, "unbooked": 5.0, "startup": 50.0}
    assert bubble(five_percent) == pytest.approx(0.09 + 0.04)


def test_bubble_without_time_is_zero() -> None:
    assert bubble({"startup": 3.0}) == 0.0
