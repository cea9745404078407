"""Groups per second through the hub: `zbgrpo bench hub`.

The hub is the process of a run, with ledger, event log, plan and ring. Producers take leases and answer each with a
group of 8 KB; a consumer takes the plan out of the ring, checks it, and commits every step, whose version the producers
apply, so that admission works as in a run. Nothing is generated and nothing is trained. All processes share the given
number of cores, two by default: what is measured is the work of a whole node around its GPUs.

The rate of a run leaves out its first tenth; the figure is the median over the runs, with the slowest and the fastest.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from zbgrpo.bench.common import finish, load_average, new_parser, rounded
from zbgrpo.bench.traffic import Shape
from zbgrpo.bench.traffic_run import HUB, Traffic, hub_spec, run_traffic
from zbgrpo.topology.env import usable_cores

SHAPE = Shape(groups=64, responses=8, prompt_tokens=64, response_tokens=119)
"""8,104 bytes. 64 groups make a plan entry; how many come in one message depends on the leases that are granted."""

GROUPS_PER_STEP = 512
LEASES_PER_PRODUCER = 128
_TIMEOUT_SECONDS = 300.0


def measure_once(num_groups: int, num_producers: int) -> Traffic:
    """One run of the hub over that many groups, rounded up to whole steps."""
    num_groups = -(-num_groups // GROUPS_PER_STEP) * GROUPS_PER_STEP
    with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as folder:
        spec = hub_spec(
            SHAPE,
            num_groups,
            num_producers,
            LEASES_PER_PRODUCER,
            GROUPS_PER_STEP,
            Path(folder) / "events" / "hub.jsonl",
        )
        return run_traffic(HUB, spec, SHAPE, _TIMEOUT_SECONDS, tensors=False)


def report(runs: Sequence[Traffic]) -> dict[str, Any]:
    """The figures of several runs."""
    rates = [run.groups_per_second() for run in runs]
    last = runs[-1]
    return {
        "groups_per_s": rounded(median(rates)),
        "groups_per_s_min": rounded(min(rates)),
        "groups_per_s_max": rounded(max(rates)),
        "mb_per_s": rounded(median(rates) * SHAPE.group_bytes / 1e6),
        "group_bytes": SHAPE.group_bytes,
        "cpu_microseconds_per_group": {
            name: rounded(1e6 * seconds / last.groups) for name, seconds in last.cpu_seconds.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    parser = new_parser("hub", __doc__)
    parser.add_argument("--groups", type=int, default=60_000, metavar="N", help="groups per run (%(default)s)")
    parser.add_argument("--producers", type=int, default=4, metavar="P", help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="for all processes (%(default)s)")
    options = parser.parse_args(arguments)

    def measured() -> dict[str, Any]:
        cores = usable_cores()[: max(1, options.cores)]
        os.sched_setaffinity(0, cores)  # the processes started from here take it over
        runs = [measure_once(options.groups, options.producers) for _ in range(max(1, options.runs))]
        return report(runs) | {"producers": options.producers, "cores": len(cores), "load": load_average()}

    return finish(measured)


if __name__ == "__main__":
    sys.exit(main())
