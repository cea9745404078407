"""One run per folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zbgrpo.checkpoint.folder import RunLock
from zbgrpo.errors import RunFolderError

ROOT = Path(__file__).parents[2]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_second_lock_is_refused_by_name_until_the_first_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "run"
    first, second = RunLock(folder), RunLock(folder)
    with first:
        first.acquire()  # has it already
        with pytest.raises(RunFolderError, match="is in use by another run") as caught:
            second.acquire()
        assert str(folder) in str(caught.value)
        assert f"process {os.getpid()} on" in str(caught.value)
    first.release()
    with second:
        pass


HOLDER = """
import sys
from pathlib import Path
from zbgrpo.checkpoint.folder import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("locked", flush=True)
sys.stdin.readline()
"""


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunFolderError, match=f"process {holder.pid} on"):
            RunLock(tmp_path).acquire()
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=60)
    with RunLock(tmp_path):
        pass


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path):
        assert "has no locks" in warnings_in(caplog)[0]


def test_other_errors_of_locking_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken"):
        RunLock(tmp_path).acquire()
