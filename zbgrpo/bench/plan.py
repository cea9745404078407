"""What the planner predicts, against real runs: `zbgrpo bench plan [FOLDER] [--rounds N]`.

Rates are measured in short runs of the quickstart's task. With them the simulation of `zbgrpo plan` predicts step time
and bubble of another run. Three of those, each with a measuring run before it and one behind it, whose predictions are
averaged, so that a machine that gets faster or slower meanwhile counts for less:

    synchronous          --max-staleness 0: generation and training take turns
    balanced             --max-staleness 2: both work nearly all the time
    generation-limited   a twenty-fourth of the decode slots, so that training waits

None of them has as many groups per step as its measuring runs, which have its decode slots and its staleness, as
`zbgrpo plan` advises: what a decode step costs bends with the slots, and generation and training, which share memory
here, slow each other down. Each rank has a core of its own (the consumer's holds the hub too, the producer's its reward
workers). A round is three such triples; errors are the medians over the rounds, with least and largest beside them. A
real step is the mean time between two commits; a real bubble is that of summary.json, of the whole run.

A prediction is as good as its rates are still true when it is checked: other load on the machine, which makes one run
slower than the one before it, counts as error. `drift` says how much: by how much a token of training was slower in the
predicted run than in the measuring one. `own_step_time_error` is the error of a prediction from the rates of the
predicted run itself: what of the error is the simulation's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from zbgrpo.bench.common import finish, load_average, new_parser, pinned_torchrun, rounded, run_program
from zbgrpo.bench.quickstart import RUN_FLAGS, prepare
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError
from zbgrpo.observe.events import iter_events
from zbgrpo.planner.measure import Measured, measure
from zbgrpo.planner.rates import Rates
from zbgrpo.planner.scenario import Figures, Scenario
from zbgrpo.planner.simulation import simulate
from zbgrpo.topology.env import usable_cores

NUM_ROUNDS = 3
MEASURING = {
    "synchronous": "-imbs 16 -ibs 16 -tbs 48 -tMbs 16 --max-staleness 0 --max-steps 50",
    "balanced": "-imbs 48 -ibs 48 -tbs 96 -tMbs 32 --max-staleness 2 --max-steps 40",
    "generation-limited": "-imbs 2 -ibs 8 -tbs 16 -tMbs 8 --max-staleness 2 --max-steps 60",
}
CONFIGURATIONS = {
    "synchronous": "-imbs 16 -ibs 16 -tbs 32 -tMbs 16 --max-staleness 0 --max-steps 80",
    "balanced": "-imbs 48 -ibs 48 -tbs 64 -tMbs 32 --max-staleness 2 --max-steps 60",
    "generation-limited": "-imbs 2 -ibs 8 -tbs 24 -tMbs 8 --max-staleness 2 --max-steps 60",
}
PROMISED_STEP_TIME_ERROR = 0.10
PROMISED_BUBBLE_ERROR = 3.0
"""Percentage points."""

_COMMON = (
    "-t 1 -i 1 -e 1000 -tmbs 64 -lr 0 --resume never -si 1000000000 observe.rollout_interval=1000000000 "
    "observe.progress=none observe.tensorboard=false"
)
_TIMEOUT_SECONDS = 600.0


class Observed(NamedTuple):
    """A run or a prediction of one."""

    step_seconds: float
    consumers: float
    producers: float
    """Bubbles, 0 to 1."""

    def as_dict(self) -> dict[str, float]:
        return {key: rounded(value) for key, value in self._asdict().items()}


class Comparison(NamedTuple):
    """One configuration in one round."""

    predicted: Observed
    real: Observed
    own: Observed
    """Predicted from rates of the run itself."""
    drift: float

    @property
    def step_time_error(self) -> float:
        return abs(self.predicted.step_seconds / self.real.step_seconds - 1)

    @property
    def own_step_time_error(self) -> float:
        return abs(self.own.step_seconds / self.real.step_seconds - 1)

    @property
    def bubble_error(self) -> float:
        return _bubble_error(self.predicted, self.real)

    @property
    def own_bubble_error(self) -> float:
        return _bubble_error(self.own, self.real)


def _bubble_error(predicted: Observed, real: Observed) -> float:
    """Percentage points, of the role for which it is larger."""
    return 100 * max(abs(predicted.consumers - real.consumers), abs(predicted.producers - real.producers))


def run(folder: Path, name: str, flags: str, cores: Sequence[int]) -> Path:
    """Run a configuration on the quickstart's model and data in `folder`; returns its log folder."""
    paths = {"-m": "model", "-d": "train.jsonl", "-sd": "model_out", "-rsd": "rollouts", "--log-dir": "logs"}
    places = [word for flag, where in paths.items() for word in (flag, str(folder / where))]
    command = pinned_torchrun(
        cores, "zbgrpo.launch", [*RUN_FLAGS, *_COMMON.split(), *flags.split(), *places, "-p", name]
    )
    run_program(command, _TIMEOUT_SECONDS, stdout=sys.stderr)
    return folder / "logs" / name


