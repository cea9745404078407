"""A plan for people, and for programs."""

from __future__ import annotations

from typing import Any

from zbgrpo.planner.scenario import Account
from zbgrpo.planner.search import Candidate, Cluster, Plan, bound

_NUM_SHOWN = 8
_COLUMNS = (
    "-t", "-i", "-imbs", "-ibs", "-tbs", "-tMbs", "stale", "step s", "samples/s", "train idle", "gen idle", "bubble",
    "lag",
)  # fmt: skip


def flags(cluster: Cluster, candidate: Candidate) -> list[str]:
    """The plan as flags of `zbgrpo.launch`."""
    scenario = candidate.scenario
    values = {
        "-t": scenario.num_replicas * cluster.ranks_per_replica,
        "-i": scenario.num_producers,
        "-g": scenario.generations,
        "-imbs": scenario.microbatch_groups,
        "-ibs": scenario.leases_per_producer,
        "-tbs": scenario.train_batch,
        "-tMbs": scenario.train_minibatch,
        "-tmbs": min(scenario.train_microbatch, scenario.train_minibatch * scenario.generations),
        "--max-staleness": scenario.max_staleness,
    }
    spread = {
        "-tp": cluster.tensor_parallel, "-pp": cluster.pipeline_parallel, "-ptp": cluster.producer_tensor_parallel,
    }  # fmt: skip
    values |= {flag: value for flag, value in spread.items() if value > 1}
    return [word for flag, value in values.items() for word in (flag, str(value))]


def render(plan: Plan) -> str:
    """A table of the best plan of each split, what the first one does, and its flags on a line of their own."""
    by_split: dict[int, Candidate] = {}
    for candidate in plan.candidates:
        by_split.setdefault(candidate.scenario.num_replicas, candidate)
    shown = list(by_split.values())[:_NUM_SHOWN]
    rows = [_COLUMNS, *(_row(plan.cluster, candidate) for candidate in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    best, cluster = plan.best, plan.cluster
    figures, could = best.figures, bound(best.scenario)
    limit = "generation" if could.generated < could.trained else "training"
    consumers, producers = figures.consumers, figures.producers
    return "\n".join(
        [
            f"{cluster.num_ranks} ranks, {best.scenario.groups_per_step} groups of {cluster.generations} responses per "
            f"step: {plan.num_bounded} plans bounded, {len(plan.candidates)} simulated",
            "",
            *lines,
            "",
            f"first line   a step every {_seconds(figures.step_seconds)}, {figures.samples_per_second:,.1f} samples/s, "
            f"limited by {limit}; bubble {_percent(best.bubble)} of all ranks",
            f"  consumers  {_shares(consumers)}",
            f"  producers  {_shares(producers)}",
            f"  tokens     lag {figures.mean_token_lag:.1f} versions on average, {_percent(figures.left_out_share)} "
            f"older than --max-token-lag {best.scenario.max_token_lag}",
            "",
            " ".join(flags(cluster, best)),
        ]
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """The same as plain JSON types: `flags`, `predicted`, and all that was simulated in `candidates`."""
    return {
        "ranks": plan.cluster.num_ranks,
        "flags": flags(plan.cluster, plan.best),
        "predicted": _figures(plan.best),
        "candidates": [
            {"flags": flags(plan.cluster, candidate), **_figures(candidate)} for candidate in plan.candidates
        ],
        "num_bounded": plan.num_bounded,
    }


def _figures(candidate: Candidate) -> dict[str, Any]:
    figures = candidate.figures
    return {
        "step_seconds": figures.step_seconds,
        "samples_per_second": figures.samples_per_second,
        "tokens_per_second": figures.tokens_per_second,
        "bubble": {
            "all": candidate.bubble, "consumers": figures.consumers.bubble, "producers": figures.producers.bubble,
        },
        "time_shares": {"consumers": figures.consumers.shares(), "producers": figures.producers.shares()},
        "mean_token_lag": figures.mean_token_lag,
        "tokens_by_lag": {str(lag): count for lag, count in figures.tokens_by_lag.items()},
        "left_out_share": figures.left_out_share,
    }  # fmt: skip


def _row(cluster: Cluster, candidate: Candidate) -> tuple[str, ...]:
    scenario, figures = candidate.scenario, candidate.figures
    sizes = (
        scenario.num_replicas * cluster.ranks_per_replica, scenario.num_producers, scenario.microbatch_groups,
        scenario.leases_per_producer, scenario.train_batch, scenario.train_minibatch, scenario.max_staleness,
    )  # fmt: skip
    return (
        *map(str, sizes),
        f"{figures.step_seconds:.3g}",
        f"{figures.samples_per_second:,.1f}",
        _percent(figures.consumers.bubble),
        _percent(figures.producers.bubble),
        _percent(candidate.bubble),
        f"{figures.mean_token_lag:.1f}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _shares(account: Account) -> str:
    shares = account.shares()
    return ", ".join(f"{name} {_percent(shares[name])}" for name in ("busy", "starved", "blocked", "imbalance"))
