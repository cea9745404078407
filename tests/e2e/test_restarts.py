"""torchrun starts a run again that has failed (--max-restarts), and it goes on from its newest complete state."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, own_rendezvous
from zbgrpo.engine.check_ledger import check_logs


def test_after_a_fault_the_launcher_starts_all_ranks_again_and_they_go_on(workplace: Path) -> None:
    marker = workplace / "has-failed"
    run = Run(
        workplace, 3, "-t 2 -i 1 -p restarted --max-steps 8 -si 2",
        rendezvous=[*own_rendezvous(), "--max-restarts", "1"],
        failpoints=f"step.commit#6@consumer:1=kill!{marker}",
    )  # fmt: skip
    finished = run.wait()
    assert finished.status == 0, finished.output[-3000:]
    assert marker.exists() and "rank 1 (consumer 1)" in finished.output
    assert "zbgrpo: going on from" in finished.output and "state-4" in finished.output
    report = check_logs(workplace / "logs" / "restarted")
    assert report.ok and report.state == "end" and report.version == 8 and report.num_starts == 2
    assert report.totals["consumed"] == 8 * 8
