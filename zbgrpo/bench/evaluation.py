"""What an evaluation costs training: `zbgrpo bench evaluation [FOLDER] [--producers P]`.

While an evaluation runs, E = max(1, P // 4) of P producers answer its rows and the others go on for training. So
trained samples per second should fall to (P - E) / P of what they are without one, and no further; at least 0.8 of that
is promised. A real run on the quickstart's task is measured: its logs say when evaluations ran and when each group was
trained. Each evaluation is paired with the time between it and the next one, and the ratio is the median of the pairs.

For the ratio to mean something, a producer must not take the core that another one leaves: every producer is kept, with
its reward workers, on a core of its own. The consumer and the hub have one more core if there is one, else they share
that of the last producer, which never evaluates. Sharing does not shift the ratio: if a sample takes g seconds to
generate and t to train, n producers, one of which shares its core so, give n / (g + t) samples per second.

Generation is the limit, through few decode slots; `consumers_starved` is the share of its time that the consumer waits
for groups. The learning rate is 0, so that responses stay alike. Other load on the machine shows in how far `pairs` lie
apart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zbgrpo.bench.common import finish, new_parser, pinned_torchrun, run_program
from zbgrpo.bench.quickstart import RUN_FLAGS, prepare
from zbgrpo.errors import ConfigError, ZbgrpoError
from zbgrpo.observe.events import iter_events
from zbgrpo.topology.env import usable_cores

NUM_PAIRS = 4
NUM_GENERATIONS = 8
NUM_EVALUATION_GENERATIONS = 6
NUM_GROUPS_PER_STEP = 16
PROMISED_SHARE = 0.8
"""Of (P - E) / P, which is what the loss of the evaluators alone would leave."""

_PROJECT = "evaluation"
_TIMEOUT_SECONDS = 900.0


class Pair(NamedTuple):
    """One evaluation and the time from its end to the next one. Trained samples per second in both."""

    version: int
    during: float
    without: float
    seconds_during: float
    seconds_without: float

    @property
    def ratio(self) -> float:
        return self.during / self.without


def run_flags(folder: Path, num_producers: int, interval: int) -> list[str]:
    """Flags of the measured run: the quickstart's, with few slots, an evaluation set, and nothing saved on the way."""
    overrides = (
        f"-t 1 -i {num_producers} -p {_PROJECT} --resume never -g {NUM_GENERATIONS} -imbs 2 -ibs 8 "
        f"-tbs {NUM_GROUPS_PER_STEP} -tMbs 4 -tmbs 32 -lr 0 -e 1000 -ei {interval} "
        f"--max-steps {(NUM_PAIRS + 1) * interval} -si 1000000000 observe.rollout_interval=1000000000 "
        f"evaluation.num_generations={NUM_EVALUATION_GENERATIONS} observe.progress=none observe.tensorboard=false"
    )
    paths = {
        "-m": "model", "-d": "train.jsonl", "-sd": "model_out", "-esd": "eval", "-rsd": "rollouts", "--log-dir": "logs",
    }  # fmt: skip
    places = [word for flag, name in paths.items() for word in (flag, str(folder / name))]
    return [*RUN_FLAGS, *overrides.split(), *places, "-ed", json.dumps({"heldout": str(folder / "heldout.jsonl")})]


def eval_interval(num_rows: int, num_producers: int) -> int:
    """Steps between two evaluations so that one is about half of that time: what it costs, in samples of training.

    Example: 2 producers, one of which evaluates 256 rows x 6: meanwhile the other one trains as many samples, and both
    train twice as many in the same time again.
    """
    num_evaluators = evaluators(num_producers)
    samples = num_rows * NUM_EVALUATION_GENERATIONS * (2 * num_producers - num_evaluators) / num_evaluators
    return max(1, round(samples / (NUM_GENERATIONS * NUM_GROUPS_PER_STEP)))


