"""How far the monotonic clock of this process is from the hub's: measured by round trips, the best ones kept.

One exchange, as in NTP (RFC 5905, section 8): this side sends at t0, the hub receives at t1 and answers at t2, this
side receives at t3, each by its own clock. With ways of equal length there and back

    offset = ((t1 - t0) + (t2 - t3)) / 2          hub's clock = own clock + offset
    round trip = (t3 - t0) - (t2 - t1)            the error is at most half of it, however unequal the ways are

The hub may take its time to answer: t2 - t1 is not part of the round trip.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

WINDOW_SECONDS = 300.0
"""Clocks of two machines drift apart, so a measurement is good for about this long."""


class Offset(NamedTuple):
    """One measurement, in seconds. `at` is by this process's own clock."""

    at: float
    offset: float
    round_trip: float


class ClockOffset:
    """The best measurement of the window that runs: that with the least round trip. One thread calls `add`."""

    def __init__(self) -> None:
        self.best: Offset | None = None
        """May be read by any thread."""
        self._window_since = 0.0

    def add(self, t0: float, t1: float, t2: float, t3: float) -> None:
        """Take an exchange; one that cannot be (an answer before its question) is ignored."""
        measured = Offset(t3, ((t1 - t0) + (t2 - t3)) / 2, (t3 - t0) - (t2 - t1))
        if not (measured.round_trip >= 0 and t3 >= t0 and t2 >= t1):
            return
        if self.best is None or t3 - self._window_since >= WINDOW_SECONDS:
            self.best, self._window_since = measured, t3
        elif measured.round_trip < self.best.round_trip:
            self.best = measured


def best_offsets(measured: Iterable[Offset]) -> list[Offset]:
    """The best one of each window, in order of time."""
    best: list[Offset] = []
    window_since = 0.0
    for offset in sorted(measured):
        if not best or offset.at - window_since >= WINDOW_SECONDS:
            best.append(offset)
            window_since = offset.at
        elif offset.round_trip < best[-1].round_trip:
            best[-1] = offset
    return best


def offset_at(best: Sequence[Offset], at: float) -> float:
    """The offset at a moment of the own clock: between two measurements on the line through them, else the nearest.

    `best` is in order of time and not empty.
    """
    later = bisect_left(best, at, key=lambda offset: offset.at)
    if later in (0, len(best)):
        return best[max(0, later - 1)].offset
    before, after = best[later - 1], best[later]
    share = (at - before.at) / (after.at - before.at)
    return before.offset + share * (after.offset - before.offset)


def clock_name() -> str:
    """Names the clock that this process reads as monotonic: equal names, one clock. Empty where it cannot be told.

    The clock is the kernel's since it booted, unless a time namespace shifts it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""
