"""A long run under a rain of faults: `python -m tests.support.soak recoverable|fatal [--minutes 30] [...]`.

recoverable   every minute a reward worker is killed or stopped; the run goes on. What its processes hold (memory,
              descriptors, threads, processes, shared memory) is noted all the time, and must not grow.
fatal         every three minutes a rank or the hub is killed; torchrun starts all ranks again, and they go on from the
              newest complete state.

In the end the run is asked to stop, saves, and leaves; over its joined logs the ledger is clean. Prints a line per
minute and one JSON object last; the exit status is 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.support.faults import EVALUATION, Launch
from tests.support.launching import make_workplace
from zbgrpo.engine.check_ledger import check_logs

EVERY_SECONDS = {"recoverable": 60.0, "fatal": 180.0}
SAMPLE_SECONDS = 5.0
STOP_SECONDS = 120.0
MAX_GROWTH = 0.05
"""Of memory, from the second quarter of the time to the last one; of everything else nothing."""
MAX_MEMORY_BYTES = 64 << 20
"""What may come on top of that: arenas of the C library, caches of torch."""
_MANY = 10_000_000


class Sample(NamedTuple):
    """What all processes of a run hold at a moment, together."""

    memory_bytes: int
    descriptors: int
    threads: int
    processes: int
    shared_bytes: int


def sample(launch: Launch) -> Sample:
    """Of a running launch. Memory is the resident one that is not shared."""
    totals = [0, 0, 0, 0]
    for pid in launch.processes():
        folder = Path(f"/proc/{pid}")
        try:
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            one = (
                1024 * int(fields["RssAnon"].split()[0]),
                len(os.listdir(folder / "fd")),
                int(fields["Threads"]),
                1,
            )
        except (OSError, KeyError):
            continue  # it has just ended
        totals = [total + value for total, value in zip(totals, one, strict=True)]
    status = os.statvfs("/dev/shm")
    return Sample(*totals, (status.f_blocks - status.f_bfree) * status.f_frsize)


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Medians of the second and of the last quarter, by what was sampled."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {name: (median(s[n] for s in early), median(s[n] for s in late)) for n, name in enumerate(Sample._fields)}


def problems_of(grown: dict[str, tuple[float, float]]) -> list[str]:
    """What has grown."""
    found = []
    for name, (early, late) in grown.items():
        limit = early * (1 + MAX_GROWTH) + MAX_MEMORY_BYTES if name == "memory_bytes" else early
        if late > limit:
            found.append(f"{name} grew from {early:.0f} to {late:.0f}")
    return found


class Soak:
    """One of the two kinds, in a workplace."""

    def __init__(self, kind: str, workplace: Path, seconds: float, every_seconds: float) -> None:
        self.kind, self.workplace, self.seconds, self.every_seconds = kind, workplace, seconds, every_seconds
        self.project = f"soak-{kind}"
        self.problems: list[str] = []
        self.samples: list[Sample] = []
        self.faults: dict[str, int] = {}
        self._rng = random.Random(1)

    def run(self) -> dict[str, Any]:
        """To the end; the report."""
        restarts = ["--max-restarts", str(_MANY)] if self.kind == "fatal" else []
        flags = [*EVALUATION, "-ei", "100", "-si", "50", "-e", "1000000", "observe.progress=none"]
        launch = Launch(self.workplace, self.project, _MANY, flags, launcher=restarts)
        try:
            self._let_it_rain(launch)
            self._stop(launch)
        finally:
            launch.end()
        report = check_logs(self.workplace / "logs" / self.project)
        if not report.ok:
            self.problems.append(f"ledger: {[str(i) for i in report.invariants if i.num_violations]}")
        grown = growth(self.samples) if self.kind == "recoverable" and len(self.samples) > 8 else {}
        self.problems += problems_of(grown)
        return {
            "kind": self.kind,
            "minutes": round(self.seconds / 60, 1),
            "faults": self.faults,
            "steps": report.version,
            "starts": report.num_starts,
            "consumed": report.totals["consumed"],
            "grown": grown,
            "problems": self.problems,
        }

    def _let_it_rain(self, launch: Launch) -> None:
        begun = time.monotonic()
        next_fault, next_line = begun + self.every_seconds, begun + 60.0
        while (now := time.monotonic()) < begun + self.seconds:
            if launch.agent.poll() is not None:
                self.problems.append(f"the run ended with status {launch.agent.poll()}:\n{launch.screen()[-3000:]}")
                return
            self.samples.append(sample(launch))
            if now >= next_fault:
                next_fault += self.every_seconds
                self._fault(launch)
            if now >= next_line:
                next_line += 60.0
                print(f"{(now - begun) / 60:.0f} min: step {self._step()}, {self.samples[-1]}", flush=True)
            time.sleep(SAMPLE_SECONDS)

    def _fault(self, launch: Launch) -> None:
        if self.kind == "recoverable":
            role, number = "reward worker", self._rng.choice([signal.SIGKILL, signal.SIGSTOP])
        else:
            role, number = self._rng.choice(["producer", "consumer 0", "consumer 1", "hub"]), signal.SIGKILL
        victims = launch.victims(role)
        if not victims:
            self.problems.append(f"there was no {role} to fail")
            return
        os.kill(victims[0], number)
        name = f"{role} {number.name}"
        self.faults[name] = self.faults.get(name, 0) + 1

    def _step(self) -> int:
        path = self.workplace / "logs" / self.project / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def _stop(self, launch: Launch) -> None:
        if launch.agent.poll() is not None:
            return
        deadline = time.monotonic() + STOP_SECONDS
        step = self._step()
        while self._step() == step and time.monotonic() < deadline:  # the ranks may just be starting after a fault
            time.sleep(0.2)
        launch.agent.send_signal(signal.SIGTERM)  # not to a rank: a stop of its own would be answered by a restart
        while launch.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        if "stopped and saved" not in launch.screen():
            self.problems.append(f"it did not stop and save:\n{launch.screen()[-3000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one kind."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=("recoverable", "fatal"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, help="seconds between two faults; default: 60 or 180")
    parser.add_argument("--folder", type=Path, help="where to run; default: a temporary one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="zs-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = Soak(
            options.kind,
            make_workplace(folder),
            60 * options.minutes,
            options.every or EVERY_SECONDS[options.kind],
        ).run()
    print(json.dumps(report), flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
