"""The console script: what it prints, its exit statuses, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zbgrpo import cli
from zbgrpo.config.load import dump_yaml, load_yaml
from zbgrpo.errors import PeerLostError
from zbgrpo.observe.rolloutlog import RolloutLog, rollout_group
from zbgrpo.types import GroupPayload, Uid

HEAVY = ("torch", "transformers", "zmq", "math_verify", "sympy", "rich")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def rollout_file(folder: Path, num_groups: int = 1) -> Path:
    payload = GroupPayload(
        np.array([1, 2], np.int32),
        np.array([3, 4, 5], np.int32),
        np.zeros(3, np.float32),
        np.array([3], np.int32),
        np.array([10.0], np.float32),
        np.array([1.0], np.float32),
        np.array([1.0], np.float32),
        np.array([0], np.int32),
        np.array([[0, 0, 7]], np.int32),
    )
    groups = [rollout_group(Uid(0, n), "What is 2 + 2?", [r"\boxed{4}"], payload, [0.5]) for n in range(num_groups)]
    return RolloutLog(folder).write(3, groups)


def log_folder(folder: Path, *hub: dict[str, object]) -> Path:
    """The logs of a run that was killed soon after its start."""
    (folder / "events").mkdir()
    (folder / "config.yaml").write_text(dump_yaml(load_yaml("cluster: {num_trainers: 1, num_inferencer: 1}")))
    (folder / "events" / "hub.jsonl").write_text("".join(json.dumps(line) + "\n" for line in hub))
    return folder


STARTED = {"kind": "started", "run": "0a1b", "version": 0}
COMMIT = {"kind": "commit", "version": 7, "skipped": False}


# ------------------------------------------------------------------------------------------ help


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("score", "rollouts", "check-ledger", "zbgrpo.launch"))


@pytest.mark.parametrize("verb", ["score", "rollouts", "check-ledger"])
def test_help_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: zbgrpo {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["score", "--help"], ["check-ledger", "missing"]])
def test_help_and_checks_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom zbgrpo.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VERB"),
        (["fly"], "invalid choice: 'fly'"),
        (["score", "x.jsonl"], "--reward-type"),
        (["score", "x.jsonl", "--reward-type", "boxed", "--workers", "0"], "at least 1, not '0'"),
        (["score", "x.jsonl", "--reward-type", "boxed", "--workers", "two"], "at least 1, not 'two'"),
        (["score", "x.jsonl", "--reward-type", "boxed", "--time-limit", "nan"], "above 0, not 'nan'"),
        (["score", "x.jsonl", "--reward-type", "boxed", "--time-limit", "-1"], "above 0, not '-1'"),
    ],
)
def test_wrong_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ verbs


def test_module_scores_a_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"response": r"\boxed{4}", "gt_answer": "4"},
        {"response": r"\boxed{5}", "gt_answer": "4"},
        {"response": "4", "gt_answer": "4"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = python("-m", "zbgrpo", "score", str(path), "--reward-type", "boxed", "--workers", "1", "--time-limit", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"reward": 10.0, "format_acc": 1.0, "ans_acc": 1.0},
        {"reward": 0.0, "format_acc": 1.0, "ans_acc": 0.0},
        {"reward": 0.0, "format_acc": 0.0, "ans_acc": 0.0},
    ]


def test_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollouts", str(rollout_file(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "group 0:0" in out and "What is 2 + 2?" in out and r"\boxed{4}" in out and "version 7" in out


def test_check_ledger_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = log_folder(tmp_path, STARTED)
    assert cli.main(["check-ledger", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: did not finish, or is still running, step 0, 1 start"
    assert lines[1].startswith("0 leased = 0 consumed + 0 filtered")
    assert all(line.startswith("ok ") for line in lines[2:])
    assert [line.split()[1] for line in lines[2:4]] == ["once", "accounting"]


def test_check_ledger_with_a_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = [{**COMMIT, "version": version} for version in range(9, 90, 2)]
    folder = log_folder(tmp_path, STARTED, COMMIT, *later)
    assert cli.main(["check-ledger", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("violated"))
    assert lines[place].split()[1] == "steps"
    assert lines[place + 1].strip() == "- hub, line 2: version 7 follows 0"
    assert [line for line in lines if "more" in line] == ["          - and 79 more"]


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check-ledger", "nowhere"], "nowhere/config.yaml: no such file"),
        (["rollouts", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["rollouts", "bad.jsonl"], "bad.jsonl:1: not a rollout"),
        (["score", "nowhere.jsonl", "--reward-type", "boxed"], "nowhere.jsonl: No such file or directory"),
        (["score", "bad.jsonl", "--reward-type", "boxed"], "bad.jsonl:1: not a JSON object"),
        (["score", "bad.jsonl", "--reward-type", "bxed"], "bxed"),
    ],
)
def test_user_error_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{\n")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zbgrpo: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [(PeerLostError("gone"), 1, "zbgrpo: PeerLostError: gone\n"), (KeyboardInterrupt(), 130, "")],
)
def test_other_endings(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    shown: str,
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("zbgrpo.observe.rolloutlog.render_rollouts", fail)
    assert cli.main(["rollouts", "x"]) == status
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("num_groups", [1, 3000])
def test_reader_that_has_seen_enough(tmp_path: Path, num_groups: int) -> None:
    path = rollout_file(tmp_path, num_groups)
    command = [sys.executable, "-m", "zbgrpo", "rollouts", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141
