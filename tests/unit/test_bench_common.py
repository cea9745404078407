"""What the benchmarks share: ratios, programs that leave nothing behind, pinned ranks, and the verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import wait_until_ended
from zbgrpo import cli
from zbgrpo.bench import common
from zbgrpo.errors import ConfigError, ResourceError, ZbgrpoError


def test_a_ratio_is_the_median_of_its_pairs_with_the_spread() -> None:
    assert common.pairs_summary([2.0, 1.0, 4.0]) == {"ratio": 2.0, "ratio_min": 1.0, "ratio_max": 4.0}
    assert common.pairs_summary([1 / 3, 1.0], "x") == {"x": 0.6667, "x_min": 0.3333, "x_max": 1.0}
    with pytest.raises(ValueError, match="no pairs"):
        common.pairs_summary([])


@pytest.mark.parametrize(("value", "shown"), [(123456.0, 123500.0), (0.00123456, 0.001235), (0.0, 0.0)])
def test_four_digits_are_shown(value: float, shown: float) -> None:
    assert common.rounded(value) == shown


@pytest.mark.parametrize(
    ("error", "status"), [(None, 0), (ConfigError("wrong flag"), 2), (ResourceError("no memory"), 1)]
)
def test_a_result_is_the_last_line_and_an_error_is_one_line(
    error: ZbgrpoError | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> dict[str, float]:
        print("something before it")
        if error is not None:
            raise error
        return {"ratio": 2.0}

    assert common.finish(measure) == status
    said = capsys.readouterr()
    if error is None:
        assert json.loads(said.out.splitlines()[-1]) == {"ratio": 2.0}
    else:
        assert said.err == f"zbgrpo: {error}\n"


def test_a_program_that_fails_is_an_error() -> None:
    common.run_program([sys.executable, "-c", ""], 60.0)
    with pytest.raises(ZbgrpoError, match="the thing ended with status 3"):
        common.run_program([sys.executable, "-c", "raise SystemExit(3)"], 60.0, what="the thing")


def test_a_program_sees_what_is_changed_for_it() -> None:
    code = "import os, sys; sys.exit(os.environ['BENCH_TEST'] != 'yes')"
    common.run_program([sys.executable, "-c", code], 60.0, environment={"BENCH_TEST": "yes"})
    assert "BENCH_TEST" not in os.environ


def test_a_program_that_takes_too_long_is_ended_with_all_beneath_it(tmp_path: Path) -> None:
    """It ends at once when asked to, and leaves a child that takes no notice."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(600)"
    )
    parent = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = int((tmp_path / "pid").read_text())
        common.stop_program(process, {process.pid, pid}, patience_seconds=30.0)
    assert process.returncode == -15
    assert wait_until_ended([pid], deadline - time.monotonic()) == []


def test_time_out_is_an_error() -> None:
    with pytest.raises(ZbgrpoError, match="did not end within 0 s"):
        common.run_program([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)


def test_ranks_of_a_pinned_run_are_on_their_cores(tmp_path: Path) -> None:
    """Two ranks on one core, each a module with arguments of its own."""
    (tmp_path / "told.py").write_text(
        "import json, os, pathlib, sys\n"
        "what = [sorted(os.sched_getaffinity(0)), sys.argv[2:], os.environ['CUDA_VISIBLE_DEVICES']]\n"
        "(pathlib.Path(sys.argv[1]) / os.environ['RANK']).write_text(json.dumps(what))\n"
    )
    core = min(os.sched_getaffinity(0))
    command = common.pinned_torchrun([core, core], "told", [str(tmp_path), "--flag", "a b"])
    root = Path(common.__file__).resolve().parents[2]
    common.run_program(command, 120.0, environment={"PYTHONPATH": f"{tmp_path}:{root}"}, stderr=subprocess.DEVNULL)
    for rank in ("0", "1"):
        assert json.loads((tmp_path / rank).read_text()) == [[core], ["--flag", "a b"], ""]
    with pytest.raises(ConfigError, match="at least one rank"):
        common.pinned_torchrun([], "told", [])


def test_a_baseline_is_made_once_and_half_of_one_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def prepare(command: list[str], name: str) -> None:
        commands.append(command)
        if "venv" in command:
            (Path(command[-1]) / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)
        elif len(commands) == 2:
            raise ResourceError("no network")

    monkeypatch.setattr(common, "_prepare", prepare)
    with pytest.raises(ResourceError):
        common.baseline_python("thing", ["thing==1"], tmp_path)
    python = common.baseline_python("thing", ["thing==1"], tmp_path)
    assert len(commands) == 4, "made again from the beginning"
    assert common.baseline_python("thing", ["thing==1"], tmp_path) == python
    assert len(commands) == 4
    assert commands[-1][-1] == "thing==1"
    (pinned,) = tmp_path.glob("thing-*/constraints.txt")
    assert pinned.read_text().startswith("torch==")
    assert common.baseline_python("thing", ["thing==2"], tmp_path) != python


# ------------------------------------------------------------------------------------------ the verb


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("transport", "overlap", "tails", "weights", "logprob", "train", "hub", "plan", "evaluation"):
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 4, "says what it measures"


@pytest.mark.parametrize(("name", "near"), [("wieghts", "weights"), ("logprobs", "logprob"), ("zzz", "transport")])
def test_an_unknown_benchmark_is_one_line_with_the_nearest(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and name in said and near in said


@pytest.mark.parametrize("name", ["transport", "weights", "logprob", "hub"])
def test_a_benchmark_gets_its_arguments(name: str) -> None:
    command = [sys.executable, "-m", "zbgrpo", "bench", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: zbgrpo bench {name}" in done.stdout
