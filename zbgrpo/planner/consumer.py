"""The simulated consumers, and the version on its way to the producers.

Replicas follow the same entries at their own pace and meet at the commit. All of that is known as soon as an entry is:
its times are computed at once, for all replicas together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np

from zbgrpo.ledger.records import PlanEntry
from zbgrpo.planner.events import Clock
from zbgrpo.planner.scenario import Account, Scenario


class SimulatedConsumers:
    """All replicas. `account` is their sum, up to the last entry that was given."""

    def __init__(self, scenario: Scenario) -> None:
        self._rates = scenario.rates
        self._fixed_seconds = scenario.rates.train.microbatch_seconds * scenario.num_microbatches
        self._free = np.zeros(scenario.num_replicas)  # when each replica is done with what it has
        self._started = False
        self.account = Account()

    def train(self, entry: PlanEntry, tokens: np.ndarray, arrival: float) -> tuple[float, Optional[float]]:
        """Train an entry that arrives at `arrival`; `tokens` [replicas] are those of each.

        Returns when replica 0 has trained it, and when the step has committed if the entry closes it.
        """
        account, rates = self.account, self._rates
        if not self._started:  # all before the first minibatch is startup
            self._started = True
            self._free[:] = arrival
        begins = np.maximum(self._free, arrival)
        seconds = self._fixed_seconds + rates.train.token_seconds * tokens
        ends = begins + seconds
        account.starved += float((begins - self._free).sum())
        account.busy += float(seconds.sum())
        self._free = ends
        if not entry.closes_step:
            return float(ends[0]), None
        last, num = float(ends.max()), len(ends)
        account.imbalance += float((last - ends).sum())
        account.busy += num * rates.train.commit_seconds
        account.blocked += num * rates.weights.copy_seconds
        committed = last + rates.train.commit_seconds
        self._free = np.full(num, committed + rates.weights.copy_seconds)
        return float(ends[0]), committed

    def save(self, arrival: float) -> None:
        """A SAVE entry."""
        self._wait(arrival)
        self._free += self._rates.save_seconds
        self.account.checkpoint += len(self._free) * self._rates.save_seconds

    def end(self, arrival: float) -> float:
        """An END entry; returns when all have left."""
        self._wait(arrival)
        return float(self._free.max())

    def _wait(self, arrival: float) -> None:
        begins = np.maximum(self._free, arrival)
        self.account.starved += float((begins - self._free).sum())
        self._free = begins


class SimulatedPublisher:
    """One version is sent, the newest of the others waits (`WeightPublisher`)."""

    def __init__(self, clock: Clock, broadcast_seconds: float, sent: Callable[[int], None]) -> None:
        self._clock, self._seconds, self._sent = clock, broadcast_seconds, sent
        self._sending = False
        self._waiting: Optional[int] = None
        self.idle_at = 0.0
        self.skipped = 0
        """Versions that a newer one replaced before they were sent."""

    def publish(self, version: int) -> None:
        """A version has been copied."""
        if not self._sending:
            self._send(version)
            return
        self.skipped += self._waiting is not None
        self._waiting = version
        self.idle_at += self._seconds

    def _send(self, version: int) -> None:
        self._sending = True
        self.idle_at = self._clock.now + self._seconds
        self._clock.at(self.idle_at, self._complete, version)

    def _complete(self, version: int) -> None:
        self._sending = False
        if self._waiting is not None:
            version_next, self._waiting = self._waiting, None
            self._send(version_next)
        self._sent(version)
