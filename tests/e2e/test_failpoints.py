"""Every named place at which a process can be made to fail is reached by a run; damage to gradients costs one step."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, metrics
from zbgrpo import failpoints


def test_every_place_is_reached_by_a_run(workplace: Path) -> None:
    """With evaluation and saving on the way. `note` is an action like any other, so each place is fired here."""
    notes = workplace / "places.txt"
    rules = ";".join(f"{name}=note:{notes}" for name in failpoints.PLACES)
    flags = ["-t", "2", "-i", "1", "-p", "places", "--max-steps", "4", "-si", "2", "-ei", "2"]
    run = Run(workplace, 3, [*flags, "-ed", '{"heldout": "heldout.jsonl"}'], failpoints=rules)
    finished = run.wait()
    assert finished.status == 0, finished.output[-3000:]
    fired = {tuple(line.split()) for line in notes.read_text().splitlines()}
    assert {name for name, _ in fired} == failpoints.PLACES.keys()
    for name, description in failpoints.PLACES.items():
        expected = {
            "every rank": {"consumer", "producer"},
            "consumer": {"consumer"},
            "source consumer": {"consumer"},
            "producer": {"producer"},
            "hub": {"hub"},
            "hub and relays": {"hub"},
            "reward worker": {"reward"},
        }[description.partition(":")[0]]
        kinds = {process.partition(":")[0] for place, process in fired if place == name}
        assert kinds <= expected, (name, kinds)


def test_a_gradient_that_is_not_finite_costs_one_step_and_is_counted(workplace: Path) -> None:
    flags = "-t 2 -i 1 -p nan-gradient --max-steps 5"
    finished = Run(workplace, 3, flags, failpoints="step.gradients#3@consumer:1=corrupt").wait()
    assert finished.status == 0, finished.output[-3000:]
    rows = metrics(workplace, "nan-gradient")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["train/grad_norm"] is None for row in rows] == [False, False, True, False, False]
