"""A real run of two ranks that share the device, with weights by `--weight-transport ipc`: is it right, how fast is it?

Rates are those between the commit of step 1 and that of the last step but three, so that neither the start nor the end
of generation falls into it. A rank's own rate is over the time in which it was busy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import MemoryWatch, peak_tflops
from report import REPOSITORY, Report, part_options
from workplace import SIZES, Size, make

from zbgrpo.bench.common import run_program
from zbgrpo.engine.check_ledger import check_logs
from zbgrpo.errors import ZbgrpoError
from zbgrpo.observe.events import read_events

_PROJECT = "check"
_RUN_SECONDS = 240.0
_SHARED_MEMORY = Path("/dev/shm")


def run(folder: Path, size: Size) -> None:
    """Launch and wait; what the ranks print goes to the log of this part."""
    flags = (
        f"-t 1 -i 1 -p {_PROJECT} -m model -d train.jsonl -rt reward.py:distinct --precision bf16 -kl 0 "
        f"--weight-transport ipc --max-steps {size.num_steps} --resume never -si 1000000 -sd saved {size.flags} "
        "trainer.schedule=constant observe.progress=lines observe.tensorboard=false cluster.timeout_seconds=120 "
        "observe.rollout_interval=1000000"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        "--nproc-per-node", "2", str(Path(__file__).with_name("run_rank.py")), str(folder), *flags.split(), "-s", "",
    ]  # fmt: skip
    here = os.getcwd()
    os.chdir(folder)
    try:
        run_program(command, _RUN_SECONDS, environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    finally:
        os.chdir(here)


def check_run(report: Report, logs: Path, size: Size) -> None:
    """What must hold of its logs."""
    ledger = check_logs(logs)
    broken = [f"{each.name}: {each.num_violations}" for each in ledger.invariants if each.num_violations]
    report.check("run.ledger", ledger.ok and ledger.state == "end", state=ledger.state, broken=broken)
    report.check("run.steps", ledger.version == size.num_steps, steps=ledger.version, wanted=size.num_steps)
    source, producer = (read_events(logs / "events" / f"rank-{rank}.jsonl") for rank in range(2))
    sent = {event["version"]: event["digest"] for event in source if event["kind"] == "published"}
    live = {event["version"]: event["digest"] for event in producer if event["kind"] == "live_digest"}
    other = sorted(version for version, digest in live.items() if sent.get(version) != digest)
    report.check("run.digests_are_equal", len(live) > 1 and not other, versions=len(live), other=other)
    # Equal digests of weights that never change would say nothing.
    report.check("run.weights_change", len(set(sent.values())) == len(sent) > 1, versions=len(sent))
    losses = [json.loads(line)["train/grad_norm"] for line in (logs / "metrics.jsonl").read_text().splitlines()]
    report.check("run.gradients_are_finite", bool(losses) and all(losses), norms=losses)


def measure_run(report: Report, logs: Path, size: Size, num_parameters: int, device: str) -> None:
    """Rates of both roles, of weights, and of the GPU."""
    source, producer = (read_events(logs / "events" / f"rank-{rank}.jsonl") for rank in range(2))
    commits = {event["version"]: event for event in source if event["kind"] == "commit"}
    begin, end = commits[1], commits[size.num_steps - 3]
    seconds = end["time"] - begin["time"]

    def inside(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        return [e for e in events if e["kind"] == kind and begin["time"] < e["time"] <= end["time"]]

    def busy(first: dict[str, Any], last: dict[str, Any]) -> float:
        return float(last["times"]["busy"] - first["times"]["busy"])

    trained = sum(event["tokens"] for event in inside(source, "minibatch"))
    training = busy(begin, end)
    decoding = inside(producer, "decode")
    generating = busy(decoding[0], decoding[-1]) if len(decoding) > 1 else 0.0
    generated = _generated(producer, decoding[0]["time"], decoding[-1]["time"]) if len(decoding) > 1 else 0
    report.figure("run.window_s", seconds)
    report.figure("run.train_tokens_per_s", trained / seconds)
    report.figure("run.train_tokens_per_busy_s", trained / training if training > 0 else None, "no busy time is booked")
    report.figure("run.generate_tokens_per_s", sum(sum(e["lengths"]) for e in inside(producer, "sent")) / seconds)
    report.figure(
        "run.generate_tokens_per_busy_s",
        generated / generating if generating > 0 else None,
        "the window is shorter than two reports of the producer",
    )
    summary = json.loads((logs / "summary.json").read_text())
    report.figure("run.completion_tokens_per_s", summary["completion_tokens_per_s"])
    for role, bubble in summary["bubble"].items():
        report.figure(f"run.bubble_{role}", bubble, "no time is booked")
    _mfu(report, 6 * num_parameters * trained, seconds, training, device)
    took = [e["seconds"] for e in source if e["kind"] == "published" and e["version"] > 0]
    report.figure("run.weights_bytes", 2 * num_parameters)
    report.figure("run.weights_gb_per_s", 2e-9 * num_parameters / median(took) if took else None, "nothing was sent")


def _generated(events: list[dict[str, Any]], begin: float, end: float) -> int:
    return sum(sum(e["lengths"]) for e in events if e["kind"] == "sent" and begin < e["time"] <= end)


def _mfu(report: Report, operations: float, seconds: float, busy: float, device: str) -> None:
    """`operations`: 6 for every parameter and token, of which a group's prompt counts once."""
    peak, reason = None, "there is no GPU"
    if device == "cuda":
        import torch

        name = torch.cuda.get_device_name(0)
        peak, reason = peak_tflops(name), f"the peak rate of {name} is not in the table"
    report.figure("run.train_tflops_per_busy_s", operations / busy * 1e-12 if busy > 0 else None, "no busy time")
    report.figure("run.train_mfu", operations / seconds / peak * 1e-12 if peak else None, reason)
    report.figure("run.train_mfu_while_busy", operations / busy / peak * 1e-12 if peak and busy > 0 else None, reason)


