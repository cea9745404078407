"""Runs of different layouts finish, train what they say, and leave logs in which all invariants of the ledger hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launching import Run, events, metrics, run, summary, two_nodes
from zbgrpo.engine.check_ledger import check_logs

LAYOUTS = {
    "two-and-two": (4, "-t 2 -i 2 --max-steps 4", 8),
    "one-and-two-odd-group": (3, "-t 1 -i 2 -g 3 --max-steps 4", 4),
    "several-minibatches": (3, "-t 2 -i 1 -tbs 6 -tMbs 2 -tmbs 3 --max-steps 3", 12),
    "synchronous": (4, "-t 3 -i 1 --max-staleness 0 --max-steps 3", 12),
    "staleness-1": (4, "-t 3 -i 1 --max-staleness 1 --max-steps 3", 12),
    "staleness-4": (4, "-t 3 -i 1 --max-staleness 4 --max-steps 4", 12),
    "strict": (4, "-t 3 -i 1 --stale wait --max-steps 4", 12),
    "evaluation": (
        4,
        ["-t", "2", "-i", "2", "--max-steps", "4", "-ei", "2", "-ed", '{"heldout": "heldout.jsonl"}', "-si", "2"],
        8,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_finishes_with_a_clean_ledger(workplace: Path, name: str) -> None:
    num_ranks, flags, groups_per_step = LAYOUTS[name]
    project = ["-p", name]
    finished = run(workplace, num_ranks, (flags.split() if isinstance(flags, str) else flags) + project)
    assert finished.status == 0, finished.output[-3000:]
    lines = metrics(workplace, name)
    steps = len(lines)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["train/grad_norm"] > 0 for line in lines)
    totals = summary(workplace, name)["ledger"]
    assert totals["consumed"] == steps * groups_per_step and totals["live"] == 0
    assert lines[-1]["weights/version_applied_min"] >= steps - 5
    report = check_logs(workplace / "logs" / name)
    assert report.ok, str(report)
    _nothing_left(workplace, name)


def test_two_nodes_with_a_relay_and_curve(workplace: Path) -> None:
    """Two launchers on this machine stand for two nodes: consumers on both, so that the second has a relay."""
    flags = "-t 3 -i 1 --max-steps 3 -p nodes"
    nodes = [Run(workplace, 2, flags, rendezvous=rendezvous) for rendezvous in two_nodes()]
    finished = [node.wait() for node in nodes]
    assert [each.status for each in finished] == [0, 0], finished[0].output[-2000:] + finished[1].output[-2000:]
    assert check_logs(workplace / "logs" / "nodes").ok
    greetings = [line for line in events(workplace, "nodes", "hub") if line["kind"] == "hello"]
    assert "relay:1" in {line["peer"] for line in greetings}
    assert not (workplace / "logs" / "nodes" / ".hub-address.json").exists(), "the keys were left behind"


def test_log_prob_gap_is_rounding_only(workplace: Path) -> None:
    """Depends on the run above: the trainer's log-probs at the sampling version equal the producers'."""
    if not (workplace / "logs" / "synchronous").exists():
        run(workplace, 4, "-t 3 -i 1 --max-staleness 0 --max-steps 3 -p synchronous")
    assert all(line["rollout/logprob_gap"] < 1e-5 for line in metrics(workplace, "synchronous"))


def test_evaluation_rows_are_the_set_once_each_of_one_version(workplace: Path) -> None:
    if not (workplace / "logs" / "evaluation").exists():
        run(workplace, LAYOUTS["evaluation"][0], [*LAYOUTS["evaluation"][1], "-p", "evaluation"])
    for step in (0, 2, 4):
        path = workplace / "eval" / "evaluation" / "heldout" / f"step-{step}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["row"] for row in rows] == list(range(10))
        assert {row["version"] for row in rows} == {step}
    lines = (workplace / "logs" / "evaluation" / "eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 4]


def test_evaluations_longer_than_steps_keep_their_versions(workplace: Path) -> None:
    """A version is due at every step, and its evaluation outlasts the step: none is mixed, none is left out."""
    flags = ["-t", "1", "-i", "2", "--max-steps", "4", "-ei", "1", "-p", "outlasting", "-ed", '{"long": "train.jsonl"}']
    finished = run(workplace, 3, flags)
    assert finished.status == 0, finished.output[-3000:]
    for step in range(5):
        path = workplace / "eval" / "outlasting" / "long" / f"step-{step}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["row"] for row in rows] == list(range(200)) and {row["version"] for row in rows} == {step}
    assert check_logs(workplace / "logs" / "outlasting").ok


def test_model_folder_loads_and_has_moved(workplace: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    if not (workplace / "model_out" / "two-and-two").exists():
        run(workplace, 4, "-t 2 -i 2 --max-steps 4 -p two-and-two")
    before = AutoModelForCausalLM.from_pretrained(workplace / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(workplace / "model_out" / "two-and-two" / "step-4").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def _nothing_left(workplace: Path, project: str) -> None:
    ring = next(line["ring"] for line in events(workplace, project, "hub") if line["kind"] == "started")
    assert ring.startswith("/dev/shm/") and not Path(ring).exists()
