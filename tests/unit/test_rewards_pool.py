"""The pool of scoring processes: order, limits, deaths, leftovers. Every wait here is bounded and for an event."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import zbgrpo
from tests.support.processes import is_alive, wait_until_ended
from zbgrpo.errors import ConfigError, InfrastructureError
from zbgrpo.rewards import manager
from zbgrpo.rewards.messages import encode_frame, take_frame
from zbgrpo.rewards.pool import RewardPool
from zbgrpo.rewards.score import RewardSpec, ScoreOutcome, ScoreRequest, build_scorer

NEVER_FINISHES = r"\boxed{9^{9^{9^{9}}}}"
PATIENCE_SECONDS = 60.0

FUNCTIONS = """
import os, signal, subprocess, sys, time
from pathlib import Path

def echo(response): return float(response)
def pid(response): return os.getpid()
def big(response, row): return len(response) + row["number"] % 7
def die(response):
    if response == "die": os._exit(3)
    return 1.0
def die_once(response, row):
    marker = Path(row["marker"])
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return float(os.getpid() != int(marker.read_text()))
def leave(response): sys.exit(0)
def noisy(response):
    print("x" * 100_000)
    os.write(1, b"y" * 1000)
    return float(sys.stdin.read() == "")
def stop(response):
    if response == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0
def family(response, row):
    if response != "hang": return 1.0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(row["marker"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
def linger(response, row):
    Path(row["marker"]).write_text(f"{os.getpid()}\\n")
    time.sleep(600)
def raises(response): raise RuntimeError("no idea")
def not_finite(response): return float(response)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "pool_functions.py"
    path.write_text(FUNCTIONS)
    return lambda name: f"{path}:{name}"


def collect(pool: RewardPool, num_groups: int) -> dict[int, list[ScoreOutcome]]:
    """All groups, each of which must come once."""
    groups: dict[int, list[ScoreOutcome]] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(groups) < num_groups:
        assert time.monotonic() < deadline, f"only {len(groups)} of {num_groups} groups"
        for key, outcomes in pool.poll(1.0):
            assert key not in groups
            groups[key] = outcomes
    assert pool.poll() == []
    return groups


def score_all(pool: RewardPool, *requests: ScoreRequest) -> list[ScoreOutcome]:
    pool.submit(0, list(requests))
    return collect(pool, 1)[0]


def test_outcomes_come_once_and_in_request_order(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("echo"), 30.0), num_workers=2) as pool:
        for key in range(20):
            pool.submit(key, [ScoreRequest(str(100 * key + index)) for index in range(8)])
        groups = collect(pool, 20)
    for key in range(20):
        assert [outcome.reward for outcome in groups[key]] == [100.0 * key + index for index in range(8)]


def test_empty_group_and_repeated_key(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("echo"), 30.0), num_workers=1) as pool:
        assert score_all(pool) == []
        pool.submit(1, [ScoreRequest("1")])
        with pytest.raises(ValueError, match="already"):
            pool.submit(1, [ScoreRequest("1")])
        collect(pool, 1)
        pool.submit(1, [ScoreRequest("2")])  # free again
        assert collect(pool, 1)[1][0].reward == 2.0


def test_response_that_never_finishes_costs_its_own_limit_only() -> None:
    right = ScoreRequest(r"\boxed{4}", "4")
    with RewardPool(RewardSpec("boxed", 2.0), num_workers=1) as pool:
        outcomes = score_all(pool, right, ScoreRequest(NEVER_FINISHES, "5"), right, right)
    good = ScoreOutcome(10.0, 1.0, 1.0)
    assert outcomes == [good, ScoreOutcome(0.0, 1.0, 0.0, timed_out=True), good, good]


def test_verdicts_are_those_of_this_process() -> None:
    pairs = [
        ("0.5", r"\frac12"),
        ("1,2,3", "3,2,1"),
        ("0<x<12.5", "(0,12.5)"),
        (r"\frac{1}{2}", r"\frac{1}{2} + 0 \cdot x"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1+\sqrt5, 1-\sqrt5\}"),
        ("?", "5"),
        (r"\frac{1}{2}", r"\frac{1}{3"),
        ("sin^2(x)+cos^2(x)", "1"),
    ]
    requests = [ScoreRequest(rf"\boxed{{{answer}}}", gold) for gold, answer in pairs]
    here = [build_scorer(RewardSpec("boxed", 30.0)).score(request) for request in requests]
    with RewardPool(RewardSpec("boxed", 30.0), num_workers=2) as pool:
        assert score_all(pool, *requests) == here


def test_worker_that_dies_twice_is_an_error_of_that_response_only(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("die"), 30.0), num_workers=1) as pool:
        first, second, third = score_all(pool, ScoreRequest("a"), ScoreRequest("die"), ScoreRequest("b"))
    assert first == third == ScoreOutcome(1.0, 1.0, 1.0)
    assert second.infrastructure
    assert "status 3" in (second.error or "")


def test_worker_that_dies_once_is_replaced_and_the_response_tried_again(
    functions: Callable[[str], str], tmp_path: Path
) -> None:
    with RewardPool(RewardSpec(functions("die_once"), 30.0), num_workers=1) as pool:
        (outcome,) = score_all(pool, ScoreRequest("a", row={"marker": str(tmp_path / "died")}))
    assert outcome == ScoreOutcome(1.0, 1.0, 1.0)  # scored by another process


def test_exit_in_a_reward_function_is_no_score(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("leave"), 30.0), num_workers=1) as pool:
        (outcome,) = score_all(pool, ScoreRequest("a"))
    assert outcome.infrastructure


