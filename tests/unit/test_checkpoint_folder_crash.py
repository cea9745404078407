"""A save that is interrupted at every one of its steps, by a kill or an error, leaves the old or the new state."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.checkpoint import durable
from zbgrpo.checkpoint.folder import MANIFEST_NAME, find_latest, remove_old, set_latest, verify_folder, write_folder
from zbgrpo.errors import ResourceError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill does not lose what the kernel has, so thousands of real flushes would prove nothing here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def fill_with(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "part-0").write_bytes(text.encode() * 3)
        (folder / "weights" / "part-1").write_bytes(text.encode() * 5)
        (folder / "empty").touch()

    return fill


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def save(parent: Path, number: int, text: str) -> Path:
    final = parent / f"state-{number}"
    write_folder(final, fill_with(text), {"step": number})
    set_latest(parent, final.name)
    return final


OLD, NEW = 1, 2
PATCHED = ("fsync", "rename", "replace", "mkdir", "write", "open", "unlink", "rmdir", "fstat")


class Steps:
    """Calls `at_step` in place of the k-th system call that a save makes; counts them all."""

    def __init__(self, fail_at: int | None, at_step: Callable[[str], None]) -> None:
        self.fail_at, self.at_step, self.count = fail_at, at_step, 0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.fail_at:
                if name == "write":
                    function(args[0], args[1][: len(args[1]) // 2])  # a torn write
                self.at_step(name)
            return function(*args, **kwargs)

        return wrapped

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in PATCHED:
                patch.setattr(os, name, self.wrap(name, getattr(os, name)))
            patch.setattr(durable, "open", self.wrap("open", open), raising=False)
            yield


def scenario_next(parent: Path) -> None:
    """The whole of a save, as a run does it: the next state, `latest`, then the older ones go."""
    save(parent, 10, "new")
    remove_old(parent, "state-", 1)


def scenario_replace(parent: Path) -> None:
    """The state to write is there already."""
    save(parent, 9, "new")
    remove_old(parent, "state-", 1)


SCENARIOS = [scenario_next, scenario_replace]


def prepare(parent: Path) -> Path:
    parent.mkdir()
    save(parent, 8, "older")
    return save(parent, 9, "old")


def num_steps(scenario: Callable[[Path], None], parent: Path) -> int:
    prepare(parent)
    steps = Steps(None, lambda name: None)
    with steps.patched():
        scenario(parent)
    assert steps.count > 25
    return steps.count


def state_after(parent: Path) -> int:
    """Which state the next run finds; fails unless it is wholly the old or wholly the new one."""
    found = find_latest(parent)
    assert found is not None
    for folder in parent.iterdir():
        if folder.name.startswith("state-") and folder.name[6:].isdigit():
            verify_folder(folder)  # what is called like a state is one
    content = content_of(found)
    content.pop(MANIFEST_NAME)
    expected = {
        text: {"weights/part-0": text.encode() * 3, "weights/part-1": text.encode() * 5, "empty": b""}
        for text in ("old", "new")
    }
    assert content in expected.values()
    return NEW if content == expected["new"] else OLD


def assert_next_save_works(parent: Path) -> None:
    save(parent, 11, "new")
    remove_old(parent, "state-", 1)
    assert sorted(os.listdir(parent)) == ["latest", "state-11"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_process_killed_at_any_step_leaves_the_old_or_the_new_state(
    scenario: Callable[[Path], None], tmp_path: Path
) -> None:
    found = []
    for step in range(num_steps(scenario, tmp_path / "count")):
        parent = tmp_path / str(step)
        prepare(parent)
        child = os.fork()
        if child == 0:
            try:
                with Steps(step, lambda name: os._exit(99)).patched():
                    scenario(parent)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99, step
        found.append(state_after(parent))
        assert_next_save_works(parent)
    assert found == sorted(found)  # never back to the old one
    assert {OLD, NEW} == set(found)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_step_leaves_the_old_or_the_new_state_and_no_half_of_one(
    scenario: Callable[[Path], None], code: int, tmp_path: Path
) -> None:
    def fail(name: str) -> None:
        raise OSError(code, os.strerror(code))

    num_raised = 0
    for step in range(num_steps(scenario, tmp_path / "count")):
        parent = tmp_path / str(step)
        prepare(parent)
        try:
            with Steps(step, fail).patched():
                scenario(parent)
        except (OSError, ResourceError) as error:
            num_raised += 1
            assert isinstance(error, ResourceError) or error.errno == code
        state_after(parent)
        assert_next_save_works(parent)
    assert num_raised > 15


@pytest.mark.parametrize("step", range(4))
def test_an_error_before_the_rename_leaves_nothing_beside_the_old_state(tmp_path: Path, step: int) -> None:
    before = content_of(save(tmp_path, 9, "old"))

    def fail(name: str) -> None:
        raise OSError(errno.EDQUOT, "quota")

    steps = Steps(None, fail)
    real_fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        steps.fail_at = step
        patch.setattr(os, "fsync", steps.wrap("fsync", real_fsync))
        with pytest.raises(ResourceError, match=r"no room for .*state-9: \d+ bytes are free .*checkpoint\.keep_states"):
            write_folder(tmp_path / "state-9", fill_with("new"), None)
    assert content_of(tmp_path / "state-9") == before
    assert sorted(os.listdir(tmp_path)) == ["latest", "state-9"]


def test_a_failing_rename_gives_the_former_folder_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content_of(save(tmp_path, 9, "old"))
    real_rename = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".tmp-" in Path(source).name:
            raise OSError(errno.EIO, "failed")
        real_rename(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="failed"):
        write_folder(tmp_path / "state-9", fill_with("new"), None)
    assert content_of(tmp_path / "state-9") == before
    assert sorted(os.listdir(tmp_path)) == ["latest", "state-9"]


DISK_FULL = """
import sys
from pathlib import Path
from zbgrpo.checkpoint.folder import find_latest, set_latest, verify_folder, write_folder
from zbgrpo.errors import ResourceError
parent = Path(sys.argv[1])
write_folder(parent / "state-1", lambda folder: (folder / "part").write_bytes(bytes(600_000)), None)
set_latest(parent, "state-1")
try:
    write_folder(parent / "state-2", lambda folder: (folder / "part").write_bytes(bytes(600_000)), None)
except ResourceError as error:
    print(error)
print(find_latest(parent).name, sorted(path.name for path in parent.iterdir()))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    mount = f"mount -t tmpfs -o size=1m tmpfs '{tmp_path}'"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, timeout=60, check=False).returncode
    ):
        pytest.skip("no private mount namespace here")
    command = [*unshare, "sh", "-c", f'{mount} && exec "$0" -c "$1" "$2"', sys.executable, DISK_FULL, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert result.returncode == 0, result
    error, state = result.stdout.splitlines()
    assert "no room for" in error and "state-2" in error
    assert state == "state-1 ['latest', 'state-1']"
