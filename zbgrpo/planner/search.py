"""Finds the split of a cluster: how many ranks train and how many generate, in which batches, how far ahead.

First a bound, in closed form, for every split and number of decode slots: what both roles could do if nobody ever
waited. Then the most promising splits are simulated, and of the best one batch sizes and staleness are varied, one at a
time, as long as that helps. A large cluster is searched through as a small one with the same ratio of producers to
consumers and the same batches of each; the plan that wins is then simulated as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Optional

from zbgrpo.errors import ConfigError
from zbgrpo.planner.rates import LengthSource, Rates
from zbgrpo.planner.scenario import Figures, Scenario
from zbgrpo.planner.simulation import simulate

THROUGHPUT_TOLERANCE = 0.03
"""A plan may be this much slower than the fastest one, if it has the smaller bubble."""
BUBBLE_TOLERANCE = 0.005
"""Bubbles that differ by less are equal; then the smaller staleness wins, then the higher throughput."""

_NUM_SPLITS = 6  # that are simulated
_MAX_ROUNDS = 3  # of variations
_MAX_UNITS = 64  # replicas and producers of a simulation of the search
_MAX_STEPS, _LEAST_STEPS = 24, 6  # that are measured
_MAX_GROUPS = 4_000  # in the measured steps, where more than the least number of them
_MIXING_RESPONSES = 3
"""Mean response times after which nothing is left of all slots having started together."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is given: ranks, the algorithm's batch, and limits of the search."""

    num_ranks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    producer_tensor_parallel: int = 1
    groups_per_step: int = 256
    """S, prompts of an optimizer step; rounded to a multiple of the replicas."""
    generations: int = 8
    train_microbatch: int = 8
    max_slots: int = 64
    """Most decode slots of a producer: what its memory holds."""
    max_staleness: int = 4
    """Largest --max-staleness that is wanted."""
    max_token_lag: int = 8
    stale: Literal["mask", "wait"] = "mask"
    seed: int = 0

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_per_producer(self) -> int:
        return self.producer_tensor_parallel


class Bound(NamedTuple):
    """What a split could do if nobody waited. Groups that the filter keeps, per second."""

    generated: float
    trained: float

    @property
    def groups_per_second(self) -> float:
        return min(self.generated, self.trained)


class Candidate(NamedTuple):
    """A simulated plan."""

    scenario: Scenario
    figures: Figures
    bubble: float
    """Over all ranks."""


@dataclass(frozen=True)
class Plan:
    """The chosen plan, and all that were simulated."""

    cluster: Cluster
    best: Candidate
    """Simulated with all ranks."""
    candidates: list[Candidate]
    """Best first, the chosen one too. With many ranks, figures are those of a smaller cluster of the same ratio."""
    num_bounded: int
    """Splits for which the bound was computed."""


def find_plan(cluster: Cluster, rates: Rates) -> Plan:
    """Search. Raises ConfigError if no split of the ranks works. Deterministic."""
    bounded = sorted(_splits(cluster, rates), key=lambda item: -item[0].groups_per_second)
    if not bounded:
        raise ConfigError(
            f"--ranks {cluster.num_ranks}: no split into trainers of {cluster.ranks_per_replica} ranks (-tp x -pp) and "
            f"producers of {cluster.ranks_per_producer} (-ptp) uses all of them; change --ranks"
        )
    search = _Search(cluster)
    for _, scenario in _promising(bounded):
        search.simulate(scenario)
    for _ in range(_MAX_ROUNDS):
        before = search.best()
        for scenario in _variations(cluster, before.scenario):
            search.simulate(scenario)
        if search.best() is before:
            break
    return Plan(cluster, search.as_it_is(search.best()), search.ranked(), len(bounded))


