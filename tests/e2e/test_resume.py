"""A run that is stopped or killed goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.support.launching import Run, events, metrics, own_rendezvous, run, summary
from zbgrpo.engine.check_ledger import check_logs
from zbgrpo.errors import EXIT_STOPPED

SYNCHRONOUS = "-t 1 -i 1 --max-staleness 0 -si 3 -e 10"


def _state(workplace: Path, project: str, version: int) -> dict:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = workplace / f"{project}-{version}.pt"
    dcp_to_torch_save(workplace / "model_out" / project / f"state-{version}" / "trainer", target)
    return torch.load(target, weights_only=True)


def _trained(workplace: Path, project: str) -> list[tuple]:
    lines = events(workplace, project, "rank-0")
    return [(line["step"], tuple(line["uid"]), line["crc"]) for line in lines if line["kind"] == "trained"]


def test_killed_synchronous_run_resumes_bit_by_bit(workplace: Path) -> None:
    assert run(workplace, 2, f"{SYNCHRONOUS} --max-steps 6 -p straight").status == 0
    interrupted = Run(workplace, 2, f"{SYNCHRONOUS} --max-steps 1000 -p resumed")
    interrupted.wait_until((workplace / "model_out" / "resumed" / "latest").exists)
    interrupted.kill_all()
    finished = run(workplace, 2, f"{SYNCHRONOUS} --max-steps 6 -p resumed")
    assert finished.status == 0 and "going on from" in finished.output, finished.output[-3000:]
    straight, resumed = _state(workplace, "straight", 6), _state(workplace, "resumed", 6)
    for part in ("master", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(straight[part][name], resumed[part][name]) for name in straight[part]), part
    assert torch.equal(straight["counters"], resumed["counters"])
    assert _trained(workplace, "straight") == _trained(workplace, "resumed")
    assert [line["step"] for line in metrics(workplace, "resumed")] == [1, 2, 3, 4, 5, 6]
    assert check_logs(workplace / "logs" / "resumed").ok


KILLED_AT = {
    1: "step.committed#1",
    2: "step.commit#2",
    3: "checkpoint.state#3",
    4: "checkpoint.fsync#70",  # of the files of state 4
    5: "checkpoint.write#13",  # the manifest of state 5 is there, its folder has not got its name
    6: "checkpoint.rename#16",  # state 6 has got its name, `latest` names the one before
    7: "checkpoint.rename#20",  # `latest` names state 7
    8: "checkpoint.model#8",
    9: "step.committed#9",
}
"""Where consumer 0 is killed, by the step that it is at; every step is saved, with 3 writes, 3 renames and 22 syncs."""


@pytest.fixture(scope="module")
def ten_steps(workplace: Path) -> dict:
    """The state of a run of ten steps that nothing disturbs, and what it trained."""
    assert run(workplace, 2, f"{SYNCHRONOUS} -si 1 --max-steps 10 -p ten").status == 0
    return {"state": _state(workplace, "ten", 10), "trained": _trained(workplace, "ten")}


@pytest.mark.slow
@pytest.mark.parametrize("step", KILLED_AT)
def test_a_run_that_is_killed_at_any_step_and_goes_on_equals_one_that_is_not(
    workplace: Path, ten_steps: dict, step: int
) -> None:
    project = f"killed-at-{step}"
    rule = f"{KILLED_AT[step]}@consumer:0=kill!{workplace / project}"
    launcher = [*own_rendezvous(), "--max-restarts", "1"]
    flags = f"{SYNCHRONOUS} -si 1 --max-steps 10 -p {project}"
    finished = Run(workplace, 2, flags, rendezvous=launcher, failpoints=rule).wait()
    assert finished.status == 0 and (workplace / project).exists(), finished.output[-3000:]
    went_on = re.findall(r"going on from \S*state-(\d+)", finished.output)
    assert went_on == {1: [], 6: ["5"], 7: ["7"], 8: ["8"]}.get(step, [str(step - 1)]), finished.output[-3000:]
    state = _state(workplace, project, 10)
    for part in ("master", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(ten_steps["state"][part][name], tensor) for name, tensor in state[part].items()), part
    assert torch.equal(ten_steps["state"]["counters"], state["counters"])
    assert _trained(workplace, project) == ten_steps["trained"]
    report = check_logs(workplace / "logs" / project)
    assert report.ok and report.version == 10 and report.num_starts == (1 if step == 1 else 2)


def test_killed_asynchronous_run_keeps_every_invariant(workplace: Path) -> None:
    flags = "-t 2 -i 2 -si 2 -e 10 -p asynchronous"
    interrupted = Run(workplace, 4, f"{flags} --max-steps 1000")
    interrupted.wait_until((workplace / "model_out" / "asynchronous" / "state-4").exists)
    interrupted.kill_all()
    finished = run(workplace, 4, f"{flags} --max-steps 12")
    assert finished.status == 0, finished.output[-3000:]
    assert list((workplace / "logs" / "asynchronous" / "events").glob("*void-*")), "nothing was moved aside"
    report = check_logs(workplace / "logs" / "asynchronous")
    assert report.ok, str(report)
    assert summary(workplace, "asynchronous")["ledger"]["consumed"] == 12 * 8


def test_signal_stops_at_once_with_a_state(workplace: Path) -> None:
    stopped = Run(workplace, 2, "-t 1 -i 1 -e 100 -p stopped")
    stopped.wait_for_step("stopped", 3)
    ranks = stopped.ranks()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGUSR1)  # any rank will do
    finished = stopped.wait()
    assert finished.status != 0 and f"exitcode  : {EXIT_STOPPED}" in finished.output, finished.output[-3000:]
    version = summary(workplace, "stopped")["steps"]
    assert summary(workplace, "stopped")["exit_reason"].startswith("stopped")
    assert (workplace / "model_out" / "stopped" / "latest").read_text().strip() == f"state-{version}"
    again = run(workplace, 2, f"-t 1 -i 1 -e 100 -p stopped --max-steps {version + 2}")
    assert again.status == 0, again.output[-3000:]
    assert [line["step"] for line in metrics(workplace, "stopped")] == list(range(1, version + 3))
    assert check_logs(workplace / "logs" / "stopped").ok


def test_dead_rank_ends_the_run_and_a_restart_goes_on(workplace: Path) -> None:
    flags = "-t 1 -i 1 -si 2 -e 100 -p dead"
    wounded = Run(workplace, 2, flags)
    wounded.wait_for_step("dead", 3)
    os.kill(wounded.ranks()[1], signal.SIGKILL)
    assert wounded.wait(60).status != 0
    finished = run(workplace, 2, f"{flags} --max-steps 6")
    assert finished.status == 0, finished.output[-3000:]
    assert check_logs(workplace / "logs" / "dead").ok
