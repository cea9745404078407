"""A discrete-event simulation of producers and a consumer around a real `Ledger`. One virtual clock, no threads.

What is modelled
- A producer has `slots = microbatch_groups x G` decode slots. Slots are independent of each other: each decodes
  `slot_tokens_per_second`, whatever the others do. A free slot takes the next unstarted response. The producer asks for
  leases whenever it has fewer unstarted responses than free slots and holds at most `leases_per_producer` leases.
- A response has a lognormal length (median 1, sigma 1: the unit of length is the median), capped at 50 medians.
- New weights reach a producer `weights_seconds` after the commit. Responses that are under way go on with them: their
  later tokens are of the newer version.
- The consumer follows the plan stream. It trains a minibatch at exactly the rate at which all slots together decode
  ("balanced"), less the share that the filter takes, so that neither side has anything to spare.

The reading of "8 producers x 16 slots, 128 groups in flight" is one response per group (G = 1): then a slot is a group
under way, 8 x 16 = 128, which is half of S = 256 and twice S = 64. `Scenario.generations` allows other G.

What is measured: everything between the commits of `warmup_steps` and `steps`, at which the simulation ends; the first
fill of the pipeline and the drain at the end of the data are left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import Lease, LedgerOptions, PlanEntry, PlanKind

LENGTH_SIGMA = 1.0
LENGTH_CAP = 50.0
MEAN_LENGTH = math.exp(LENGTH_SIGMA**2 / 2)  # of the lognormal with median 1; the cap takes less than 1 % of it


@dataclass(frozen=True)
class Scenario:
    """One simulated run. Lengths are in medians, times in what one slot needs for one median."""

    groups_per_step: int
    max_staleness: int
    stale: Literal["mask", "wait"] = "mask"
    groups_per_minibatch: int = 32
    num_producers: int = 8
    microbatch_groups: int = 16
    generations: int = 1
    leases_per_producer: int = 64
    buffer_limit: int | None = None
    """Default: two minibatches, as for `buffer_limit` of the configuration."""
    filtered_share: float = 0.0
    weights_seconds: float = 0.05
    steps: int = 40
    warmup_steps: int = 8
    seed: int = 0

    @property
    def slots(self) -> int:
        return self.microbatch_groups * self.generations

    @property
    def consumer_tokens_per_second(self) -> float:
        return self.num_producers * self.slots * (1 - self.filtered_share)

    def options(self) -> LedgerOptions:
        needed = self.groups_per_step * (self.steps + self.max_staleness + 2)
        num_rows = math.ceil(2 * needed / (1 - self.filtered_share))  # twice that: the data never run out
        return LedgerOptions(
            num_rows=num_rows,
            num_episodes=1,
            groups_per_step=self.groups_per_step,
            groups_per_minibatch=self.groups_per_minibatch,
            dp_size=1,
            num_producers=self.num_producers,
            leases_per_producer=self.leases_per_producer,
            buffer_limit=self.buffer_limit or 2 * self.groups_per_minibatch,
            order=lambda episode: range(num_rows),
            max_staleness=self.max_staleness,
            stale=self.stale,
        )


@dataclass(frozen=True)
class Figures:
    """Shares are fractions of 1; lags are in versions."""

    consumer_idle: float
    producer_idle: float
    mean_token_lag: float
    tokens_lag_above_2: float
    tokens_lag_above_8: float
    """These are left out of the loss by the default `max_token_lag`."""
    responses_start_within_4: float
    max_response_lag: int
    steps: int


@dataclass
class _Response:
    start: float
    end: float


@dataclass
class _Group:
    producer: int
    unfinished: int
    responses: list[_Response] = field(default_factory=list)


@dataclass
class _Producer:
    free_slots: int
    unstarted: deque[int] = field(default_factory=deque)  # lease ids, one per response
    applied_at: list[float] = field(default_factory=lambda: [0.0])  # by version


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.ledger = Ledger(scenario.options())
        self.random = random.Random(scenario.seed)
        self.now = 0.0
        self.producers = [_Producer(scenario.slots) for _ in range(scenario.num_producers)]
        self.groups: dict[int, _Group] = {}
        self.entries: deque[PlanEntry] = deque()
        self.training: PlanEntry | None = None
        self.consumer_busy = 0.0
        self.slots_busy = 0.0
        self.tokens_by_lag: dict[int, float] = {}
        self.responses_by_lag: dict[int, int] = {}
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._ties = itertools.count()
        self._began = 0.0

    def run(self) -> Figures:
        for producer in range(self.scenario.num_producers):
            self.ledger.apply(producer, 0)
        self._settle()
        while self.ledger.version < self.scenario.steps:
            assert self._events, f"stuck at version {self.ledger.version}: {self.ledger.counts()}"
            self.now, _, name, args = heapq.heappop(self._events)
            getattr(self, f"_on_{name}")(*args)
            self._settle()
        self.ledger.check()
        return self._figures()

    def _at(self, delay: float, name: str, *args: int) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._ties), name, args))

    # ------------------------------------------------------------ events

    def _on_response(self, lease_id: int) -> None:
        group = self.groups[lease_id]
        self.producers[group.producer].free_slots += 1
        group.unfinished -= 1
        if group.unfinished == 0:
            if self.random.random() < self.scenario.filtered_share:
                del self.groups[lease_id]
                self.ledger.filter(lease_id, mean_accuracy=1.0)
            else:
                oldest = self._versions(group, min(r.start for r in group.responses))
                tokens = sum(r.end - r.start for r in group.responses)
                self.ledger.deliver(lease_id, round(1000 * tokens), oldest, crc=0)
        self._start_responses(group.producer)

    def _on_trained(self) -> None:
        entry, self.training = self.training, None
        assert entry is not None
        self.consumer_busy += self._seconds_to_train(entry)
        for lease_id in entry.ranks[0]:
            self._measure(self.groups.pop(lease_id), entry.version)
        self.ledger.trained(entry.sequence)
        if entry.closes_step:
            version = entry.version + 1
            self.ledger.commit(version)
            for producer in range(self.scenario.num_producers):
                self._at(self.scenario.weights_seconds, "applied", producer, version)
            if version == self.scenario.warmup_steps:
                self._begin_to_measure()

    def _on_applied(self, producer: int, version: int) -> None:
        self.producers[producer].applied_at.append(self.now)
        self.ledger.apply(producer, version)

    # ------------------------------------------------------------ what follows at the same moment

    def _settle(self) -> None:
        for number, producer in enumerate(self.producers):
            missing = producer.free_slots - len(producer.unstarted)
            self.ledger.request(number, max(0, math.ceil(missing / self.scenario.generations)))
        for number, lease in self.ledger.grant():
            self._take_lease(number, lease)
        self.entries.extend(self.ledger.plan())
        self.ledger.events.clear()
        if self.training is None and self.entries:
            self.training = self.entries.popleft()
            assert self.training.kind is PlanKind.TRAIN
            self._at(self._seconds_to_train(self.training), "trained")

    def _seconds_to_train(self, entry: PlanEntry) -> float:
        tokens = sum(r.end - r.start for lease_id in entry.ranks[0] for r in self.groups[lease_id].responses)
        return tokens / self.scenario.consumer_tokens_per_second

    def _take_lease(self, number: int, lease: Lease) -> None:
        self.groups[lease.lease_id] = _Group(number, self.scenario.generations)
        self.producers[number].unstarted.extend([lease.lease_id] * self.scenario.generations)
        self._start_responses(number)

    def _start_responses(self, number: int) -> None:
        producer = self.producers[number]
        while producer.free_slots and producer.unstarted:
            lease_id = producer.unstarted.popleft()
            producer.free_slots -= 1
            length = min(self.random.lognormvariate(0.0, LENGTH_SIGMA), LENGTH_CAP)
            self.groups[lease_id].responses.append(_Response(self.now, self.now + length))
            self.slots_busy += length
            self._at(length, "response", lease_id)

    # ------------------------------------------------------------ figures

    def _versions(self, group: _Group, moment: float) -> int:
        """The version that the group's producer held at a moment."""
        applied_at = self.producers[group.producer].applied_at
        return max(version for version, since in enumerate(applied_at) if since <= moment)

    def _measure(self, group: _Group, trained_version: int) -> None:
        if not self._began:
            return
        applied_at = self.producers[group.producer].applied_at
        for response in group.responses:
            version = self._versions(group, response.start)
            lag = trained_version - version
            self.responses_by_lag[lag] = self.responses_by_lag.get(lag, 0) + 1
            start = response.start
            while start < response.end:
                until = applied_at[version + 1] if version + 1 < len(applied_at) else math.inf
                end = min(until, response.end)
                lag = trained_version - version
                self.tokens_by_lag[lag] = self.tokens_by_lag.get(lag, 0.0) + end - start
                start, version = end, version + 1

    def _begin_to_measure(self) -> None:
        self._began = self.now
        self.consumer_busy = 0.0
        self.slots_busy = sum(r.end - self.now for g in self.groups.values() for r in g.responses if r.end > self.now)

    def _figures(self) -> Figures:
        elapsed = self.now - self._began
        to_come = sum(r.end - self.now for g in self.groups.values() for r in g.responses if r.end > self.now)
        slots = self.scenario.num_producers * self.scenario.slots
        tokens, responses = sum(self.tokens_by_lag.values()), sum(self.responses_by_lag.values())
        return Figures(
            consumer_idle=1 - self.consumer_busy / elapsed,
            producer_idle=1 - (self.slots_busy - to_come) / (slots * elapsed),
            mean_token_lag=sum(lag * count for lag, count in self.tokens_by_lag.items()) / tokens,
            tokens_lag_above_2=sum(count for lag, count in self.tokens_by_lag.items() if lag > 2) / tokens,
            tokens_lag_above_8=sum(count for lag, count in self.tokens_by_lag.items() if lag > 8) / tokens,
            responses_start_within_4=sum(c for lag, c in self.responses_by_lag.items() if lag <= 4) / responses,
            max_response_lag=max(self.responses_by_lag),
            steps=self.scenario.steps - self.scenario.warmup_steps,
        )


def simulate(scenario: Scenario) -> Figures:
    """Play a scenario to its last step. Deterministic: the same scenario gives the same figures, bit by bit.

    Raises AssertionError when nothing can happen any more before that (the ledger is stuck), or when its own
    invariants do not hold.
    """
    return _Simulation(scenario).run()