def evaluators(num_producers: int) -> int:
    """How many producers take part in an evaluation."""
    return max(1, num_producers // 4)


def assign_cores(cores: Sequence[int], num_producers: int) -> list[int]:
    """The core of each rank: the consumer, then the producers. Raises ConfigError if there are too few.

    Example: cores 0 and 1, 2 producers: the evaluator has 0, the other producer and the consumer share 1.
    """
    if num_producers < 2:
        raise ConfigError("--producers: with a single producer nothing is trained while it evaluates; give at least 2")
    if len(cores) < num_producers:
        raise ConfigError(f"--producers {num_producers}: each needs a core of its own, and there are {len(cores)}")
    producers = list(cores[:num_producers])
    return [cores[num_producers] if len(cores) > num_producers else producers[-1], *producers]


def measure(folder: Path, num_producers: int) -> dict[str, Any]:
    """Run and evaluate the logs. `folder` has the quickstart's model and data. Raises ZbgrpoError if the run fails."""
    cores = assign_cores(usable_cores(), num_producers)
    num_rows = len((folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines())
    interval = eval_interval(num_rows, num_producers)
    run_program(pinned_torchrun(cores, "zbgrpo.launch", run_flags(folder, num_producers, interval)), _TIMEOUT_SECONDS)
    logs = folder / "logs" / _PROJECT
    pairs = read_pairs(logs / "events", interval)
    summary = json.loads((logs / "summary.json").read_text(encoding="utf-8"))
    return report(pairs, num_producers, cores) | {
        "consumers_starved": round(summary["time_by_role"]["consumers"]["starved"], 3),
        "seconds": round(summary["seconds"], 1),
    }


def read_pairs(events: Path, interval: int) -> list[Pair]:
    """Evaluations of the versions `interval`, 2 x `interval`, ..., each with the time from its end to the next one.

    An evaluation runs from the commit of its version, when its producers get no more leases for training, until its
    last row has been answered; what they still had in work is trained in it too. The first one, before training, and
    the last one, after it, are left out.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for event in iter_events(events / "hub.jsonl"):
        if event["kind"] == "commit" and event["version"] % interval == 0:
            begins[event["version"]] = event["time"]
        elif event["kind"] == "evaluated":
            ends[event["version"]] = event["time"]
    trained = [event["time"] for event in iter_events(events / "rank-0.jsonl") if event["kind"] == "trained"]

    def rate(begin: float, end: float) -> float:
        return NUM_GENERATIONS * sum(begin <= time < end for time in trained) / (end - begin)

    pairs = []
    for version in sorted(begins)[:-1]:
        begin, end, following = begins[version], ends[version], begins[version + interval]
        if end >= following:
            raise ZbgrpoError(f"the evaluation of version {version} lasted until the next one: nothing to compare with")
        pairs.append(Pair(version, rate(begin, end), rate(end, following), end - begin, following - end))
    return pairs


def report(pairs: Sequence[Pair], num_producers: int, cores: Sequence[int]) -> dict[str, Any]:
    """The figures of one run: medians over the pairs, and how far these lie apart."""
    ratios = [pair.ratio for pair in pairs]
    bound = (num_producers - evaluators(num_producers)) / num_producers
    return {
        "ratio": round(median(ratios), 3),
        "bound": round(bound, 3),
        "promised": round(PROMISED_SHARE * bound, 3),
        "samples_per_s_during": round(median(pair.during for pair in pairs), 1),
        "samples_per_s_without": round(median(pair.without for pair in pairs), 1),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "pairs": [{key: round(value, 2) for key, value in pair._asdict().items()} for pair in pairs],
        "num_producers": num_producers,
        "num_evaluators": evaluators(num_producers),
        "core_of_rank": list(cores),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    parser = new_parser("evaluation", __doc__)
    parser.add_argument(
        "folder", nargs="?", help="with the quickstart's model and data, made if missing; else temporary"
    )
    parser.add_argument("--producers", type=int, default=2, metavar="P", help="producers, each with a core of its own")
    options = parser.parse_args(arguments)

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as temporary:
            folder = Path(options.folder or temporary).resolve()
            assign_cores(usable_cores(), options.producers)  # before anything takes time
            if not all((folder / name).exists() for name in ("model", "train.jsonl", "heldout.jsonl")):
                prepare(folder)
            return measure(folder, options.producers)

    return finish(measured)


if __name__ == "__main__":
    sys.exit(main())
