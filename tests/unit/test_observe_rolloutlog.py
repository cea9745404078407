"""Rollout samples: written whole, readable by people and programs."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from zbgrpo.errors import RunFolderError
from zbgrpo.observe.rolloutlog import RolloutGroup, RolloutLog, read_rollouts, render_rollouts, rollout_group
from zbgrpo.types import GroupPayload, Uid


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def group() -> RolloutGroup:
    payload = GroupPayload(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.arange(5, dtype=np.int32),
        logprobs=np.zeros(5, np.float32),
        lengths=np.array([3, 2], np.int32),
        rewards=np.array([10, 0], np.float32),
        format_acc=np.array([1, 0], np.float32),
        ans_acc=np.array([1, 0], np.float32),
        finish=np.array([0, 2], np.int32),
        spans=np.array([[0, 0, 4], [0, 2, 5], [1, 0, 5]], np.int32),
    )
    return rollout_group(Uid(0, 17), "What is [1+1]?", ["two\x1b[31m!", "dunno 数"], payload, [1.0, -1.0])


def test_fields_of_a_line(tmp_path: Path, group: RolloutGroup) -> None:
    path = RolloutLog(tmp_path / "rollouts").write(20, [group, group])
    assert path == tmp_path / "rollouts" / "step-20.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == second
    assert (first["uid"], first["prompt"]) == ([0, 17], "What is [1+1]?")
    assert first["responses"][0] == {
        "text": "two\x1b[31m!",
        "reward": 10.0,
        "format_acc": 1.0,
        "ans_acc": 1.0,
        "advantage": 1.0,
        "finish": "end_token",
        "versions": [[0, 4], [2, 5]],
        "num_tokens": 3,
    }
    assert first["responses"][1]["finish"] == "length"
    assert list(read_rollouts(path)) == [group, group]


def test_tokens_on_request(tmp_path: Path) -> None:
    payload = GroupPayload(
        prompt_ids=np.array([7, 8, 9], np.int32),
        response_ids=np.arange(5, dtype=np.int32),
        logprobs=-np.arange(5, dtype=np.float32),
        lengths=np.array([3, 2], np.int32),
        rewards=np.zeros(2, np.float32),
        format_acc=np.zeros(2, np.float32),
        ans_acc=np.zeros(2, np.float32),
        finish=np.zeros(2, np.int32),
        spans=np.array([[0, 0, 4], [1, 0, 5]], np.int32),
    )
    path = RolloutLog(tmp_path).write(1, [rollout_group(Uid(0, 1), "p", ["a", "b"], payload, with_tokens=True)])
    (group,) = read_rollouts(path)
    assert group.prompt_ids == [7, 8, 9]
    assert [r.token_ids for r in group.responses] == [[0, 1, 2], [3, 4]]
    assert [r.logprobs for r in group.responses] == [[0.0, -1.0, -2.0], [-3.0, -4.0]]


def test_writing_a_step_again_replaces_it(tmp_path: Path, group: RolloutGroup) -> None:
    log = RolloutLog(tmp_path)
    log.write(1, [group, group])
    path = log.write(1, [group])
    assert len(list(read_rollouts(path))) == 1


def test_plain_rendering_has_everything_and_no_escapes(tmp_path: Path, group: RolloutGroup) -> None:
    path = RolloutLog(tmp_path).write(1, [group])
    out = io.StringIO()
    render_rollouts(path, out)
    text = out.getvalue()
    assert "\x1b" not in text
    for part in (
        "group 0:17",
        "What is [1+1]?",
        "two\\x1b[31m!",
        "dunno 数",
        "reward 10",
        "advantage -1.00",
        "2 tokens",
    ):
        assert part in text
    assert "version 4 5 from 2" in text
    assert "accuracy 50 %" in text


def test_terminal_rendering_keeps_the_model_from_the_terminal(tmp_path: Path, group: RolloutGroup) -> None:
    path = RolloutLog(tmp_path).write(1, [group])
    out = Terminal()
    render_rollouts(path, out)
    assert "\x1b[31m!" not in out.getvalue()
    assert "[1+1]" in out.getvalue()


def test_a_file_of_something_else_is_an_error_with_its_place(tmp_path: Path, group: RolloutGroup) -> None:
    path = RolloutLog(tmp_path).write(1, [group])
    with open(path, "a") as file:
        file.write('{"prompt": 3}\n')
    with pytest.raises(RunFolderError, match=r"step-1\.jsonl:2"):
        render_rollouts(path, io.StringIO())