def test_stopped_worker_is_killed_and_replaced(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("stop"), 1.0), num_workers=1) as pool:
        outcomes = score_all(pool, ScoreRequest("stop"), ScoreRequest("go"))
    assert [outcome.timed_out for outcome in outcomes] == [True, False]
    assert outcomes[1].reward == 1.0


def test_printing_and_reading_stay_clear_of_the_channel(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("noisy"), 30.0), num_workers=1) as pool:
        assert [outcome.reward for outcome in score_all(pool, *[ScoreRequest("a")] * 3)] == [1.0] * 3


def test_large_and_strange_requests(functions: Callable[[str], str]) -> None:
    number = 10**40 + 3
    requests = [
        ScoreRequest("z" * 3_000_000, row={"number": number}),
        ScoreRequest("a\ud800b", "\ud800", row={"number": 7, "x": ["\ud800"]}),
    ]
    with RewardPool(RewardSpec(functions("big"), 30.0), num_workers=1) as pool:
        rewards = [outcome.reward for outcome in score_all(pool, *requests)]
    assert rewards == [3_000_000.0 + number % 7, 3.0]


def test_errors_and_non_finite_rewards_are_passed_on(functions: Callable[[str], str]) -> None:
    with RewardPool(RewardSpec(functions("raises"), 30.0), num_workers=1) as pool:
        (outcome,) = score_all(pool, ScoreRequest("a"))
    assert "RuntimeError: no idea" in (outcome.error or "")
    assert not outcome.infrastructure
    with RewardPool(RewardSpec(functions("not_finite"), 30.0), num_workers=1) as pool:
        rewards = [outcome.reward for outcome in score_all(pool, ScoreRequest("inf"), ScoreRequest("nan"))]
    assert rewards[0] == float("inf")
    assert rewards[1] != rewards[1]


def test_time_out_takes_the_whole_process_group(functions: Callable[[str], str], tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    with RewardPool(RewardSpec(functions("family"), 3.0), num_workers=1) as pool:
        hung, scored = score_all(pool, ScoreRequest("hang", row={"marker": str(marker)}), ScoreRequest("a"))
        assert hung.timed_out
        assert scored.reward == 1.0
        assert wait_until_ended(map(int, marker.read_text().split()), PATIENCE_SECONDS) == []


def test_close_leaves_nothing(functions: Callable[[str], str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = RewardPool(RewardSpec(functions("pid"), 30.0), num_workers=2)
    pids = [int(outcome.reward) for outcome in score_all(pool, *[ScoreRequest("a")] * 4)]
    pool.submit(5, [ScoreRequest("a")] * 1000)  # unfinished work does not delay it
    pool.close()
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # reaped, not only killed
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(InfrastructureError, match="closed"):
        for _ in range(3):
            pool.poll()


def test_close_while_workers_are_starting(functions: Callable[[str], str]) -> None:
    RewardPool(RewardSpec(functions("pid"), 30.0), num_workers=2).close()


def test_workers_die_with_their_parent(functions: Callable[[str], str], tmp_path: Path) -> None:
    """Also one that is busy and does not see the end of its channel."""
    marker = tmp_path / "pid"
    program = f"""
from zbgrpo.rewards.pool import RewardPool
from zbgrpo.rewards.score import RewardSpec, ScoreRequest
pool = RewardPool(RewardSpec({functions("linger")!r}, 600.0), 1)
pool.submit(0, [ScoreRequest("a", row={{"marker": {str(marker)!r}}})])
pool.poll(600.0)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(zbgrpo.__file__).parents[1])
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (marker.exists() and marker.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker = int(marker.read_text())
        assert is_alive(worker)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(PATIENCE_SECONDS)
    assert wait_until_ended([worker], PATIENCE_SECONDS) == []


@pytest.mark.parametrize("name", ["boxd", "module:"])
def test_unusable_type_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError):
        RewardPool(RewardSpec(name, 10.0), 1)


@pytest.mark.parametrize(("limit", "num_workers"), [(0.0, 1), (float("nan"), 1), (1.0, 0)])
def test_unusable_numbers_are_refused_at_once(limit: float, num_workers: int) -> None:
    with pytest.raises(ConfigError):
        RewardPool(RewardSpec("boxed", limit), num_workers)


def test_function_that_cannot_be_loaded_is_a_config_error(functions: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise OSError('half a disk')")
    for target, part in ((functions("missing"), "missing"), (f"{tmp_path}/broken.py:f", "half a disk")):
        with RewardPool(RewardSpec(target, 10.0), 1) as pool:
            pool.submit(0, [ScoreRequest("a")])
            with pytest.raises(ConfigError, match=part):
                pool.poll(PATIENCE_SECONDS)
            with pytest.raises(ConfigError, match=part):
                pool.poll()


def test_worker_that_ends_while_loading_fails_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_START_PAUSE_SECONDS", 0.01)
    (tmp_path / "ends.py").write_text("import os; os._exit(9)")
    with RewardPool(RewardSpec(f"{tmp_path}/ends.py:f", 10.0), 1) as pool:
        pool.submit(0, [ScoreRequest("a")])
        with pytest.raises(InfrastructureError, match="status 9"):
            pool.poll(PATIENCE_SECONDS)


def test_worker_that_never_gets_ready_fails_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "START_LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(manager, "_START_PAUSE_SECONDS", 0.01)
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    with RewardPool(RewardSpec(f"{tmp_path}/slow.py:f", 10.0), 1) as pool, pytest.raises(InfrastructureError):
        pool.poll(PATIENCE_SECONDS)


def test_frames() -> None:
    stream = encode_frame(b"") + encode_frame(b"abc")
    buffer = bytearray()
    found = []
    for byte in stream:
        buffer.append(byte)
        while (payload := take_frame(buffer)) is not None:
            found.append(payload)
    assert found == [b"", b"abc"]
    assert not buffer
