"""A tree of processes, seen from the ancestor that adopts its orphans: found, measured, killed, reaped."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import time
from collections.abc import Callable
from typing import NamedTuple, Optional

from zbgrpo.rewards.sandbox.users import become_killer

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_REAP_INTERVAL_SECONDS = 0.002
_ROUND_SECONDS = 0.05
_MAX_STOP_ROUNDS = 100


class Usage(NamedTuple):
    """What a tree uses now."""

    num_tasks: int
    """Processes and threads."""
    memory_bytes: int
    """Resident memory of all; pages that several share are counted for each."""


class Reaped(NamedTuple):
    """Children that had ended."""

    statuses: dict[int, int]
    """Wait status by process."""
    none_left: bool
    """Whether there is no child any more, and with that no descendant: orphans would be children."""


def descendants() -> list[int]:
    """Processes beneath this one, those that have ended but are not reaped among them."""
    found: list[int] = []
    own = os.getpid()
    children = _children_by_kernel if _kernel_lists_children() else _children_by_scanning()
    waiting = [own]
    while waiting:
        new = children(waiting.pop())
        found += new
        waiting += new
    return found


def measure(pids: list[int]) -> Usage:
    """Tasks and resident memory of these processes; those that are gone count nothing."""
    num_tasks = num_pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            num_pages += int(_read(f"/proc/{pid}/statm").split()[1])
            num_tasks += len(os.listdir(f"/proc/{pid}/task"))
    return Usage(num_tasks=num_tasks, memory_bytes=num_pages * _PAGE_BYTES)


def memory_shared_fairly(pids: list[int]) -> int:
    """Resident bytes of these processes, each page counted once among those that share it. Slower than `measure`.

    What may not be read in this detail counts as in `measure`.
    """
    num_bytes = 0
    for pid in pids:
        try:
            rollup = _read(f"/proc/{pid}/smaps_rollup")
        except OSError:
            num_bytes += measure([pid]).memory_bytes
            continue
        num_bytes += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith(b"Pss:"))
    return num_bytes


def nameless_file_bytes(pids: list[int]) -> int:
    """Bytes in files that these processes hold open and that have no name any more, or never had one."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def num_tasks_of_user(uid: int) -> int:
    """Processes and threads of a user, as far as this process can see."""
    num_tasks = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                folder = os.stat(f"/proc/{name}/task")
                if folder.st_uid == uid:
                    num_tasks += folder.st_nlink - 2  # a folder for each task
    return num_tasks


def kill_descendants(uid: Optional[int], patience_seconds: float) -> bool:
    """Kill and reap every process beneath this one, which adopts orphans; whether none is left.

    `uid`: a user of `users.program_user`, whose every process is beneath this one; then one system call hits them all
    at the same moment. None: they run as the user of this process, and have to be found first.
    """
    deadline = time.monotonic() + patience_seconds
    while not reap().none_left:
        if uid is not None:
            _kill_user(uid)
        if uid is None or not _reaped_within(_ROUND_SECONDS):
            _kill_found()
        if _reaped_within(_ROUND_SECONDS):
            return True
        if time.monotonic() > deadline:
            return False
    return True


def reap() -> Reaped:
    """Reap the children that have ended, without waiting."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return Reaped(statuses, none_left=True)
        if pid == 0:
            return Reaped(statuses, none_left=False)
        statuses[pid] = status


def _reaped_within(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (gone := reap().none_left) and time.monotonic() < deadline:
        time.sleep(_REAP_INTERVAL_SECONDS)
    return gone


def _kill_user(uid: int) -> None:
    """Kill all processes of a user, by a process that may kill nothing else and that they cannot touch."""
    pid = os.fork()
    if pid == 0:
        try:
            become_killer(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _kill_found() -> None:
    """Stop whatever is found until nothing new is, then kill: what is stopped starts no successors meanwhile."""
    stopped: set[int] = set()
    for _ in range(_MAX_STOP_ROUNDS):
        new = set(descendants()) - stopped
        if not new:
            break
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


@functools.lru_cache(maxsize=1)
def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _children_by_kernel(pid: int) -> list[int]:
    """A process's children, from the kernel's own list (CONFIG_PROC_CHILDREN)."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return children


def _children_by_scanning() -> Callable[[int], list[int]]:
    """A function that gives a process's children, from one look at all processes of the machine."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state ppid ...; the name may hold anything
                fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    return lambda pid: children.get(pid, [])


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
