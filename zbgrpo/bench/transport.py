"""Groups per second from a producer to a consumer, against one Ray actor with a queue: `zbgrpo bench transport`.

Both sides move groups with the same numbers of tokens and hand them over in batches of the same number of groups.

Ours, three processes: a producer makes the tensors of each group into one frame with a checksum and sends a batch as a
message; the hub's sockets, plan publisher and ring (`forwarder`) check it, acknowledge it and put it into shared
memory; the consumer copies it out, checks it again, and makes torch tensors of each group's arrays. Every group is
leased, acknowledged and delivered exactly once, which the run fails without. Its responses are all as long as they may
be, so nothing is gained by not padding them; ids travel as int32.

The baseline (`baselines/ray_queue.py`) puts a batch of padded tensors into the actor, takes a copy of it out, and
copies that once more, one call after the other. It has an environment of its own, made once by pip.

A figure is the median ratio of groups per second over interleaved pairs, with the smallest and the largest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zbgrpo.bench.common import (
    add_cache_option,
    baseline_python,
    finish,
    load_average,
    new_parser,
    pairs_summary,
    rounded,
)
from zbgrpo.bench.traffic import Shape
from zbgrpo.bench.traffic_run import FORWARDER, hub_spec, run_traffic
from zbgrpo.errors import ResourceError

_BASELINE = Path(__file__).parent / "baselines" / "ray_queue.py"
_TIMEOUT_SECONDS = 240.0
_RAY_START_SECONDS = 180.0
_NUM_PAIRS = 3
_RAY_SECONDS = 2.5


class Case(NamedTuple):
    """A shape, how many groups of it one measurement moves, and how many may be under way."""

    shape: Shape
    num_groups: int
    window: int


CASES = {
    "large": Case(Shape(8, 8, 512, 3584), 6_400, 64),
    "medium": Case(Shape(8, 8, 128, 256), 48_000, 256),
    "small": Case(Shape(1, 8, 64, 64), 16_000, 128),
}


class RayQueue:
    """The baseline for one shape: started once, measured again and again."""

    def __init__(self, process: subprocess.Popen[str], num_groups: int) -> None:
        self._process, self._num_groups = process, num_groups

    def ask(self, line: str, timeout_seconds: float) -> dict[str, Any]:
        """Send a line and read the answer; raises `ResourceError` if there is none in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        killer = threading.Timer(timeout_seconds, self._process.kill)
        killer.start()
        try:
            if line:
                print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        finally:
            killer.cancel()
        if not answer:
            raise ResourceError("the baseline of Ray does not answer; is there enough memory in /dev/shm?")
        result: dict[str, Any] = json.loads(answer)
        return result

    def groups_per_second(self) -> float:
        """One measurement."""
        moved = self.ask(str(_RAY_SECONDS), _TIMEOUT_SECONDS)
        return float(self._num_groups * moved["batches"] / moved["seconds"])


@contextmanager
def ray_queue(python: Path, shape: Shape) -> Iterator[RayQueue]:
    """The baseline, ready to be measured. Ray's processes end with it."""
    sizes = [str(size) for size in (shape.groups, shape.responses, shape.prompt_tokens, shape.response_tokens)]
    command = [str(python), str(_BASELINE), *sizes]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            queue = RayQueue(process, shape.groups)
            queue.ask("", _RAY_START_SECONDS)
            yield queue
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60.0)
        finally:
            process.kill()


def measure_ours(case: Case, folder: Path) -> tuple[float, dict[str, float]]:
    """Groups per second, and CPU microseconds per group of each process."""
    spec = hub_spec(case.shape, case.num_groups, 1, case.window, case.num_groups, folder / "events" / "hub.jsonl")
    traffic = run_traffic(FORWARDER, spec, case.shape, _TIMEOUT_SECONDS, tensors=True)
    costs = {name: rounded(1e6 * seconds / case.num_groups) for name, seconds in traffic.cpu_seconds.items()}
    return traffic.groups_per_second(), costs


def measure_case(name: str, case: Case, python: Path, num_pairs: int) -> dict[str, Any]:
    """Interleaved pairs of one shape."""
    ours, theirs = [], []
    costs: dict[str, float] = {}
    with ray_queue(python, case.shape) as queue, tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as folder:
        for _ in range(num_pairs):
            theirs.append(queue.groups_per_second())
            rate, costs = measure_ours(case, Path(folder))
            ours.append(rate)
    return {
        **pairs_summary([mine / other for mine, other in zip(ours, theirs, strict=True)], f"ratio_{name}"),
        name: {
            "groups_per_s": rounded(median(ours)),
            "mb_per_s": rounded(median(ours) * case.shape.group_bytes / 1e6),
            "ray_groups_per_s": rounded(median(theirs)),
            "group_bytes": case.shape.group_bytes,
            "cpu_microseconds_per_group": costs,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    parser = new_parser("transport", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(CASES), default=list(CASES), help="which shapes")
    parser.add_argument("--pairs", type=int, default=_NUM_PAIRS, metavar="N", help="pairs per shape (%(default)s)")
    add_cache_option(parser)
    options = parser.parse_args(arguments)

    def measured() -> dict[str, Any]:
        python = baseline_python("ray", ["ray"], options.cache)
        result: dict[str, Any] = {}
        for name in options.shapes:
            result |= measure_case(name, CASES[name], python, max(1, options.pairs))
        return result | {"pairs": max(1, options.pairs), "load": load_average()}

    return finish(measured)


if __name__ == "__main__":
    sys.exit(main())
