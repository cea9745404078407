"""The virtual clock: what happens next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls functions at their times, earliest first, those of one time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ties = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Plan `call(*args)`; a time that has passed means now."""
        heapq.heappush(self._events, (max(time, self.now), next(self._ties), call, args))

    def step(self) -> bool:
        """The next event; False when there is none."""
        if not self._events:
            return False
        self.now, _, call, args = heapq.heappop(self._events)
        call(*args)
        return True
