"""A run of one producer and one consumer, each on a core of its own, and what its logs say of a window of its steps.

The model is random and made on the spot: a Qwen2 of six million parameters that nothing ends but the limits of the
rows, so that lengths are what a benchmark wants. Decoding, scoring, transport, training and weights are real.

The window lies between two commits, behind the first steps, when everything has been used once, and before the last
ones, when generation has nothing left to do.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from zbgrpo.bench.common import finish, new_parser, pinned_torchrun, rounded, run_program
from zbgrpo.bench.quickstart import make_tokenizer
from zbgrpo.errors import ConfigError, ZbgrpoError
from zbgrpo.observe.events import iter_events
from zbgrpo.observe.summary import role_bubble
from zbgrpo.topology.env import usable_cores

GENERATIONS = 8
WARMUP_STEPS = 3
_TIMEOUT_SECONDS = 900.0
_NUM_ROWS = 4096
_COMMON = (
    f"-t 1 -i 1 -g {GENERATIONS} -mpt 32 -kl 0 -lr 1e-5 --precision fp32 -e 1000 --resume never -si 1000000000 "
    "trainer.schedule=constant observe.rollout_interval=1000000000 observe.progress=none observe.tensorboard=false"
)

REWARD = '''
def distinct(response, **_):
    """Share of distinct characters."""
    return len(set(response)) / max(1, len(response))
'''


class Sizes(NamedTuple):
    """What decides how a run's work is divided."""

    groups_per_step: int
    minibatch: int
    microbatch_responses: int
    slots_groups: int
    """imbs: decode slots, in groups."""
    leases: int
    """ibs."""
    max_new_tokens: int

    def flags(self) -> list[str]:
        """On the command line."""
        return (
            f"-tbs {self.groups_per_step} -tMbs {self.minibatch} -tmbs {self.microbatch_responses} "
            f"-imbs {self.slots_groups} -ibs {self.leases} -mnt {self.max_new_tokens}"
        ).split()

    @property
    def staleness_for_no_bubble(self) -> int:
        """Groups in flight / S + 1, rounded up."""
        return math.ceil(self.leases / self.groups_per_step) + 1


class Window(NamedTuple):
    """Figures of the steps in the window."""

    step_seconds: float
    samples_per_s: float
    training_seconds: float
    """A step's share of time that the consumer trained."""
    generating_seconds: float
    """The same of the producer, weighted by occupied slots."""
    consumers: float
    producers: float
    """Bubbles, 0 to 1."""
    tokens_left_out: float
    """Share of the trained tokens, 0 to 1."""
    dropped: int


def prepare(folder: Path, limits: Iterable[Sequence[int]]) -> None:
    """Write model, reward and rows into `folder`; each row has the next limits of its responses' lengths."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=math.ceil(len(tokenizer) / 16) * 16,
            hidden_size=320,
            intermediate_size=960,
            num_hidden_layers=5,
            num_attention_heads=5,
            num_key_value_heads=5,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    random = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _, own in zip(range(_NUM_ROWS), limits, strict=False):
            left, right = random.integers(10, 100, 2).tolist()
            message = {"role": "user", "content": f"What is {left} + {right}?"}
            row = {"messages": message, "gt_answer": "-", "max_new_tokens": list(own)}
            file.write(json.dumps(row) + "\n")


def run(folder: Path, name: str, sizes: Sizes, max_staleness: int, window_steps: int) -> Path:
    """A run whose window has that many steps; returns its log folder. Raises ZbgrpoError if it fails."""
    cores = usable_cores()[:2]
    if len(cores) < 2:
        raise ConfigError("two cores are needed, one for each role")
    steps = WARMUP_STEPS + window_steps + max_staleness + 2
    paths = {"-m": "model", "-d": "rows.jsonl", "-sd": "saved", "-rsd": "rollouts", "--log-dir": "logs"}
    places = [word for flag, where in paths.items() for word in (flag, str(folder / where))]
    flags = [
        *_COMMON.split(), *sizes.flags(), *places, "-rt", f"{folder / 'reward.py'}:distinct", "-p", name,
        "--max-staleness", str(max_staleness), "--max-steps", str(steps),
    ]  # fmt: skip
    run_program(pinned_torchrun(cores, "zbgrpo.launch", flags), _TIMEOUT_SECONDS, stdout=sys.stderr)
    return folder / "logs" / name


def read_window(log_dir: Path, sizes: Sizes, window_steps: int) -> Window:
    """The figures of a run's window. Raises ZbgrpoError if generation ended inside it."""
    events = log_dir / "events"
    consumer = list(iter_events(events / "rank-0.jsonl"))
    commits = {event["version"]: event for event in consumer if event["kind"] == "commit"}
    first, last = commits[WARMUP_STEPS], commits[WARMUP_STEPS + window_steps]
    producer = list(iter_events(events / "rank-1.jsonl"))
    if max(event["time"] for event in producer if event["kind"] == "sent") <= last["time"]:
        raise ZbgrpoError("generation ended inside the window: the run was too short")
    reports = [event for event in producer if event["kind"] == "decode"]
    began, ended = (_nearest(reports, event["time"]) for event in (first, last))
    consumer_times, producer_times = _passed(first, last), _passed(began, ended)
    seconds = (last["time"] - first["time"]) / window_steps
    lines = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    inside = [line for line in lines if WARMUP_STEPS < line["step"] <= WARMUP_STEPS + window_steps]
    lengths = {tuple(event["uid"]): sum(event["lengths"]) for event in producer if event["kind"] == "sent"}
    steps = range(WARMUP_STEPS, WARMUP_STEPS + window_steps)
    num_tokens = sum(lengths[tuple(e["uid"])] for e in consumer if e["kind"] == "trained" and e["step"] in steps)
    summary = json.loads((log_dir / "summary.json").read_text(encoding="utf-8"))
    return Window(
        step_seconds=seconds,
        samples_per_s=sizes.groups_per_step * GENERATIONS / seconds,
        training_seconds=seconds * _share(consumer_times, "busy"),
        generating_seconds=seconds * _share(producer_times, "busy"),
        consumers=role_bubble([consumer_times]) or 0.0,
        producers=role_bubble([producer_times]) or 0.0,
        tokens_left_out=sum(line["staleness/tokens_left_out"] for line in inside) / num_tokens,
        dropped=summary["ledger"]["dropped"],
    )


def _nearest(reports: Sequence[dict[str, Any]], time: float) -> dict[str, Any]:
    return min(reports, key=lambda event: abs(event["time"] - time))


def _passed(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by account between two events that have a rank's times."""
    return {name: value - first["times"].get(name, 0.0) for name, value in last["times"].items()}


def _share(times: Mapping[str, float], account: str) -> float:
    return times[account] / sum(times.values())


def bubbles_summary(bubbles: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians of bubbles by name, and how far they lie apart."""
    return {
        "bubble": {name: rounded(median(values)) for name, values in bubbles.items()},
        "bubble_spread": {name: [rounded(min(v)), rounded(max(v))] for name, v in bubbles.items()},
    }


def measure_pairs(
    name: str,
    documentation: str | None,
    measure: Callable[[Path, int, int], Mapping[str, Any]],
    num_pairs: int,
    window_steps: int,
    arguments: Sequence[str] | None,
) -> int:
    """Command line of a benchmark that makes pairs of runs in a temporary folder; returns the exit status."""
    parser = new_parser(name, documentation)
    parser.add_argument("--pairs", type=int, default=num_pairs, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=window_steps, metavar="N", help="measured (default: %(default)s)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as folder:
        return finish(lambda: measure(Path(folder), options.pairs, options.steps))
