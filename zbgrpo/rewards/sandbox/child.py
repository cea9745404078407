"""From the fork to the program: what is given up on the way, in an order in which each step still may be taken."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import signal
from typing import NamedTuple, NoReturn, Optional

from zbgrpo.rewards.sandbox import bubblewrap, landlock, mounts, processes, seccomp
from zbgrpo.rewards.sandbox.base import Limits
from zbgrpo.rewards.sandbox.confinement import DEVICES, Confinement
from zbgrpo.rewards.sandbox.folder import PrivateFolder
from zbgrpo.rewards.sandbox.interpreter import INPUT_FD, READY_FD
from zbgrpo.rewards.sandbox.system import die_with_parent, drop_capabilities
from zbgrpo.rewards.sandbox.users import become_user

_FILTER_FD = READY_FD + 1
_FIRST_SPARE_FD = 16

_SHARED_MEMORY = "/dev/shm"
_STACK_BYTES = 64 * 1024**2
_SPARE_ADDRESS_BYTES = 256 * 1024**2
"""Address space beyond the memory limit: libraries and stacks reserve more than they use."""
BUBBLEWRAP_PROCESSES = 2
"""It watches from outside, and is the first process inside."""
_WATCHERS = 1
_RESTORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by Python, and what is ignored stays so in a new program."""


class Stdio(NamedTuple):
    """Descriptors that become the program's 0, 1, 2 and `READY_FD`."""

    stdin: int
    stdout: int
    stderr: int
    ready: int


class Start(NamedTuple):
    """What is special to one program."""

    folder: PrivateFolder
    limits: Limits
    uid: Optional[int]
    protected_pids: tuple[int, ...]
    """Processes that it may not signal where the filter can tell: its watcher first, which is its parent."""


def become_program(confinement: Confinement, start: Start, stdio: Stdio) -> NoReturn:
    """Turn this process, just forked, into the program. What goes wrong is written to `stdio.ready`."""
    try:
        try:
            _execute(confinement, start, stdio)
        except OSError as error:
            os.write(stdio.ready, str(error).encode())
    finally:
        os._exit(1)


def _execute(confinement: Confinement, start: Start, stdio: Stdio) -> NoReturn:
    os.setsid()
    for number in _RESTORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _place(stdio)
    os.umask(0o022)
    if confinement.can_mount:
        mounts.enter_namespace(with_user=False)  # its watcher is in one already, and has the right from there
        mounts.open_way(confinement.closed)
        mounts.replace(_SHARED_MEMORY, by=start.folder.shared_memory)
    os.chdir(start.folder.home)
    _limit(start, confinement)
    if start.uid is not None:
        become_user(start.uid)
    drop_capabilities()
    die_with_parent(start.protected_pids[0])
    seccomp.no_new_privileges()

    command = confinement.interpreter.command(start.folder.program)
    if confinement.bubblewrap is not None:
        _provide(seccomp.filter_program(), _FILTER_FD)
        wrapper = bubblewrap.command(confinement.bubblewrap, confinement.read_only, start.folder, _FILTER_FD)
        command = [*wrapper, *command]
    else:
        if confinement.is_landlocked:
            shared_memory = [_SHARED_MEMORY] if confinement.can_mount and os.path.isdir(_SHARED_MEMORY) else []
            read_only = [*confinement.read_only, f"/proc/self/fd/{INPUT_FD}"]  # so that /dev/stdin can be opened
            landlock.restrict(read_only, [start.folder.home, *shared_memory, *DEVICES])
        if confinement.is_filtered:
            seccomp.install(seccomp.filter_program(start.protected_pids))
    os.execve(command[0], command, confinement.interpreter.variables(start.folder.home))


def _place(stdio: Stdio) -> None:
    """Put the descriptors at their numbers; none other survives the `execve`."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE_FD) for descriptor in stdio]
    for number, descriptor in zip((INPUT_FD, 1, 2, READY_FD), moved, strict=True):
        os.dup2(descriptor, number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _provide(content: bytes, number: int) -> None:
    """Let what fits into a pipe be read from this descriptor."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    if os.write(writer, content) != len(content):
        raise OSError("the filter of system calls does not fit into a pipe")
    os.close(writer)
    os.dup2(reader, number)


def _limit(start: Start, confinement: Confinement) -> None:
    limits = start.limits
    cpu_seconds = math.ceil(limits.wall_seconds)
    wanted = {
        # At the first a signal, at the second death.
        resource.RLIMIT_CPU: (cpu_seconds, cpu_seconds + 1),
        resource.RLIMIT_AS: _both(limits.memory_bytes + _SPARE_ADDRESS_BYTES),
        resource.RLIMIT_FSIZE: _both(limits.file_bytes),
        resource.RLIMIT_NOFILE: _both(limits.num_files),
        resource.RLIMIT_STACK: _both(_STACK_BYTES),
        resource.RLIMIT_CORE: _both(0),
    }
    num_own = BUBBLEWRAP_PROCESSES if confinement.bubblewrap else 0
    if start.uid is not None:
        wanted[resource.RLIMIT_NPROC] = _both(limits.num_processes + num_own)
    elif confinement.can_mount and _counts_by_namespace():
        wanted[resource.RLIMIT_NPROC] = _both(limits.num_processes + num_own + _WATCHERS)
    for kind, (soft, hard) in wanted.items():
        allowed = resource.getrlimit(kind)[1]
        most = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
        resource.setrlimit(kind, (min(soft, most), most))
    if resource.RLIMIT_NPROC not in wanted:
        _limit_processes_roughly(limits.num_processes)


def _counts_by_namespace() -> bool:
    """Whether the kernel counts the processes of a user in each user namespace apart: since 5.14."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def _limit_processes_roughly(num_processes: int) -> None:
    """Slow down what forks without end, until it is noticed, where the kernel counts all processes of this user.

    Processes that cannot be seen from here count too; if there are so many that nothing could be started, no limit.
    """
    limit = 3 * num_processes + processes.num_tasks_of_user(os.geteuid())
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    if before[0] != resource.RLIM_INFINITY and before[0] <= limit:
        return
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, before[1]))
    try:
        pid = os.fork()
    except BlockingIOError:
        resource.setrlimit(resource.RLIMIT_NPROC, before)
        return
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def _both(value: int) -> tuple[int, int]:
    return value, value
