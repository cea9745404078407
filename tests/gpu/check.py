"""A check of everything that needs a GPU, on a machine with one: `tests/gpu/check.sh` finds a Python and starts it.

    run         a real run of two ranks that share the GPU, weights by CUDA IPC: ledger, digests, rates, memory
    transfer    weights between two processes by CUDA IPC and by gloo: values, bytes per second
    numerics    log-probs, entropy, loss and gradients against float64 on the CPU
    attention   the ways in which attention of packed rows is computed, against float64 on the CPU

Each part is a process of its own, so that one that dies takes nothing along. The last line on standard output is one
JSON object: `ok`, `machine`, `checks`, `figures`, `reasons` (why a figure is null). The exit status is 0 only if all
checks hold. What the parts print goes to standard error. With `--device cpu` everything runs, small, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from machine import describe  # noqa: E402
from report import REPOSITORY, Report  # noqa: E402

from zbgrpo.bench.common import run_program  # noqa: E402
from zbgrpo.errors import ZbgrpoError  # noqa: E402

_PARTS = {"transfer": 120.0, "run": 200.0, "numerics": 100.0, "attention": 150.0}
"""Longest time of each, in seconds."""
_LIMIT_SECONDS = 420.0
_TAIL_LINES = 25


def check_part(name: str, options: argparse.Namespace, folder: Path, seconds: float) -> Report:
    """Run one part; its failure is a check that does not hold."""
    place, where, log = folder / name, folder / f"{name}.json", folder / f"{name}.log"
    place.mkdir()
    command = [
        sys.executable, HERE / f"part_{name}.py", "--device", options.device, "--size", options.size,
        "--folder", place, "--report", where,
    ]  # fmt: skip
    started = time.monotonic()
    report, reason = Report(), None
    with log.open("w") as output:
        try:
            # Standard output is this program's own: it ends with the JSON line.
            run_program(command, seconds, what=f"part {name}", stdout=output, stderr=output)
        except ZbgrpoError as error:
            reason = str(error)
    took = round(time.monotonic() - started, 1)
    if where.exists():
        report = Report.read(where)
        report.check(f"{name}.part", reason is None, seconds=took)
    else:
        report.check(f"{name}.part", False, seconds=took, reason=reason, end=_tail(log, 6))
        report.missing(name, f"the part failed: {reason}")
    if not report.ok:
        print(f"----- {name}: the end of what it printed", *_tail(log, _TAIL_LINES), sep="\n", file=sys.stderr)
    return report


def _tail(log: Path, num_lines: int) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-num_lines:]


def prepare_environment(device: str) -> None:
    """Of this process and all parts."""
    os.environ["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # One GPU, which all ranks share.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = first if device == "cuda" else ""


def why_no_gpu() -> Optional[str]:
    """None if torch can use a GPU here."""
    import torch

    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    parser.add_argument("--size", choices=["tiny", "135m"], help="of the model (default: 135m, on a CPU tiny)")
    parser.add_argument("--parts", default=",".join(_PARTS), help="(default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=_LIMIT_SECONDS, help="for all parts (%(default)s)")
    options = parser.parse_args()
    options.size = options.size or ("135m" if options.device == "cuda" else "tiny")
    unknown = set(options.parts.split(",")) - set(_PARTS)
    if unknown:
        parser.error(f"--parts: unknown: {', '.join(sorted(unknown))}")
    started = time.monotonic()
    prepare_environment(options.device)
    report = Report()
    if options.device == "cuda" and (reason := why_no_gpu()) is not None:
        report.check("gpu", False, reason=reason)
        machine = describe("cpu")
    else:
        with tempfile.TemporaryDirectory(prefix="zbgrpo-gpu-") as folder:
            for name in options.parts.split(","):
                left = options.limit_seconds - (time.monotonic() - started)
                print(f"check: {name} ...", file=sys.stderr, flush=True)
                report.add(check_part(name, options, Path(folder), max(5.0, min(_PARTS[name], left))))
        machine = describe(options.device)  # now, since it takes some memory of the GPU
    for name, found in report.checks.items():
        if not found["ok"]:
            print(f"check: {name} does not hold: {found}", file=sys.stderr)
    result = {
        "ok": report.ok, "device": options.device, "size": options.size, "machine": machine,
        "seconds": round(time.monotonic() - started, 1),
        "checks": report.checks, "figures": report.figures, "reasons": report.reasons,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
