"""Balanced runs around a real `Ledger`, simulated by `zbgrpo.planner.simulation`.

What is modelled
- A producer has `slots = microbatch_groups x G` decode slots, each of which decodes one token per decode step, whatever
  the others do. It asks for leases whenever it has fewer unstarted responses than free slots and holds at most
  `leases_per_producer` leases.
- A response has a lognormal length (sigma 1), capped at 50 medians. The unit of time is what a slot needs for one
  median.
- New weights reach a producer `weights_seconds` after the commit. Responses that are under way go on with them: their
  later tokens are of the newer version.
- The consumer follows the plan stream. It trains a minibatch at exactly the rate at which all slots together decode
  ("balanced"), less the share that the filter takes, so that neither side has anything to spare.

The reading of "8 producers x 16 slots, 128 groups in flight" is one response per group (G = 1): then a slot is a group
under way, 8 x 16 = 128, which is half of S = 256 and twice S = 64. `Balanced.generations` allows other G.

What is measured: everything between the commits of `warmup_steps` and `steps`, at which the simulation ends; the first
fill of the pipeline and the drain at the end of the data are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zbgrpo.planner.rates import DecodeRates, LengthRates, Rates, TrainRates, WeightRates
from zbgrpo.planner.scenario import Figures, Scenario
from zbgrpo.planner.simulation import simulate

LENGTH_SIGMA = 1.0
LENGTH_CAP = 50
MEDIAN_TOKENS = 200


@dataclass(frozen=True)
class Balanced:
    """One simulated run."""

    groups_per_step: int
    max_staleness: int
    stale: Literal["mask", "wait"] = "mask"
    groups_per_minibatch: int = 32
    num_producers: int = 8
    microbatch_groups: int = 16
    generations: int = 1
    leases_per_producer: int = 64
    buffer_limit: int | None = None
    filtered_share: float = 0.0
    weights_seconds: float = 0.05
    steps: int = 40
    warmup_steps: int = 8
    seed: int = 0

    def scenario(self) -> Scenario:
        slots = self.num_producers * self.microbatch_groups * self.generations
        lengths = LengthRates(
            mean_tokens=MEDIAN_TOKENS * math.exp(LENGTH_SIGMA**2 / 2),
            sigma=LENGTH_SIGMA,
            cap_tokens=LENGTH_CAP * MEDIAN_TOKENS,
        )
        rates = Rates(
            decode=DecodeRates(step_seconds=1 / MEDIAN_TOKENS),
            train=TrainRates(token_seconds=1 / MEDIAN_TOKENS / slots / (1 - self.filtered_share)),
            weights=WeightRates(broadcast_seconds=self.weights_seconds),
            lengths=lengths,
            filtered_share=self.filtered_share,
            hub_seconds=0.0,
        )
        return Scenario(
            rates=rates,
            num_producers=self.num_producers,
            generations=self.generations,
            microbatch_groups=self.microbatch_groups,
            leases_per_producer=self.leases_per_producer,
            train_batch=self.groups_per_step,
            train_minibatch=self.groups_per_minibatch,
            max_staleness=self.max_staleness,
            stale=self.stale,
            buffer_limit=self.buffer_limit,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            seed=self.seed,
        )


def play(run: Balanced) -> Figures:
    """Simulate; AssertionError when the ledger is stuck or breaks its own invariants."""
    return simulate(run.scenario())