def bound(scenario: Scenario) -> Bound:
    """Rates of both roles by themselves, with all slots occupied and no waiting."""
    rates, slots = scenario.rates, scenario.slots
    _, steps, kept_tokens = LengthSource(rates, scenario.generations, scenario.seed).means()
    finished = slots / steps  # responses that finish, and start, per decode step
    decode = rates.decode
    seconds = decode.of_step(slots) + decode.loop_seconds
    seconds += decode.prompt_step_seconds * finished / slots  # at best all start together
    seconds += finished * (
        decode.prompt_seconds / scenario.generations + decode.finish_seconds + decode.response_seconds
    )
    generated = scenario.num_producers * finished / seconds / scenario.generations * (1 - rates.filtered_share)
    tokens = scenario.train_minibatch * (scenario.generations * kept_tokens + rates.prompt_tokens)
    minibatch = rates.train.microbatch_seconds * scenario.num_microbatches + rates.train.token_seconds * tokens
    step = scenario.train_batch / scenario.train_minibatch * minibatch
    step += rates.train.commit_seconds + rates.weights.copy_seconds
    return Bound(generated, scenario.groups_per_step / step)


class _Search:
    """Simulates scenarios, each once, and ranks them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._found: dict[tuple[int, ...], Candidate] = {}

    def simulate(self, scenario: Scenario) -> None:
        key = (
            scenario.num_replicas, scenario.microbatch_groups, scenario.leases_per_producer, scenario.train_minibatch,
            scenario.max_staleness,
        )  # fmt: skip
        if key not in self._found:
            small = _smaller(scenario)
            figures, scale = simulate(_of_fit_length(small)), scenario.num_replicas / small.num_replicas
            self._found[key] = self._candidate(scenario, figures.scaled(scale))

    def as_it_is(self, candidate: Candidate) -> Candidate:
        """The same, simulated with all ranks."""
        if _smaller(candidate.scenario) is candidate.scenario:
            return candidate
        return self._candidate(candidate.scenario, simulate(_of_fit_length(candidate.scenario)))

    def _candidate(self, scenario: Scenario, figures: Figures) -> Candidate:
        bubble = figures.bubble(self._cluster.ranks_per_replica, self._cluster.ranks_per_producer)
        return Candidate(scenario, figures, bubble)

    def best(self) -> Candidate:
        return self.ranked()[0]

    def ranked(self) -> list[Candidate]:
        """Best first: the least bubble among the fast ones, then the others by throughput."""
        candidates = list(self._found.values())
        fastest = max(c.figures.tokens_per_second for c in candidates)
        fast = [c for c in candidates if c.figures.tokens_per_second >= (1 - THROUGHPUT_TOLERANCE) * fastest]
        least = min(c.bubble for c in fast)

        def order(c: Candidate) -> tuple[bool, float, int, float]:
            if c not in fast:
                return True, -c.figures.tokens_per_second, 0, 0.0
            excess = max(0, math.ceil((c.bubble - least) / BUBBLE_TOLERANCE - 1))
            return False, excess, c.scenario.max_staleness, -c.figures.tokens_per_second

        return sorted(candidates, key=order)


def _smaller(scenario: Scenario) -> Scenario:
    """Fewer replicas and producers in nearly the same ratio; the scenario itself if there are few."""
    if scenario.num_replicas + scenario.num_producers <= _MAX_UNITS:
        return scenario
    ratio = scenario.num_producers / scenario.num_replicas
    fitting = [
        (replicas, max(1, round(replicas * ratio)))
        for replicas in range(1, scenario.num_replicas + 1)
        if replicas * (1 + ratio) <= _MAX_UNITS
    ]
    if not fitting:  # hardly any replica: it has nothing to be scaled by
        return scenario
    replicas, producers = min(fitting, key=lambda sizes: (abs(sizes[1] / sizes[0] / ratio - 1), -sizes[0]))
    return replace(scenario, num_replicas=replicas, num_producers=producers)


def _of_fit_length(scenario: Scenario) -> Scenario:
    """As many steps as it takes to fill the pipeline, to forget the start, and to see enough groups."""
    found = bound(scenario)
    step_seconds = scenario.groups_per_step / found.groups_per_second
    # The time of a response: its share of a slot's work when all slots are full.
    response_seconds = scenario.slots * scenario.num_producers / (found.generated * scenario.generations)
    mixing = math.ceil(_MIXING_RESPONSES * response_seconds / step_seconds)
    warmup = max(scenario.max_staleness + 2, min(mixing, _MAX_STEPS))
    measured = max(_LEAST_STEPS, min(_MAX_STEPS, _MAX_GROUPS // scenario.groups_per_step))
    return replace(scenario, steps=warmup + measured, warmup_steps=warmup)


def _splits(cluster: Cluster, rates: Rates) -> Iterator[tuple[Bound, Scenario]]:
    """Every split that uses all ranks, with every number of slots, and a guess at the other sizes."""
    for num_replicas in range(1, cluster.num_ranks // cluster.ranks_per_replica + 1):
        left = cluster.num_ranks - num_replicas * cluster.ranks_per_replica
        if left < cluster.ranks_per_producer or left % cluster.ranks_per_producer:
            continue
        train_batch = max(1, round(cluster.groups_per_step / num_replicas))
        if train_batch * num_replicas > 1.25 * cluster.groups_per_step and num_replicas > 1:
            break  # so many replicas that a step of this size cannot be spread over them
        for groups in _slot_choices(cluster):
            scenario = Scenario(
                rates=rates,
                num_replicas=num_replicas,
                num_producers=left // cluster.ranks_per_producer,
                generations=cluster.generations,
                microbatch_groups=groups,
                leases_per_producer=2 * groups,
                train_batch=train_batch,
                train_minibatch=_divisors(train_batch)[len(_divisors(train_batch)) // 2],
                train_microbatch=cluster.train_microbatch,
                max_staleness=cluster.max_staleness,
                max_token_lag=cluster.max_token_lag,
                stale=cluster.stale,
                seed=cluster.seed,
            )
            yield bound(scenario), scenario


def _slot_choices(cluster: Cluster) -> list[int]:
    """Prompts decoded together: halves of the most that fit."""
    most = max(1, cluster.max_slots // cluster.generations)
    return sorted({max(1, most >> shift) for shift in range(4)})


def _promising(bounded: list[tuple[Bound, Scenario]]) -> list[tuple[Bound, Scenario]]:
    """The splits with the highest bound, each with its best number of slots; the next ones of equal rank too."""
    chosen: dict[int, tuple[Bound, Scenario]] = {}
    for found, scenario in bounded:
        chosen.setdefault(scenario.num_replicas, (found, scenario))
        if len(chosen) == _NUM_SPLITS:
            break
    return list(chosen.values())


def _variations(cluster: Cluster, scenario: Scenario) -> Iterator[Scenario]:
    """Plans that differ from one in one size."""
    groups = scenario.microbatch_groups
    for factor in (1, 2, 4):
        yield replace(scenario, leases_per_producer=factor * groups)
    for minibatch in _near(_divisors(scenario.train_batch), scenario.train_minibatch):
        yield replace(scenario, train_minibatch=minibatch)
    for staleness in range(1 if cluster.max_staleness else 0, cluster.max_staleness + 1):
        yield replace(scenario, max_staleness=staleness)
    for other in _near(_slot_choices(cluster), groups):
        leases = scenario.leases_per_producer // groups * other
        yield replace(scenario, microbatch_groups=other, leases_per_producer=leases)
    for replicas in (scenario.num_replicas - 1, scenario.num_replicas + 1):
        if (moved := _with_replicas(cluster, scenario, replicas)) is not None:
            yield moved


def _with_replicas(cluster: Cluster, scenario: Scenario, num_replicas: int) -> Optional[Scenario]:
    left = cluster.num_ranks - num_replicas * cluster.ranks_per_replica
    if num_replicas < 1 or left < cluster.ranks_per_producer or left % cluster.ranks_per_producer:
        return None
    train_batch = max(1, round(cluster.groups_per_step / num_replicas))
    nearest = min(_divisors(train_batch), key=lambda size: abs(size - scenario.train_minibatch))
    return replace(
        scenario,
        num_replicas=num_replicas,
        num_producers=left // cluster.ranks_per_producer,
        train_batch=train_batch,
        train_minibatch=nearest,
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _near(choices: list[int], value: int) -> list[int]:
    """The neighbours of a value among sorted choices that hold it."""
    place = choices.index(value)
    return choices[max(0, place - 1) : place] + choices[place + 1 : place + 2]
