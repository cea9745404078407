"""What an asynchronous run trained is trained again, bit by bit, from what it has written down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPOSITORY, Run
from zbgrpo.engine.steplog import FORMAT, Commit, Minibatch, Start, StepLog, read_step_log, starts_of, step_log_path
from zbgrpo.errors import RunFolderError
from zbgrpo.observe.events import iter_events


def replay(workplace: Path, project: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zbgrpo.cli", "replay", f"logs/{project}", *arguments]
    environment = ["env", f"PYTHONPATH={REPOSITORY}", "OMP_NUM_THREADS=1"]
    return subprocess.run(
        [*environment, *command], cwd=workplace, capture_output=True, text=True, timeout=150, check=False
    )


def test_an_asynchronous_run_of_two_consumers_is_replayed(workplace: Path) -> None:
    flags = "-t 2 -i 2 -zero 2 -tbs 4 -tMbs 2 --max-steps 5 -p replayed observe.record_steps=true -kl 0.01"
    assert Run(workplace, 4, flags).wait().status == 0
    # That of a source whose producers are behind: not every version is sent.
    events = iter_events(workplace / "logs/replayed/events/rank-0.jsonl")
    sent = [event["version"] for event in events if event["kind"] == "published" and event["version"] > 0]
    found = replay(workplace, "replayed")
    assert found.returncode == 0, found.stderr
    assert f"zbgrpo: replayed steps 1 to 5: {len(sent)} digests compared, all equal" in found.stdout and sent

    # Another temperature of one group of one rank is another step.
    path = step_log_path(workplace / "logs/replayed", 1, 0)
    records = list(read_step_log(path))
    start = records[0]
    assert isinstance(start, Start)
    log = StepLog(path, start)
    for record in records[1:]:
        if isinstance(record, Minibatch):
            log.minibatch(record.version, record.groups(), [0.9, *record.temperatures[1:]])
        elif isinstance(record, Commit):
            log.commit(record.version, record.skipped)
    log.close()
    changed = replay(workplace, "replayed")
    assert changed.returncode == 1
    assert f"WeightSyncError: step {sent[0]} of the replay differs from the run" in changed.stderr


def test_what_a_killed_run_has_recorded_counts_up_to_the_cut(tmp_path: Path) -> None:
    path = step_log_path(tmp_path, 0, 7)
    log = StepLog(path, Start(7, 1, 100, FORMAT))
    log.commit(8, False)
    log.commit(9, True)
    log.close()
    whole = path.read_bytes()
    assert [*read_step_log(path)] == [Start(7, 1, 100, FORMAT), Commit(8, False), Commit(9, True)]
    path.write_bytes(whole[:-1])
    assert [*read_step_log(path)] == [Start(7, 1, 100, FORMAT), Commit(8, False)]
    assert starts_of(tmp_path) == [7]
    path.write_bytes(whole[:12] + bytes([whole[12] ^ 1]) + whole[13:])
    with pytest.raises(RunFolderError, match="is damaged"):
        list(read_step_log(path))


def test_what_a_version_of_another_format_has_recorded_is_refused(tmp_path: Path) -> None:
    path = step_log_path(tmp_path, 0, 7)
    StepLog(path, Start(7, 1, 100)).close()
    with pytest.raises(RunFolderError, match=f"writes format 1; this one reads {FORMAT}"):
        list(read_step_log(path))


def test_a_run_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"observe\.record_steps=true"):
        starts_of(tmp_path)