def _memory(report: Report, folder: Path, watch: MemoryWatch) -> None:
    report.figure("run.memory_of_gpu_mib", watch.peak_mib, "nvidia-smi says nothing here")
    for rank, role in enumerate(("consumer", "producer")):
        found = json.loads((folder / f"memory-{rank}.json").read_text()) or {}
        for kind in ("allocated", "reserved"):
            value = found[kind] / 2**20 if found else None
            report.figure(f"run.memory_{kind}_{role}_mib", value, "the rank had no GPU")


def left_behind(before: set[str]) -> list[str]:
    """Files that torch has made in /dev/shm since, of processes that have ended."""
    new = sorted(_shared_files() - before)
    return [name for name in new if not Path("/proc", name.split("_")[1]).exists()]


def _shared_files() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob("torch_[0-9]*")}


def main() -> int:
    options = part_options(__doc__).parse_args()
    report, size, folder = Report(), SIZES[options.size], options.folder.resolve()
    os.environ["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    num_parameters = sum(parameter.numel() for parameter in make(folder, size).parameters())
    before, started = _shared_files(), time.monotonic()
    try:
        # Not asked of a GPU that is not used.
        with MemoryWatch() if options.device == "cuda" else NoWatch() as watch:
            run(folder, size)
    except ZbgrpoError as error:
        report.check("run.ends", False, reason=str(error))
        report.write(options.report)
        return 0
    report.check("run.ends", True, seconds=round(time.monotonic() - started, 1))
    left = left_behind(before)
    report.check("run.leaves_nothing", not left, left=left)
    logs = folder / "logs" / _PROJECT
    check_run(report, logs, size)
    measure_run(report, logs, size, num_parameters, options.device)
    _memory(report, folder, watch)
    report.write(options.report)
    return 0


class NoWatch(MemoryWatch):
    """Looks nothing up."""

    def _run(self) -> None:
        return


if __name__ == "__main__":
    sys.exit(main())
