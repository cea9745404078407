"""What is simulated, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Optional

from zbgrpo.ledger.records import LedgerOptions
from zbgrpo.planner.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulated run. A replica is one data-parallel group of consumers; batches are in prompts, as the flags.

    With `warmup_steps` 0 a whole run is simulated, from version 0 on the producers to the end: `steps` is then its
    --max-steps. Else the figures are of the time between the commits of `warmup_steps` and `steps`, of a run that goes
    on.
    """

    rates: Rates
    num_replicas: int = 1
    num_producers: int = 1
    generations: int = 8
    """-g"""
    microbatch_groups: int = 8
    """-imbs"""
    leases_per_producer: int = 16
    """-ibs"""
    train_batch: int = 32
    """-tbs"""
    train_minibatch: int = 8
    """-tMbs"""
    train_microbatch: int = 64
    """-tmbs, in responses"""
    max_staleness: int = 2
    max_token_lag: int = 8
    stale: Literal["mask", "wait"] = "mask"
    buffer_limit: Optional[int] = None
    """Default: two minibatches, as for `buffer_limit` of the configuration."""
    steps: int = 40
    warmup_steps: int = 8
    seed: int = 0

    @property
    def slots(self) -> int:
        return self.microbatch_groups * self.generations

    @property
    def groups_per_step(self) -> int:
        return self.train_batch * self.num_replicas

    @property
    def num_microbatches(self) -> int:
        """Forward and backward passes of a replica for one minibatch."""
        return math.ceil(self.train_minibatch * self.generations / self.train_microbatch)

    @property
    def whole_run(self) -> bool:
        return self.warmup_steps == 0

    def ledger_options(self) -> LedgerOptions:
        """Those of a run whose data never run out."""
        needed = self.groups_per_step * (self.steps + self.max_staleness + 2)
        num_rows = math.ceil(2 * needed / (1 - self.rates.filtered_share)) + 64
        minibatch = self.train_minibatch * self.num_replicas
        return LedgerOptions(
            num_rows=num_rows,
            num_episodes=1,
            groups_per_step=self.groups_per_step,
            groups_per_minibatch=minibatch,
            dp_size=self.num_replicas,
            num_producers=self.num_producers,
            leases_per_producer=self.leases_per_producer,
            buffer_limit=self.buffer_limit or 2 * minibatch,
            order=lambda episode: range(num_rows),
            max_staleness=self.max_staleness,
            stale=self.stale,
            max_steps=self.steps if self.whole_run else None,
        )


@dataclass
class Account:
    """Where the time of one rank, or of several equal ones, went. Seconds, between startup and shutdown.

    The same accounts as those of a run (`TimeLedger`), and the same bubble: starved + blocked + imbalance over all.
    """

    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    imbalance: float = 0.0
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        return self.busy + self.starved + self.blocked + self.imbalance + self.checkpoint

    @property
    def bubble(self) -> float:
        lost = self.starved + self.blocked + self.imbalance
        return lost / self.total if self.total > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """By account; they add up to 1."""
        return {name: value / self.total if self.total > 0 else 0.0 for name, value in vars(self).items()}

    def __add__(self, other: Account) -> Account:
        return Account(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: Account) -> Account:
        return Account(**{name: value - getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Figures:
    """Shares are fractions of 1, lags are in versions."""

    step_seconds: float
    """Mean time between two commits."""
    seconds: float
    consumers: Account
    """Sum over replicas."""
    producers: Account
    """Sum over producers."""
    tokens_by_lag: Mapping[int, int] = field(default_factory=dict)
    """Trained response tokens."""
    responses_by_lag: Mapping[int, int] = field(default_factory=dict)
    """Trained responses, by the lag of their oldest token."""
    left_out_share: float = 0.0
    """Trained response tokens that lag more than `max_token_lag`, and so are left out of the loss."""
    tokens_per_second: float = 0.0
    """Trained response tokens, less those left out."""
    samples_per_second: float = 0.0
    """Trained responses."""
    versions_skipped: int = 0
    """Versions that a newer one replaced before they were sent."""

    @property
    def mean_token_lag(self) -> float:
        return _mean(self.tokens_by_lag)

    @property
    def max_response_lag(self) -> int:
        return max(self.responses_by_lag, default=0)

    def scaled(self, factor: float) -> Figures:
        """Those of a run with so many times the ranks and groups: the same times and shares, more work done."""
        return replace(
            self,
            tokens_per_second=self.tokens_per_second * factor,
            samples_per_second=self.samples_per_second * factor,
        )

    def tokens_above(self, lag: int) -> float:
        """Share of the trained tokens that lag more."""
        return _share(self.tokens_by_lag, lambda found: found > lag)

    def responses_within(self, lag: int) -> float:
        """Share of the trained responses whose oldest token lags at most so much."""
        return _share(self.responses_by_lag, lambda found: found <= lag)

    def bubble(self, ranks_per_replica: int = 1, ranks_per_producer: int = 1) -> float:
        """Over all ranks."""
        accounts = ((self.consumers, ranks_per_replica), (self.producers, ranks_per_producer))
        total = sum(account.total * ranks for account, ranks in accounts)
        return sum(account.bubble * account.total * ranks for account, ranks in accounts) / total if total else 0.0


def _mean(by_lag: Mapping[int, int]) -> float:
    total = sum(by_lag.values())
    return sum(lag * count for lag, count in by_lag.items()) / total if total else 0.0


def _share(by_lag: Mapping[int, int], wanted: Any) -> float:
    total = sum(by_lag.values())
    return sum(count for lag, count in by_lag.items() if wanted(lag)) / total if total else 0.0
