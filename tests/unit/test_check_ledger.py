"""Logs of runs that finished, were resumed, stopped or killed: what must agree in them, and what may be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_logs import CONFIG, CONSUMERS, World, check, finished, killed, violated
from zbgrpo.config.load import dump_yaml, load_yaml
from zbgrpo.engine.check_ledger import INVARIANTS, check_logs
from zbgrpo.errors import ConfigError, RunFolderError


@pytest.mark.parametrize("stale", ["mask", "wait"])
def test_right_logs_pass_and_everything_is_checked(tmp_path: Path, stale: str) -> None:
    report = check(finished(stale), tmp_path)
    assert violated(report) == set() and report.ok
    assert [invariant.name for invariant in report.invariants] == list(INVARIANTS)
    assert all(invariant.num_checked for invariant in report.invariants)
    assert (report.state, report.version, report.num_starts, report.num_unconfirmed) == ("end", 3, 2, 0)
    assert report.totals == {
        "leased": 22, "consumed": 12, "filtered": 1, "dropped": 4, "returned": 1, "taken back": 4, "live": 0
    }  # fmt: skip


def _be_too_old(world: World) -> None:
    """A group of step 2 that was sampled with version 0, all logs agreed."""
    for log in ("hub", 0, 1, 2, 3):
        for event in world.log(log):
            if event.get("lease") == 15 and "oldest" in event:
                event["oldest"] = 0
    world.metrics[2]["staleness/max"] = 2


def test_violation_names_the_place(tmp_path: Path) -> None:
    world = finished()
    world.line(0, "trained", lease=0)["crc"] = 5
    report = check(world, tmp_path)
    (training,) = [invariant for invariant in report.invariants if invariant.num_violations]
    assert training.violations == [
        "rank 0: trained lease 0 (uid 0:0, attempt 0) in step 0 with checksum 5, the hub has step 0 and 1000"
    ]


def test_only_the_first_violations_are_kept(tmp_path: Path) -> None:
    world = finished()
    for event in world.ranks[0]:
        if event["kind"] == "trained":
            event["crc"] = 5
    training = next(i for i in check(world, tmp_path).invariants if i.name == "training")
    assert (training.num_violations, len(training.violations)) == (7, 5)


@pytest.mark.parametrize(("stale", "expected"), [("mask", set()), ("wait", {"staleness"})])
def test_group_may_be_older_than_max_staleness_unless_strict(tmp_path: Path, stale: str, expected: set[str]) -> None:
    world = finished(stale)
    _be_too_old(world)
    assert violated(check(world, tmp_path)) == expected


def test_tokens_beyond_the_lag_must_be_left_out(tmp_path: Path) -> None:
    world = finished()
    world.config = load_yaml(CONFIG.replace("STALE", "mask").replace("max_token_lag: 3", "max_token_lag: 0"))
    report = check(world, tmp_path)
    assert violated(report) == {"token-lag"}
    assert "the lag reached 1, the bound is 0, but 0.0 tokens were left out" in str(report.invariants)


# ------------------------------------------------------------------------------------------ unfinished runs


def test_killed_run_may_miss_lines_behind_its_last_state(tmp_path: Path) -> None:
    world = killed()
    for rank in CONSUMERS:
        del world.ranks[rank][world.ranks[rank].index({"kind": "saved", "version": 2}) + 1 :]
    sent = world.line(2, "sent", lease=11)
    del world.ranks[2][world.ranks[2].index(sent) :]
    report = check(world, tmp_path)
    assert violated(report) == set()
    assert (report.state, report.version) == ("open", 3)
    assert report.num_unconfirmed > 0


def test_killed_run_with_a_group_that_the_hub_has_not_got(tmp_path: Path) -> None:
    world = killed()
    lease_id = world.lease(3)
    line = {**world.names(lease_id), "crc": 1, "oldest": 2, "newest": 3}
    world.ranks[3].append({"kind": "sent", **line})
    assert check(world, tmp_path).ok
    world.ranks[3].append({"kind": "dropped", **world.names(lease_id), "reason": "non_finite"})
    report = check_logs(world.write(tmp_path / "again"))
    assert violated(report) == {"outcomes"}


def test_group_trained_out_of_the_buffer(tmp_path: Path) -> None:
    world = finished()
    step = world.line(0, "commit", 2)
    line = {**world.names(21), "crc": 1021, "oldest": 3, "newest": 3, "step": 3}
    world.ranks[0].insert(world.ranks[0].index(step) + 1, {"kind": "trained", **line})
    training = next(i for i in check(world, tmp_path).invariants if i.name == "training")
    assert "rank 0: trained lease 21 (uid 0:21, attempt 0), which is dropped" in training.violations


def test_lines_of_the_hub_that_do_not_add_up(tmp_path: Path) -> None:
    world = finished()
    line = world.line("hub", "consumed", lease=2)
    world.hub.insert(world.hub.index(line), dict(line))
    accounting = next(i for i in check(world, tmp_path).invariants if i.name == "accounting")
    assert any("the lines do not add up" in violation for violation in accounting.violations)


def test_killed_hub_may_know_less_than_the_ranks(tmp_path: Path) -> None:
    world = killed()
    del world.hub[world.hub.index({"kind": "snapshot", "version": 2}) + 1 :]
    report = check(world, tmp_path)
    assert violated(report) == set()
    assert (report.state, report.version, report.totals["live"]) == ("open", 2, 4)


def test_killed_run_must_agree_up_to_its_last_state(tmp_path: Path) -> None:
    world = killed()
    world.remove(2, "sent", lease=0)
    world.remove(0, "trained", lease=7)
    assert violated(check(world, tmp_path)) == {"delivery", "training"}


def test_killed_run_must_not_contradict_itself_behind_its_last_state(tmp_path: Path) -> None:
    world = killed()
    world.line(2, "sent", lease=11)["crc"] = 5
    world.line(0, "trained", lease=15)["crc"] = 5
    assert violated(check(world, tmp_path)) == {"delivery", "training"}


def test_lines_of_a_state_that_was_not_completed_are_not_required(tmp_path: Path) -> None:
    world = killed()
    for rank in CONSUMERS:  # killed while the state was written
        del world.ranks[rank][world.ranks[rank].index({"kind": "saved", "version": 2}) :]
    world.remove(2, "sent", lease=0)
    assert violated(check(world, tmp_path)) == set()


def test_stopped_run(tmp_path: Path) -> None:
    world = killed()
    world.plan("stop", 3)
    world.hub.append({"kind": "snapshot", "version": 3})
    report = check(world, tmp_path)
    assert report.ok
    assert (report.state, report.totals["live"]) == ("stop", 3)


def test_failure_after_the_planned_end_is_no_end(tmp_path: Path) -> None:
    world = finished()
    world.hub.append({"kind": "failed", "error": "rank 1 is gone"})
    assert check(world, tmp_path).state == "open"


def test_planned_end_without_its_summary_is_no_end(tmp_path: Path) -> None:
    world = finished()
    assert world.summary is not None
    world.summary["run"] = "another"  # start, an earlier one
    report = check(world, tmp_path)
    assert (report.state, report.ok) == ("open", True)


def test_group_dropped_after_its_last_attempt(tmp_path: Path) -> None:
    world = finished()
    world.ranks[2].append({"kind": "returned", **world.names(6), "detail": ""})
    world.remove(2, "dropped", lease=6)
    world.line("hub", "dropped", lease=6)["reason"] = "infrastructure"
    assert violated(check(world, tmp_path)) == set()


# ------------------------------------------------------------------------------------------ files


def test_void_files_are_not_read(tmp_path: Path) -> None:
    folder = finished().write(tmp_path / "run")
    (folder / "events" / "rank-2.jsonl.void-2-ab12").write_text("not even JSON\n")
    (folder / "events" / "hub.jsonl.void-2-ab12").write_text('{"kind":"leased"}\n')
    assert check_logs(folder).ok


def test_torn_last_line_of_a_killed_run(tmp_path: Path) -> None:
    folder = killed().write(tmp_path / "run")
    with open(folder / "events" / "rank-1.jsonl", "a") as file:
        file.write('{"kind":"trai')
    report = check_logs(folder)
    assert report.ok and report.num_unconfirmed == 1


def test_missing_log_of_a_rank(tmp_path: Path) -> None:
    folder = finished().write(tmp_path / "run")
    (folder / "events" / "rank-3.jsonl").unlink()
    assert {"delivery", "outcomes", "weights"} <= violated(check_logs(folder))
    (folder / "events" / "rank-1.jsonl").unlink()
    assert {"training", "steps"} <= violated(check_logs(folder))


def test_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"config\.yaml: no such file; give the log folder of a run"):
        check_logs(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_yaml(finished().config))
    with pytest.raises(RunFolderError, match=r"hub\.jsonl: no such file"):
        check_logs(tmp_path)


@pytest.mark.parametrize("line", ['{"kind":"trained","lease":1}', '{"kind":"trained"}', "{}"])
def test_line_that_is_no_event(tmp_path: Path, line: str) -> None:
    folder = finished().write(tmp_path / "run")
    path = folder / "events" / "rank-0.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(RunFolderError, match=r"rank-0\.jsonl:1: not an event of this program"):
        check_logs(folder)


def test_damaged_configuration_and_summary(tmp_path: Path) -> None:
    folder = finished().write(tmp_path / "run")
    (folder / "summary.json").write_text('{"steps": 3}')
    with pytest.raises(RunFolderError, match=r"summary\.json: not a summary"):
        check_logs(folder)
    (folder / "config.yaml").write_text("nonsense: 3")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        check_logs(folder)
