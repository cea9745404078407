"""Training against TRL's GRPOTrainer: same model, rows, group size, dtype and cores: `zbgrpo bench train`.

SmolLM2-135M in bfloat16 on questions of GSM8K; steps of 4 prompts x 8 responses of up to 64 tokens; the reward is the
share of distinct characters or tokens, so that no verifier is timed and nearly every group has an advantage. Samples
and response tokens per second:

    TRL        from the end of its first step to the end of its last one
    this run   from the commit of step 1 to that of step 11: what was trained in that time, or what was generated in it
               if that is less. It goes on behind the window, so that generation does not end inside it, and work done
               ahead counts for nothing.

`ratio` is the lesser of both ratios, the median of interleaved pairs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zbgrpo.bench.common import (
    add_cache_option,
    baseline_python,
    finish,
    load_average,
    new_parser,
    pairs_summary,
    rounded,
    run_program,
)
from zbgrpo.bench.roles import REWARD
from zbgrpo.bench.smollm2 import model_folder
from zbgrpo.errors import ZbgrpoError
from zbgrpo.observe.events import iter_events
from zbgrpo.topology.env import available_cores

PROMPTS_PER_STEP, GENERATIONS, MAX_NEW_TOKENS, MICROBATCH = 4, 8, 64, 8
LEARNING_RATE = 1e-6
NUM_PAIRS = 3
WINDOW_STEPS = 10
_STEPS_BEHIND = 4
"""More than generation may be ahead (max_staleness + 1), so that it does not end inside the window."""
_TRL_STEPS = 4
_TRL_PACKAGES = ("trl==1.16.0", "datasets", "accelerate")
_TIMEOUT_SECONDS = 1800.0
_PROJECT = "train"
DATA = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"


class Rates(NamedTuple):
    """Per second."""

    samples: float
    tokens: float


def run_flags(model: Path, folder: Path, trainers: int, threads: int) -> list[str]:
    """Flags of the measured run."""
    sizes = (
        f"-g {GENERATIONS} -tbs {PROMPTS_PER_STEP // trainers} -tMbs {PROMPTS_PER_STEP // trainers} -tmbs {MICROBATCH} "
        f"-imbs {PROMPTS_PER_STEP} -ibs {PROMPTS_PER_STEP * 2} -mnt {MAX_NEW_TOKENS} -mpt 512"
    )
    rest = (
        f"-t {trainers} -i 1 -p {_PROJECT} -s '' --precision bf16 -kl 0 -lr {LEARNING_RATE} --max-staleness 2 "
        f"--max-steps {1 + WINDOW_STEPS + _STEPS_BEHIND} --resume never -si 1000000 trainer.schedule=constant "
        f"cluster.threads_per_rank={threads} observe.rollout_interval=1000000 observe.progress=none "
        "observe.tensorboard=false"
    )
    paths = {
        "-m": model, "-d": DATA, "-rt": f"{folder / 'reward.py'}:distinct", "-sd": folder / "model",
        "-rsd": folder / "rollouts", "--log-dir": folder / "logs",
    }  # fmt: skip
    places = [word for flag, path in paths.items() for word in (flag, str(path))]
    return [*places, *sizes.split(), *(word if word != "''" else "" for word in rest.split())]


def measure_run(model: Path, trainers: int, threads: int) -> Rates:
    """One run of this project. Raises ZbgrpoError if it fails."""
    with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as temporary:
        folder = Path(temporary)
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainers + 1),
            "-m", "zbgrpo.launch", *run_flags(model, folder, trainers, threads),
        ]  # fmt: skip
        # As for TRL: on a CPU.
        variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        run_program(command, _TIMEOUT_SECONDS, environment=variables, stdout=sys.stderr)
        return read_rates(folder / "logs" / _PROJECT / "events", trainers)


def read_rates(events: Path, trainers: int) -> Rates:
    """The rates in the window, from the events of a run. Raises ZbgrpoError if generation ended inside it."""
    commits = {e["version"]: e["time"] for e in iter_events(events / "rank-0.jsonl") if e["kind"] == "commit"}
    begin, end = commits[1], commits[1 + WINDOW_STEPS]
    sent = {tuple(e["uid"]): e for e in iter_events(events / f"rank-{trainers}.jsonl") if e["kind"] == "sent"}
    if max(event["time"] for event in sent.values()) <= end:
        raise ZbgrpoError("generation ended inside the window: the run was too short")
    trained = [tuple(e["uid"]) for e in _trained(events, trainers) if 1 <= e["step"] <= WINDOW_STEPS]
    generated = [uid for uid, event in sent.items() if begin < event["time"] <= end]

    def count(uids: Sequence[Any]) -> tuple[int, int]:
        return len(uids) * GENERATIONS, sum(sum(sent[uid]["lengths"]) for uid in uids)

    samples, tokens = (min(pair) for pair in zip(count(trained), count(generated), strict=True))
    return Rates(samples / (end - begin), tokens / (end - begin))


def _trained(events: Path, trainers: int) -> Iterator[dict[str, Any]]:
    for rank in range(trainers):
        yield from (event for event in iter_events(events / f"rank-{rank}.jsonl") if event["kind"] == "trained")


def measure_trl(python: Path, model: Path) -> Rates:
    """One run of TRL. Raises ZbgrpoError if it fails."""
    settings = {
        "model": str(model), "data": str(DATA), "steps": _TRL_STEPS, "threads": available_cores(),
        "prompts_per_step": PROMPTS_PER_STEP, "generations": GENERATIONS, "microbatch": MICROBATCH,
        "max_new_tokens": MAX_NEW_TOKENS, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    program = Path(__file__).parent / "baselines" / "trl_grpo.py"
    command = ["env", "CUDA_VISIBLE_DEVICES=", "HF_HUB_OFFLINE=1", str(python), str(program), json.dumps(settings)]
    with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as folder:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    if done.returncode != 0:
        raise ZbgrpoError(f"TRL ended with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Rates(found["samples_per_s"], found["tokens_per_s"])


def report(pairs: Sequence[tuple[Rates, Rates]]) -> dict[str, Any]:
    """The figures of (this run, TRL) pairs."""
    ratios = [min(own.samples / trl.samples, own.tokens / trl.tokens) for own, trl in pairs]
    return pairs_summary(ratios) | {
        "pairs": [
            {
                "samples_per_s": rounded(own.samples), "tokens_per_s": rounded(own.tokens),
                "trl_samples_per_s": rounded(trl.samples), "trl_tokens_per_s": rounded(trl.tokens),
            }
            for own, trl in pairs
        ],
        "cores": available_cores(),
        "load_before": load_average(),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    parser = new_parser("train", __doc__)
    add_cache_option(parser)
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--trainers", type=int, default=1, metavar="N", help="ranks that train (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank (default: %(default)s)")
    parser.add_argument("--without-trl", action="store_true", help="only this project's own rates")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)

    def measured() -> dict[str, Any]:
        model = model_folder(options.cache)
        if options.without_trl:
            return {"rates": [measure_run(model, options.trainers, options.threads)._asdict()]}
        python = baseline_python("trl", _TRL_PACKAGES, options.cache)
        pairs = []
        for _ in range(options.pairs):
            trl = measure_trl(python, model)
            pairs.append((measure_run(model, options.trainers, options.threads), trl))
        return report(pairs)

    return finish(measured)


if __name__ == "__main__":
    sys.exit(main())
