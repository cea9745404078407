"""Where the wall time of a rank goes, and the bubble that follows from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

BUSY = "busy"
"""Training, decoding: the work the rank is there for. A producer's is weighted by its occupied slots."""
STARVED = "starved"
"""Nothing to do: no plan entry (consumer), no lease or empty slots (producer)."""
BLOCKED_ON_WEIGHTS = "blocked_on_weights"
"""Stopped while weights are copied, sent, received or applied."""
IMBALANCE = "imbalance"
"""Waiting for a slower rank of the same role."""
EVAL = "eval"
CHECKPOINT = "checkpoint"
STARTUP = "startup"
"""Up to the first minibatch (consumer) or the first decode step (producer)."""
SHUTDOWN = "shutdown"
UNBOOKED = "unbooked"
"""Wall time that no phase claims. Not a phase one may open."""

PHASES = (BUSY, STARVED, BLOCKED_ON_WEIGHTS, IMBALANCE, EVAL, CHECKPOINT, STARTUP, SHUTDOWN)
ACCOUNTS = (*PHASES, UNBOOKED)
BUBBLE_PHASES = (STARVED, BLOCKED_ON_WEIGHTS, IMBALANCE)
UNBOOKED_TOLERANCE = 0.01
"""Unbooked time beyond this share of the time between startup and shutdown counts as bubble."""

Interval = tuple[str, float, float, float, str]
"""Time as it was booked: account, start, end, share of it that the account got, account of the rest."""


class Phase:
    """Context manager that books the time inside it; reusable and re-entrant, since its state is in the ledger."""

    __slots__ = ("_ledger", "name", "rest", "share")

    def __init__(self, ledger: TimeLedger, name: str, share: float, rest: str) -> None:
        self._ledger = ledger
        self.name = name
        self.share = share
        self.rest = rest

    def __enter__(self) -> None:
        self._ledger._settle()
        self._ledger._open.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger._settle()
        if self._ledger._open.pop() is not self:
            raise RuntimeError(f"phase {self.name!r} closed out of order")


class TimeLedger:
    """Books all wall time of one rank, from construction on, to named phases.

    States: a stack of open phases whose bottom is `unbooked`. Time always runs on the account of the innermost
    open phase, so a nested phase pauses the outer one.

    Invariant: the seconds of all accounts add up to the wall time since construction (plus what `started` added);
    `book` and `book_split` move time between accounts and never make any. No account is ever negative.

    One thread owns a ledger: the one whose time it is. A phase costs well under a microsecond beside two clock reads,
    and two calls of `on_span` where there is one.

    Example, with `clock` giving 0, 0, 10, 12, 20 seconds:

        ledger = TimeLedger()                 # 0
        with ledger.phase(BUSY):              # 0
            with ledger.phase(IMBALANCE):     # 10
                ...                           # 12
        ledger.shares()                       # 20 -> busy 0.9, imbalance 0.1, everything else 0
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        on_span: Callable[[Interval], None] | None = None,
    ) -> None:
        """`started`: an earlier reading of the same clock; the time since then (imports) is booked as startup.

        `on_span` is called in the owner's thread with intervals that follow each other without a gap, and must be
        quick. What `book` moves later stays in them where it was.
        """
        self._clock, self._on_span = clock, on_span
        self._mark = clock()
        self._seconds = dict.fromkeys(ACCOUNTS, 0.0)
        if started is not None and started < self._mark:
            self._seconds[STARTUP] = self._mark - started
            if on_span is not None:
                on_span((STARTUP, started, self._mark, 1.0, STARTUP))
        self._open = [Phase(self, UNBOOKED, 1.0, UNBOOKED)]
        self._phases = {name: Phase(self, name, 1.0, name) for name in PHASES}

    @property
    def current(self) -> str:
        """The account on which time runs now. Any thread may ask."""
        return self._open[-1].name

    def phase(self, name: str) -> Phase:
        """Context manager for phase `name`; the same object every time. Raises ValueError for an unknown name."""
        try:
            return self._phases[name]
        except KeyError:
            raise _unknown(name) from None

    def phase_weighted(self, name: str, share: float, rest: str = STARVED) -> Phase:
        """As `phase`, but books only `share` (0 to 1, clamped) of the time to `name` and the other part to `rest`.

        A decode step with 6 of 8 slots occupied is `phase_weighted(BUSY, 6 / 8)`.
        """
        if name not in self._phases or rest not in self._phases:
            raise _unknown(rest if name in self._phases else name)
        return Phase(self, name, min(1.0, max(0.0, share)), rest)

    def book(self, name: str, seconds: float) -> None:
        """Move `seconds` that have just passed from the innermost open phase to `name`.

        At most what the open phase holds is moved, so that time measured with another clock cannot make the shares
        exceed 1. Raises ValueError for an unknown name, or seconds that are negative or not finite.
        """
        if name not in self._phases:
            raise _unknown(name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"cannot book {seconds} seconds")
        self._settle()
        source = self._open[-1].name
        moved = min(seconds, self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[name] += moved

    def book_split(self, seconds: float, share: float, name: str = BUSY, rest: str = STARVED) -> None:
        """`book` a step of `seconds`: `share` of it (occupied / all slots) to `name`, the other part to `rest`."""
        part = seconds * min(1.0, max(0.0, share))
        self.book(name, part)
        self.book(rest, seconds - part)

    def snapshot(self) -> dict[str, float]:
        """Seconds by account (`ACCOUNTS`, all present) up to now, open phases included."""
        self._settle()
        return dict(self._seconds)

    def delta(self, since: Mapping[str, float]) -> dict[str, float]:
        """Seconds by account since an earlier `snapshot`. Not negative, unless `book` took from older time."""
        return {name: seconds - since.get(name, 0.0) for name, seconds in self.snapshot().items()}

    def shares(self) -> dict[str, float]:
        """Shares of all wall time by account; they add up to 1."""
        return shares_of(self.snapshot())

    def _settle(self) -> None:
        now = self._clock()
        passed = now - self._mark
        top = self._open[-1]
        if self._on_span is not None and passed > 0:
            self._on_span((top.name, self._mark, now, top.share, top.rest))
        self._mark = now
        if top.share == 1.0:
            self._seconds[top.name] += passed
        else:
            part = passed * top.share
            self._seconds[top.name] += part
            self._seconds[top.rest] += passed - part


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Divide by the sum. With no time at all, everything counts as unbooked, so that shares still add up to 1."""
    total = sum(seconds.values())
    if total <= 0:
        return {**dict.fromkeys(seconds, 0.0), UNBOOKED: 1.0}
    return {name: value / total for name, value in seconds.items()}


def inside(times: Mapping[str, float]) -> float:
    """Time between startup and shutdown, in the unit of `times`."""
    return sum(times.values()) - times.get(STARTUP, 0.0) - times.get(SHUTDOWN, 0.0)


def bubble_time(times: Mapping[str, float]) -> float:
    """Time one rank lost, in the unit of `times`: the bubble phases and what is unbooked beyond the tolerance."""
    excess = times.get(UNBOOKED, 0.0) - UNBOOKED_TOLERANCE * inside(times)
    return sum(times.get(name, 0.0) for name in BUBBLE_PHASES) + max(0.0, excess)


def bubble(times: Mapping[str, float]) -> float:
    """Bubble of one rank, 0 to 1: (starved + blocked_on_weights + imbalance + excess of unbooked) / (time between
    startup and shutdown). `times` may be seconds or shares. 0 if there is no such time."""
    span = inside(times)
    return bubble_time(times) / span if span > 0 else 0.0


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")
