"""A discrete-event simulation of a run around the real ledger. One virtual clock, no threads, no torch.

What is modelled
- producers (`producer.py`): slots that decode in step, their cost by how many are occupied, prompts, leases asked for
  between two steps and taken at the end of one;
- scoring, which takes `reward_seconds` and never waits for a worker, and the filter, which leaves out a share of the
  groups by chance;
- the hub: `zbgrpo.ledger.ledger.Ledger` itself, at the other end of messages that take `hub_seconds`; grants and plans
  take no time;
- consumers and weights (`consumer.py`): minibatches by their tokens, imbalance at the commit, one version on its way.

What is not: evaluation, saving on the way, errors, stragglers among equal ranks, that generation and training slow each
other down where they share memory, and that lengths or accuracies change while the model learns.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import PlanEntry, PlanKind
from zbgrpo.planner.consumer import SimulatedConsumers, SimulatedPublisher
from zbgrpo.planner.events import Clock
from zbgrpo.planner.producer import Group, SimulatedProducer
from zbgrpo.planner.rates import LengthSource, decode_steps
from zbgrpo.planner.scenario import Account, Figures, Scenario


class Simulation:
    """One run; `run` plays it to its end. It is the hub of its producers."""

    def __init__(self, scenario: Scenario) -> None:
        rates = scenario.rates
        self.scenario, self.rates = scenario, rates
        self.ledger = Ledger(scenario.ledger_options())
        self.clock = Clock()
        self.lengths = LengthSource(rates, scenario.generations, scenario.seed)
        self.producers = [
            SimulatedProducer(number, scenario, self.clock, self) for number in range(scenario.num_producers)
        ]
        self.consumers = SimulatedConsumers(scenario)
        self.publisher = SimulatedPublisher(self.clock, rates.weights.broadcast_seconds, self._sent)
        self.groups: dict[int, Group] = {}
        self.trained: list[tuple[int, Group]] = []
        """(version that it trained, group), of the time that counts."""
        self.commits: list[float] = []
        self.finished_at: float | None = None
        self._open: deque[list[int]] = deque()  # lease ids of the minibatches of steps that have not committed
        self._granted = [0] * scenario.num_producers
        self._before: tuple[Account, Account] = (Account(), Account())  # at the beginning of the time that counts
        self._consumers_at: dict[int, Account] = {}

    def run(self) -> Figures:
        """Play to the last step. AssertionError if the ledger is stuck or its invariants do not hold."""
        for producer in self.producers:
            self.ledger.apply(producer.number, 0)
            self.clock.at(0.0, producer.take, [])
        while not self._is_over():
            assert self.clock.step(), f"stuck at version {self.ledger.version}: {self.ledger.counts()}"
        self.ledger.check()
        return self._figures()

    def _is_over(self) -> bool:
        if self.scenario.whole_run:
            return self.finished_at is not None and self.clock.now >= self.finished_at
        return len(self.commits) >= self.scenario.steps

    # ---------------------------------------------------------------- messages of producers

    def wants(self, time: float, producer: int, num_leases: int, received: int) -> None:
        self.clock.at(time + self.rates.hub_seconds, self._wants, producer, num_leases, received)

    def _wants(self, producer: int, num_leases: int, received: int) -> None:
        on_their_way = self._granted[producer] - received
        self.ledger.request(producer, max(0, num_leases - on_their_way))
        self._advance()

    def has_applied(self, time: float, producer: int, version: int) -> None:
        self.clock.at(time + self.rates.hub_seconds, self._applied, producer, version)

    def _applied(self, producer: int, version: int) -> None:
        self.ledger.apply(producer, version)
        self._advance()

    def has_completed(self, time: float, group: Group) -> None:
        self.clock.at(time + self.rates.reward_seconds + self.rates.hub_seconds, self._arrived, group)

    def _arrived(self, group: Group) -> None:
        if group.filtered:
            del self.groups[group.lease_id]
            self.ledger.filter(group.lease_id, mean_accuracy=1.0)
        else:
            tokens = round(sum(group.lengths) + self.rates.prompt_tokens)
            self.ledger.deliver(group.lease_id, tokens, group.oldest_version, crc=0)
        self._advance()

    # ---------------------------------------------------------------- the hub

    def _advance(self) -> None:
        self._grant()
        for entry in self.ledger.plan():
            self._publish(entry)
        self.ledger.events.clear()

    def _grant(self) -> None:
        granted: dict[int, list[Group]] = {}
        for producer, lease in self.ledger.grant():
            lengths, filtered = self.lengths.draw()
            group = Group(lease.lease_id, producer, lengths, filtered, unfinished=len(lengths))
            self.groups[lease.lease_id] = group
            granted.setdefault(producer, []).append(group)
        arrival = self.clock.now + self.rates.hub_seconds
        for producer, groups in granted.items():
            self._granted[producer] += len(groups)
            self.clock.at(arrival, self.producers[producer].take, groups)

    def _publish(self, entry: PlanEntry) -> None:
        arrival = self.clock.now + self.rates.hub_seconds
        if entry.kind is PlanKind.SAVE:
            self.consumers.save(arrival)
        elif entry.kind is PlanKind.END:
            ended = max(self.consumers.end(arrival), self.publisher.idle_at)
            self.finished_at = ended + 2 * self.rates.hub_seconds  # the hub hears of it and tells the producers
            self.clock.at(self.finished_at, lambda: None)
        else:
            assert entry.kind is PlanKind.TRAIN
            self._train(entry, arrival)

    def _train(self, entry: PlanEntry, arrival: float) -> None:
        prompt = self.rates.prompt_tokens
        tokens = np.array([sum(sum(self.groups[i].lengths) + prompt for i in ids) for ids in entry.ranks])
        trained, committed = self.consumers.train(entry, tokens, arrival)
        self._open.append([i for ids in entry.ranks for i in ids])
        self.clock.at(trained + self.rates.hub_seconds, self._trained, entry.sequence)
        if committed is not None:
            version = entry.version + 1
            self._consumers_at[version] = self.consumers.account + Account()
            self.clock.at(committed, self._commit, version, len(self._open))
            self.clock.at(committed + self.rates.weights.copy_seconds, self.publisher.publish, version)
            self.clock.at(committed + self.rates.hub_seconds, self._committed, version)

    def _trained(self, sequence: int) -> None:
        self.ledger.trained(sequence)
        self._advance()

    def _commit(self, version: int, num_minibatches: int) -> None:
        self.commits.append(self.clock.now)
        for _ in range(min(num_minibatches, len(self._open))):
            for lease_id in self._open.popleft():
                group = self.groups.pop(lease_id)
                if version > self.scenario.warmup_steps:
                    self.trained.append((version - 1, group))
        consumers = self._consumers_at.pop(version)
        if version == self.scenario.warmup_steps:
            self._before = consumers, self._producers_account()
        elif version == self.scenario.steps and not self.scenario.whole_run:
            self._consumers_at[version] = consumers

    def _committed(self, version: int) -> None:
        self.ledger.commit(version)
        self._advance()

    def _sent(self, version: int) -> None:
        for producer in self.producers:
            producer.offer(version)

    # ---------------------------------------------------------------- figures

    def _producers_account(self) -> Account:
        total = Account()
        for producer in self.producers:
            producer.settle(self.clock.now)
            total += producer.account
        return total

    def _figures(self) -> Figures:
        scenario, first = self.scenario, max(1, self.scenario.warmup_steps)
        consumers = self._consumers_at.get(scenario.steps, self.consumers.account)
        num_steps = scenario.steps - first
        window = self.commits[-1] - self.commits[first - 1]
        tokens_by_lag, responses_by_lag = self._lags()
        tokens = sum(tokens_by_lag.values())
        left_out = sum(count for lag, count in tokens_by_lag.items() if lag > scenario.max_token_lag)
        begun = self.commits[first - 1] if not scenario.whole_run else 0.0
        seconds = self.commits[-1] - begun
        return Figures(
            step_seconds=window / num_steps if num_steps else seconds,
            seconds=seconds,
            consumers=consumers - self._before[0],
            producers=self._producers_account() - self._before[1],
            tokens_by_lag=tokens_by_lag,
            responses_by_lag=responses_by_lag,
            left_out_share=left_out / tokens if tokens else 0.0,
            tokens_per_second=(tokens - left_out) / seconds,
            samples_per_second=sum(responses_by_lag.values()) / seconds,
            versions_skipped=self.publisher.skipped,
        )

    def _lags(self) -> tuple[dict[int, int], dict[int, int]]:
        """Trained tokens and trained responses, by lag."""
        rows = [
            (version, group.producer, start, length)
            for version, group in self.trained
            for start, length in zip(group.starts, group.lengths, strict=True)
        ]
        if not rows:
            return {}, {}
        trained, producers, starts, lengths = np.array(rows, np.int64).T
        ends = starts + decode_steps(lengths)
        num_versions = int(trained.max()) + 1
        since = self._first_steps(num_versions)[producers]  # [responses, versions + 1]
        tokens: dict[int, int] = {}
        responses: dict[int, int] = {}
        for version in range(num_versions):
            begins = np.maximum(starts, since[:, version])
            counts = np.maximum(0, np.minimum(ends, since[:, version + 1]) - begins)
            started = (counts > 0) & (starts >= since[:, version])
            counts += started & (lengths > 1)  # the token that comes with the prompt
            lags = trained - version
            for lag in np.unique(lags[counts > 0]).tolist():
                tokens[lag] = tokens.get(lag, 0) + int(counts[lags == lag].sum())
            for lag, count in zip(*np.unique(lags[started], return_counts=True), strict=True):
                responses[int(lag)] = responses.get(int(lag), 0) + int(count)
        return dict(sorted(tokens.items())), dict(sorted(responses.items()))

    def _first_steps(self, num_versions: int) -> np.ndarray:
        """First decode step with each version or a newer one, int64 [producers, versions + 1]; far off if none."""
        since = np.full((len(self.producers), num_versions + 1), np.iinfo(np.int64).max // 2)
        for producer in self.producers:
            for version, step in reversed(producer.version_steps):
                since[producer.number, : version + 1] = step
        return since


def simulate(scenario: Scenario) -> Figures:
    """Play a scenario to its last step. Deterministic: the same scenario gives the same figures.

    Raises AssertionError when nothing can happen any more before that (the ledger is stuck), or when its own
    invariants do not hold.
    """
    return Simulation(scenario).run()
