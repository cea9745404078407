"""The clock of the machine jumps by an hour, forth and back, while a run goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.launching import Run, metrics, summary
from zbgrpo.engine.check_ledger import check_logs

JUMPS = (3600.0, -3600.0)

# In every process, before anything else is imported: the wall clock of Python is off by what the file says.
SITE = """
import os, time

_true, _path = time.time, {path!r}


def _jumping():
    with open(_path) as file:
        return _true() + float(file.read() or 0)


time.time = _jumping
time.time_ns = lambda: int(1e9 * _jumping())
"""


def test_a_clock_that_jumps_ends_nothing_and_makes_no_figure_wrong(workplace: Path, tmp_path: Path) -> None:
    """Peers are not taken for silent, nothing waits for an hour, and seconds are those that have passed."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(SITE.format(path=str(offset)))
    flags = "-t 2 -i 1 -p jumping --max-steps 60 -si 20 -e 40 transport.peer_timeout_seconds=10"
    begun = time.monotonic()
    run = Run(workplace, 3, flags, first_on_path=tmp_path)
    for number, jump in enumerate(JUMPS, 1):
        while len(metrics(workplace, "jumping")) < 10 * number and run.process.poll() is None:
            time.sleep(0.05)
        (tmp_path / "new").write_text(str(jump))
        os.replace(tmp_path / "new", offset)
    finished = run.wait()
    assert finished.status == 0, finished.output[-3000:]
    passed = time.monotonic() - begun
    assert summary(workplace, "jumping")["seconds"] < passed
    walls = [row["wall_s"] for row in metrics(workplace, "jumping")]
    assert len(walls) == 60 and walls == sorted(walls) and walls[-1] < passed
    report = check_logs(workplace / "logs" / "jumping")
    assert report.ok and report.state == "end" and report.version == 60
