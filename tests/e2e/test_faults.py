"""A few cells of the fault matrix (`tests/support/faults.py`), and a rank that hangs while its process lives on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import Cell, run_cell
from tests.support.launching import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "cell",
    [
        Cell("producer", "generate", "SIGKILL"),
        Cell("consumer 1", "step", "SIGSTOP"),
        Cell("hub", "ring", "SIGKILL"),
        Cell("reward worker", "generate", "SIGSTOP"),
    ],
    ids=lambda cell: cell.name,
)
def test_a_single_fault_ends_the_run_by_name_or_not_at_all(cell: Cell, workplace: Path) -> None:
    outcome = run_cell(cell, workplace)
    assert not outcome.problems, outcome


def test_a_rank_that_hangs_is_named_with_what_it_was_at(workplace: Path) -> None:
    """Its heartbeats go on, and the other consumer waits for it in a collective: neither is what is said."""
    hangs = Run(
        workplace, 3, "-t 2 -i 1 -p hangs --max-steps 8 cluster.progress_timeout_seconds=4 "
        "cluster.exit_timeout_seconds=2 cluster.timeout_seconds=600",
        failpoints="step.minibatch#3@consumer:1=delay:600",
    )  # fmt: skip
    finished = hangs.wait(120)
    assert finished.status != 0
    lines = [line for line in finished.output.splitlines() if "zbgrpo: rank" in line and "failed" in line]
    assert lines and all("rank 1 (consumer 1) has not gone on for" in line for line in lines), finished.output[-3000:]
    assert any("(in busy)" in line for line in lines)
    own = [line for line in lines if "zbgrpo: rank 1 (consumer 1) failed" in line]
    assert len(own) == 1 and "this rank was stuck (busy) and is ended" in own[0], lines
