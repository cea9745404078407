"""One simulated producer: decode slots that step together, as in `Producer.run`.

Nothing happens between two events: while the same responses occupy the slots, all decode steps take equally long, so
the next moment of interest is the step in which the next response ends, or the first one after leases or weights have
come. A turn is what the loop does at such a moment: take leases, apply weights, ask for leases, start responses.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from zbgrpo.planner.events import Clock
from zbgrpo.planner.scenario import Account, Scenario

_IDLE_SECONDS = 0.02
"""A loop with nothing to decode looks for new weights so often."""


class Hub(Protocol):
    """What producers tell the hub. Times are those of sending."""

    def wants(self, time: float, producer: int, num_leases: int, received: int) -> None: ...

    def has_applied(self, time: float, producer: int, version: int) -> None: ...

    def has_completed(self, time: float, group: Group) -> None:
        """Its last response is there: scoring begins."""


@dataclass(slots=True)
class Group:
    """A leased group. Starts and ends are decode steps of its producer."""

    lease_id: int
    producer: int
    lengths: list[int]
    filtered: bool
    oldest_version: int = -1
    starts: list[int] = field(default_factory=list)
    unfinished: int = 0


class SimulatedProducer:
    """See the module's text."""

    def __init__(self, number: int, scenario: Scenario, clock: Clock, hub: Hub) -> None:
        self.number, self.account = number, Account()
        self.applied = 0
        self.version_steps: list[tuple[int, int]] = [(0, 0)]
        """(version, the first decode step with it)."""
        self._clock, self._hub, self._rates = clock, hub, scenario.rates
        self._slots, self._generations = scenario.slots, scenario.generations
        self._step_seconds = [self._rates.decode.of_step(occupied) for occupied in range(self._slots + 1)]
        self._prompt_share = scenario.rates.decode.prompt_seconds / scenario.generations
        self._active: list[tuple[int, int, Group]] = []  # heap of (last step, tie, group)
        self._waiting: deque[Group] = deque()  # groups with responses that have not started
        self._inbox: list[Group] = []
        self._num_unstarted = self._received = self._tie = 0
        self._asked = (-1, -1)
        self._ready = 0
        self._step = 0  # decode steps done
        self._plan = 0  # number of the turn that is planned; an older one is void
        self._turn_at = math.inf
        self._is_busy = False  # with responses that have ended, between two steps
        # The stretch since the last turn: when its first step ends, and how long each further one takes.
        self._first_end = self._period = 0.0
        self._starved_rate = 1.0
        self._settled_at = 0.0
        self._scoring_until = 0.0  # scoring that decoding shares its core with, if nothing is decoded meanwhile

    # ---------------------------------------------------------------- what comes from outside

    def take(self, groups: list[Group]) -> None:
        """Leases have arrived."""
        self._inbox += groups
        self._wake(self._clock.now)

    def offer(self, version: int) -> None:
        """A version is complete here."""
        self._ready = version
        now = self._clock.now
        if not self._active:  # it does not wake an idle loop
            now = self._settled_at + math.ceil((now - self._settled_at) / _IDLE_SECONDS) * _IDLE_SECONDS
        self._wake(now)

    def settle(self, time: float) -> None:
        """Book the time up to `time`."""
        if time > self._settled_at:
            passed, self._settled_at = time - self._settled_at, time
            self.account.starved += passed * self._starved_rate
            self.account.busy += passed * (1 - self._starved_rate)

    def _wake(self, time: float) -> None:
        """Have a turn at the end of the step that is running at `time`."""
        if self._is_busy:
            return
        if self._active:
            time = max(time, self._clock.now)
            if time <= self._first_end:
                time = self._first_end
            else:
                time = self._first_end + math.ceil((time - self._first_end) / self._period - 1e-9) * self._period
        if time < self._turn_at - 1e-12:
            self._plan_turn(time)

    def _plan_turn(self, time: float) -> None:
        self._plan += 1
        self._turn_at = time
        self._clock.at(time, self._turn, self._plan)

    # ---------------------------------------------------------------- a turn of the loop

    def _turn(self, plan: int) -> None:
        if plan != self._plan:
            return
        time, self._turn_at = self._clock.now, math.inf
        self.settle(time)
        num_finished, completed = self._finish_responses(time)
        time = self._spend(time, num_finished * self._rates.decode.response_seconds)
        self._is_busy = True  # what comes meanwhile is taken behind it, before the next step
        self._clock.at(time, self._go_on, num_finished, completed)

    def _go_on(self, num_finished: int, completed: list[Group]) -> None:
        time, self._is_busy = self._clock.now, False
        for group in completed:
            self._hub.has_completed(time, group)
        self._take_leases()
        time = self._apply_weights(time)
        self._ask(time)
        self._scoring_until = max(self._scoring_until, time) + num_finished * self._rates.decode.finish_seconds
        self._decode(time, self._start_responses())

    def _finish_responses(self, time: float) -> tuple[int, list[Group]]:
        if not self._active:
            return 0, []
        self._step += 1 + max(0, round((time - self._first_end) / self._period)) if self._period else 1
        num, completed = 0, []
        while self._active and self._active[0][0] <= self._step:
            group = heapq.heappop(self._active)[2]
            num += 1
            group.unfinished -= 1
            if group.unfinished == 0:
                completed.append(group)
        return num, completed

    def _spend(self, time: float, seconds: float) -> float:
        self.account.busy += seconds
        self._settled_at = time + seconds
        return self._settled_at

    def _take_leases(self) -> None:
        self._received += len(self._inbox)
        self._num_unstarted += len(self._inbox) * self._generations
        self._waiting.extend(self._inbox)
        self._inbox.clear()

    def _apply_weights(self, time: float) -> float:
        if self._ready <= self.applied:
            return time
        self.applied = self._ready
        self.version_steps.append((self.applied, self._step))
        self.account.blocked += self._rates.weights.apply_seconds
        self._settled_at = time + self._rates.weights.apply_seconds
        self._hub.has_applied(self._settled_at, self.number, self.applied)
        return self._settled_at

    def _ask(self, time: float) -> None:
        missing = self._slots + self._generations - len(self._active) - self._num_unstarted
        wanted = max(0, math.ceil(missing / self._generations))
        if (wanted, self._received) != self._asked:
            self._asked = (wanted, self._received)
            self._hub.wants(time, self.number, wanted, self._received)

    def _start_responses(self) -> int:
        """Fill the free slots; returns how many responses have started."""
        num = min(self._slots - len(self._active), self._num_unstarted)
        for _ in range(num):
            group = self._waiting[0]
            if group.oldest_version < 0:
                group.oldest_version = self.applied
            length = group.lengths[len(group.starts)]
            group.starts.append(self._step)
            if len(group.starts) == self._generations:
                self._waiting.popleft()
            self._tie += 1
            heapq.heappush(self._active, (self._step + max(1, length - 1), self._tie, group))
        self._num_unstarted -= num
        return num

    def _decode(self, time: float, num_started: int) -> None:
        """Plan the turn in which the next response ends."""
        occupied, rates = len(self._active), self._rates.decode
        if not occupied:
            self._starved_rate = 1.0
            return
        step = self._step_seconds[occupied]
        extra, self._scoring_until = max(0.0, self._scoring_until - time), 0.0
        if num_started:
            extra += rates.prompt_step_seconds + num_started * self._prompt_share
        self._period = step + rates.loop_seconds
        self._first_end = time + extra + self._period
        num_steps = self._active[0][0] - self._step
        decoding = extra + num_steps * step
        # Empty slots are booked as starved for the time of a step, not for that of the loop around it.
        self._starved_rate = (1 - occupied / self._slots) * decoding / (extra + num_steps * self._period)
        self._plan_turn(self._first_end + (num_steps - 1) * self._period)
