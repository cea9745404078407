"""A world for a ledger to run: producers, a consumer and evaluators that obey, only slowly and with failures."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter, deque
from typing import Any

from hypothesis import strategies as st

from tests.support.ledger_witness import Witness
from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import LedgerOptions, PlanEntry, PlanKind
from zbgrpo.types import DropReason, Uid


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """A data order: one permutation of the rows for each episode."""

    num_rows: int
    seed: int

    def __call__(self, episode: int) -> list[int]:
        return random.Random(f"{self.seed}/{episode}").sample(range(self.num_rows), self.num_rows)


@st.composite
def ledger_options(draw: st.DrawFn, **fixed: Any) -> LedgerOptions:
    dp_size = draw(st.integers(1, 3))
    minibatch = dp_size * draw(st.integers(1, 3))
    groups_per_step = minibatch * draw(st.integers(1, 3))
    num_episodes = draw(st.integers(1, 3))
    num_rows = draw(st.integers(math.ceil(groups_per_step / num_episodes), 40))
    values: dict[str, Any] = {
        "max_staleness": draw(st.integers(0, 4)),
        "stale": draw(st.sampled_from(["mask", "wait"])),
        "max_steps": draw(st.none() | st.integers(1, 8)),
        "plan_ahead": draw(st.integers(1, 3)),
        "save_interval": draw(st.none() | st.integers(1, 4)),
        "eval_interval": draw(st.none() | st.integers(1, 4)),
        "max_attempts": draw(st.integers(1, 3)),
    }
    return LedgerOptions(
        num_rows=num_rows,
        num_episodes=num_episodes,
        groups_per_step=groups_per_step,
        groups_per_minibatch=minibatch,
        dp_size=dp_size,
        num_producers=draw(st.integers(1, 4)),
        leases_per_producer=draw(st.integers(1, 8)),
        buffer_limit=minibatch + draw(st.integers(0, 8)),
        order=Shuffled(num_rows, draw(st.integers(0, 5))),
        **(values | fixed),
    )


class Consumer:
    """Follows the plan stream in order, as every consumer of a run does."""

    def __init__(self, ledger: Ledger, witness: Witness) -> None:
        self.ledger, self.witness = ledger, witness
        self.waiting: deque[PlanEntry] = deque()
        self.last: PlanEntry | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.kind in (PlanKind.STOP, PlanKind.END)

    def act(self) -> PlanKind | None:
        if not self.waiting:
            return None
        self.last = entry = self.waiting.popleft()
        if entry.kind is PlanKind.TRAIN:
            self.ledger.trained(entry.sequence)
            self.witness.outstanding.discard(entry.sequence)
            if entry.closes_step:
                self.ledger.commit(entry.version + 1)
        else:
            assert self.ledger.version == entry.version, "what is saved, evaluated or left is the last commit"
        return entry.kind


def evaluators(options: LedgerOptions) -> set[int]:
    return set(range(max(1, options.num_producers // 4)))


LONG = 40
"""Rounds: time for many steps without the straggler."""


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """Shares of what happens to a lease, of leases that take `LONG` rounds, and how often all others are slow."""

    filtered: float = 0.0
    dropped: float = 0.0
    returned: float = 0.0
    straggling: float = 0.0
    slow: float = 0.0
    seed: int = 0


SHARES = st.sampled_from([0.0, 0.0, 0.1, 0.4, 1.0])
behaviours = st.builds(
    Behaviour,
    SHARES,
    SHARES,
    SHARES,
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.3, 0.8]),
    st.integers(0, 1000),
)


class World:
    """Producers, consumers and evaluators that do what they are told; what becomes of a lease depends on it alone."""

    def __init__(self, ledger: Ledger, witness: Witness, consumer: Consumer, behaviour: Behaviour) -> None:
        self.ledger, self.witness, self.consumer, self.behaviour = ledger, witness, consumer, behaviour
        self.options = ledger.options
        self.random = random.Random(behaviour.seed)
        self.stragglers: dict[int, int] = {}  # lease id -> rounds that it still takes
        self.trained: list[tuple[int, list[list[Uid]]]] = []

    @property
    def committed(self) -> list[tuple[int, list[list[Uid]]]]:
        """Minibatches of steps that committed; those of a last step that could not be filled do not count."""
        return [(version, uids) for version, uids in self.trained if version < self.ledger.version]

    def fate(self, name: str, uid: Uid, attempt: int = 0) -> float:
        return random.Random(f"{name}/{uid}/{attempt}").random()

    def run(self) -> None:
        """To the end. Each round gives every lease and the consumer a chance, so a bounded number must do."""
        limit = 100 + 2 * LONG * self.options.num_rows * self.options.num_episodes * self.options.max_attempts
        for _ in range(limit):
            if self.consumer.finished:
                self.witness.watch(self.ledger)
                return
            self.round()
        raise AssertionError(f"stuck: {self.ledger.counts()}, last entry {self.consumer.last}")

    def slow(self) -> bool:
        return self.random.random() < self.behaviour.slow

    def round(self) -> None:
        ledger, options = self.ledger, self.options
        wanted = [self.random.randint(1, options.leases_per_producer) for _ in range(options.num_producers)]
        for producer in range(options.num_producers):
            if (producer not in ledger.reserved and not self.slow()) or ledger.applied[producer] < 0:
                ledger.apply(producer, ledger.version)
                self.witness.applied[producer] = ledger.version
            ledger.request(producer, wanted[producer])
        granted: Counter[int] = Counter()
        for producer, lease in ledger.grant():
            granted[producer] += 1
            if self.random.random() < self.behaviour.straggling:
                self.stragglers[lease.lease_id] = LONG
        self.witness.watch(ledger)
        self.witness.check_grant(ledger, [w - granted[p] for p, w in enumerate(wanted)])
        live = list(ledger.leased.items())
        self.random.shuffle(live)
        for lease_id, group in live:
            self.stragglers[lease_id] = self.stragglers.get(lease_id, 0) - 1
            if self.stragglers[lease_id] < 0 and not self.slow():
                self.end_lease(lease_id, group.lease.uid, group.lease.attempt, group.oldest_version)
        self.witness.watch(ledger)
        entries = ledger.plan()
        for entry in entries:
            if entry.kind is PlanKind.TRAIN:
                uids = [[ledger.planned[i].lease.uid for i in rank] for rank in entry.ranks if rank]
                self.trained.append((entry.version, uids))
        self.consumer.waiting.extend(entries)
        self.witness.watch(ledger)
        self.witness.check_plan(ledger)
        if ledger.evaluating and ledger.reserved and not self.slow():
            ledger.reserved.clear()
            ledger.evaluating = self.witness.evaluating = False
        if not self.slow() and self.consumer.act() is PlanKind.EVAL:
            ledger.reserved |= evaluators(options)

    def end_lease(self, lease_id: int, uid: Uid, attempt: int, applied: int) -> None:
        ledger, behaviour = self.ledger, self.behaviour
        if self.fate("return", uid, attempt) < behaviour.returned:
            assert ledger.give_back(lease_id)
        elif self.fate("filter", uid) < behaviour.filtered:
            assert ledger.filter(lease_id, mean_accuracy=1.0)
        elif self.fate("drop", uid) < behaviour.dropped:
            assert ledger.drop(lease_id, DropReason.REWARD_ERROR)
        else:
            oldest = self.random.choice([applied, max(applied, ledger.version)])
            assert ledger.deliver(lease_id, int(1000 * self.fate("tokens", uid)), oldest, crc=lease_id)


def play(options: LedgerOptions, behaviour: Behaviour) -> World:
    ledger, witness = Ledger(options), Witness(options)
    world = World(ledger, witness, Consumer(ledger, witness), behaviour)
    world.run()
    return world
