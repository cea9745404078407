"""The main job: from a model that is sometimes right to one that nearly always is, and not without the reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launching import Run, events, summary
from zbgrpo.bench.quickstart import RUN_FLAGS, prepare
from zbgrpo.engine.check_ledger import check_logs

SHUFFLED = '''
"""Pays every response what the one before it has earned."""

from zbgrpo.rewards.messages import RewardSpec, ScoreRequest
from zbgrpo.rewards.score import build_scorer

scorer = build_scorer(RewardSpec("think_answer_tags"))
earned = [0.0]


def shuffled(response, gt_answer, **_):
    earned.append(scorer.score(ScoreRequest(response, gt_answer)).reward)
    return earned.pop(0)
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    prepare(folder, seed=0, quiet=True)
    (folder / "shuffled.py").write_text(SHUFFLED)
    return folder


def _train(task: Path, project: str, *flags: str) -> dict:
    paths = ["-m", "model", "-d", "train.jsonl", "-ed", json.dumps({"heldout": "heldout.jsonl"}), "-sd", "model_out"]
    finished = Run(task, 2, ["-t", "1", "-i", "1", "-p", project, *flags], [*RUN_FLAGS, *paths]).wait(240)
    assert finished.status == 0, finished.output[-3000:]
    return summary(task, project)


def _rows(path: Path) -> set[str]:
    return {json.loads(line)["messages"]["content"] for line in path.read_text().splitlines()}


def test_held_out_rows_are_enough_and_disjoint_from_training(task: Path) -> None:
    assert len(_rows(task / "heldout.jsonl")) >= 200
    assert not _rows(task / "heldout.jsonl") & _rows(task / "train.jsonl")


@pytest.mark.slow
def test_accuracy_goes_from_at_most_60_to_at_least_90_percent(task: Path) -> None:
    result = _train(task, "learns")
    assert result["accuracy_before"] <= 0.6 and result["accuracy_after"] >= 0.9, result
    assert check_logs(task / "logs" / "learns").ok
    published = {e["version"]: e["digest"] for e in events(task, "learns", "rank-0") if e["kind"] == "published"}
    live = {e["version"]: e["digest"] for e in events(task, "learns", "rank-1") if e["kind"] == "live_digest"}
    assert live and live == {version: published[version] for version in live}
    assert result["steps"] in live


@pytest.mark.slow
def test_without_a_learning_rate_nothing_moves(task: Path) -> None:
    result = _train(task, "still", "-lr", "0", "--max-steps", "30")
    assert abs(result["accuracy_after"] - result["accuracy_before"]) <= 0.05, result


@pytest.mark.slow
def test_shuffled_rewards_do_not_get_there(task: Path) -> None:
    result = _train(task, "shuffled", "-rt", "shuffled.py:shuffled", 'inference.stop=["</answer>"]')
    assert result["accuracy_after"] < 0.8, result


@pytest.mark.slow
def test_dapo_trains_only_effective_groups(task: Path) -> None:
    result = _train(task, "dapo", "-a", "DAPO", "--max-steps", "40")
    assert result["accuracy_after"] >= 0.9, result
    assert result["ledger"]["filtered"] > 0 and result["ledger"]["consumed"] == result["steps"] * 16
    assert check_logs(task / "logs" / "dapo").ok