def scenario_of(config: RunConfig, rates: Rates) -> Scenario:
    """The whole run of a configuration that has --max-steps."""
    assert config.ledger.max_steps is not None
    return Scenario(
        rates=rates,
        num_replicas=config.dp_size,
        num_producers=config.cluster.num_inferencer or 1,
        generations=config.inference.num_generations,
        microbatch_groups=config.inference.inference_microbatch_size,
        leases_per_producer=config.inference.inference_batch_size,
        train_batch=config.trainer.train_batch_size,
        train_minibatch=config.trainer.train_minibatch_size,
        train_microbatch=config.trainer.train_microbatch_size,
        max_staleness=config.ledger.max_staleness,
        max_token_lag=config.ledger.max_token_lag,
        stale=config.ledger.stale,
        buffer_limit=config.buffer_limit,
        steps=config.ledger.max_steps,
        warmup_steps=0,
    )


def compare(measuring: Sequence[Measured], log_dir: Path) -> Comparison:
    """The prediction for a run that has been made, the mean of those from each measuring run, and what it was."""
    found = measure(log_dir)
    commits = [event["time"] for event in iter_events(log_dir / "events" / "rank-0.jsonl") if event["kind"] == "commit"]
    bubble = json.loads((log_dir / "summary.json").read_text(encoding="utf-8"))["bubble"]
    real = Observed((commits[-1] - commits[0]) / (len(commits) - 1), bubble["consumers"], bubble["producers"])
    predicted = [_observed(simulate(scenario_of(found.config, each.rates))) for each in measuring]
    own = simulate(scenario_of(found.config, found.rates))
    drift = _seconds_per_token(found) / mean(map(_seconds_per_token, measuring)) - 1
    return Comparison(Observed(*map(mean, zip(*predicted, strict=True))), real, _observed(own), drift)


def _observed(figures: Figures) -> Observed:
    return Observed(figures.step_seconds, figures.consumers.bubble, figures.producers.bubble)


def _seconds_per_token(measured: Measured) -> float:
    """Of training one group of mean length in a microbatch of its own size, by token."""
    rates, config = measured.rates, measured.config
    tokens = mean(sum(group) for group in rates.lengths.groups) + rates.prompt_tokens
    passes = config.inference.num_generations / config.trainer.train_microbatch_size
    return rates.train.token_seconds + rates.train.microbatch_seconds * passes / tokens


def measure_all(folder: Path, num_rounds: int) -> dict[str, Any]:
    """All rounds. Raises ZbgrpoError if a run fails."""
    cores = usable_cores()[:2]
    if len(cores) < 2:
        raise ConfigError("two cores are needed, one for each role")
    if not all((folder / name).exists() for name in ("model", "train.jsonl")):
        prepare(folder, quiet=True)
    found: dict[str, list[Comparison]] = {name: [] for name in CONFIGURATIONS}
    loads = []
    for _ in range(num_rounds):
        for name, flags in CONFIGURATIONS.items():
            before = measure(run(folder, "measuring", MEASURING[name], cores))
            predicted = run(folder, name, flags, cores)
            after = measure(run(folder, "measuring", MEASURING[name], cores))
            found[name].append(compare([before, after], predicted))
        loads.append(load_average())
    return report(found) | {"load_average": loads, "core_of_rank": list(cores)}


def report(found: Mapping[str, Sequence[Comparison]]) -> dict[str, Any]:
    """The worst of the three configurations, each by its median over the rounds."""
    configurations = {name: _of_configuration(name, rounds) for name, rounds in found.items()}
    keys = ("step_time_error", "bubble_error", "own_step_time_error", "own_bubble_error")
    worst = {key: max(entry[key] for entry in configurations.values()) for key in keys}
    return {
        **worst,
        "promised_step_time_error": PROMISED_STEP_TIME_ERROR,
        "promised_bubble_error": PROMISED_BUBBLE_ERROR,
        "configurations": configurations,
    }


def _of_configuration(name: str, rounds: Sequence[Comparison]) -> dict[str, Any]:
    figures: dict[str, Any] = {"flags": CONFIGURATIONS[name]}
    for key in ("step_time_error", "bubble_error", "own_step_time_error", "own_bubble_error", "drift"):
        values = [getattr(comparison, key) for comparison in rounds]
        figures |= {
            key: rounded(median(values)),
            f"{key}_min": rounded(min(values)),
            f"{key}_max": rounded(max(values)),
        }
    pairs = [{"predicted": c.predicted.as_dict(), "real": c.real.as_dict(), "own": c.own.as_dict()} for c in rounds]
    return figures | {"rounds": pairs}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    parser = new_parser("plan", __doc__)
    parser.add_argument(
        "folder", nargs="?", help="with the quickstart's model and data, made if missing; else temporary"
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as temporary:
        return finish(lambda: measure_all(Path(options.folder or temporary).resolve(), options.rounds))


if __name__ == "__main__":
    sys.exit(main())
