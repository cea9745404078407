"""What the verb `zbgrpo plan` does with its arguments."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError
from zbgrpo.planner.measure import measure
from zbgrpo.planner.rates import read_rates
from zbgrpo.planner.report import render, to_json
from zbgrpo.planner.search import Cluster, find_plan


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; returns the exit status. Raises UserError."""
    measured = measure(arguments.log_dir) if arguments.log_dir is not None else None
    if measured is None and arguments.rates is None and not arguments.overrides:
        raise ConfigError("no rates: give --from LOG_DIR, --rates FILE, or KEY=VALUE")
    rates = read_rates(arguments.rates, arguments.overrides, measured.rates if measured else None)
    plan = find_plan(_cluster(arguments, measured.config if measured else None), rates)
    print(json.dumps(to_json(plan)) if arguments.json else render(plan))
    return 0


def _cluster(arguments: argparse.Namespace, config: RunConfig | None) -> Cluster:
    """From the flags; what they leave out is as in the measured run, or the launcher's default."""
    if arguments.max_staleness < 0:
        raise ConfigError(f"--max-staleness: {arguments.max_staleness} is below 0")
    base = config or RunConfig()

    def size(name: str, default: int) -> int:
        given: Any = getattr(arguments, name)
        return default if given is None else int(given)

    generations = size("generations", base.inference.num_generations)
    slots = size("max_slots", base.inference.inference_microbatch_size * generations)
    if slots < generations:
        raise ConfigError(f"--max-slots: {slots} are fewer than the {generations} responses (-g) of one prompt")
    groups = base.groups_per_step if config is not None else 8 * base.trainer.train_batch_size
    return Cluster(
        num_ranks=arguments.ranks,
        tensor_parallel=size("tp", base.trainer.tensor_parallel_size),
        pipeline_parallel=size("pp", base.trainer.pipeline_parallel_size),
        producer_tensor_parallel=size("ptp", base.cluster.producer_tensor_parallel_size),
        groups_per_step=size("groups_per_step", groups),
        generations=generations,
        train_microbatch=size("train_microbatch", base.trainer.train_microbatch_size),
        max_slots=slots,
        max_staleness=arguments.max_staleness,
        max_token_lag=base.ledger.max_token_lag,
        stale=base.ledger.stale,
        seed=arguments.seed,
    )
