"""The process between the caller and a program: it starts the program, watches it, and leaves nothing of it.

It is forked for one program and adopts whatever the program starts. It does not end with its caller at once: it notices
that the channel to it is closed, kills, cleans up, and ends then. So nothing outlives a caller that is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from typing import NamedTuple, NoReturn, Optional

import msgspec

from zbgrpo.rewards.sandbox import processes
from zbgrpo.rewards.sandbox.base import End, Execution, Limits
from zbgrpo.rewards.sandbox.child import BUBBLEWRAP_PROCESSES, Start, Stdio, become_program
from zbgrpo.rewards.sandbox.confinement import Confinement
from zbgrpo.rewards.sandbox.folder import PrivateFolder
from zbgrpo.rewards.sandbox.interpreter import READY
from zbgrpo.rewards.sandbox.mounts import enter_namespace
from zbgrpo.rewards.sandbox.system import adopt_orphans, hide_memory
from zbgrpo.rewards.sandbox.users import program_user
from zbgrpo.rewards.sandbox.watch import Stream, Verdict, Watch

_STDERR_TAIL_BYTES = 4096
_KILL_PATIENCE_SECONDS = 8.0
_SIGNAL_STATUS = 128
"""Bubblewrap reports death by a signal as this plus its number, as shells do."""
_DEFAULT_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip


class Job(NamedTuple):
    """One program to run."""

    source: bytes
    stdin: bytes
    limits: Limits
    confinement: Confinement


def supervise(job: Job, channel: socket.socket, caller_pid: int) -> NoReturn:
    """Run the program in this process, just forked, and send the encoded `Execution` through the channel."""
    try:
        wakeup_fd = _detach(channel)
        execution = _run(job, channel.fileno(), wakeup_fd, caller_pid)
        channel.sendall(msgspec.msgpack.encode(execution))
    finally:
        os._exit(0)  # without a word if something went wrong: that is for the caller to notice


def infrastructure(detail: str, wall_seconds: float = 0.0) -> Execution:
    """An execution that says nothing about the program."""
    return Execution(
        end=End.INFRASTRUCTURE, exit_status=None, stdout=b"", stderr="", wall_seconds=wall_seconds, detail=detail
    )


def _detach(channel: socket.socket) -> int:
    """Let go of everything of the caller's but the channel; a descriptor that tells of children that end."""
    gc.disable()  # an object of the caller's that is collected would close a descriptor that is another one by now
    signal.set_wakeup_fd(-1)
    for number in _DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    for name in os.listdir("/proc/self/fd"):
        if int(name) != channel.fileno():
            with contextlib.suppress(OSError):
                os.close(int(name))
    # A channel below 3 can only be if the caller had closed its standard streams.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    channel.setblocking(True)
    adopt_orphans()
    wakeup, far_end = os.pipe()
    for descriptor in (wakeup, far_end):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.set_wakeup_fd(far_end, warn_on_full_buffer=False)
    return wakeup


def _run(job: Job, lifeline_fd: int, wakeup_fd: int, caller_pid: int) -> Execution:
    """Run it; afterwards no process and no file is left, or it is an infrastructure error."""
    began = time.monotonic()
    folder: Optional[PrivateFolder] = None
    uid: Optional[int] = None
    try:
        uid = program_user(os.getpid())
        if job.confinement.can_mount:
            enter_namespace(with_user=uid is None)
        hide_memory()  # not before: who is hidden may not set up a user namespace
        most_bytes = job.limits.file_bytes if job.confinement.can_mount else None
        folder = PrivateFolder(job.source, job.stdin, uid, most_bytes)
        start = Start(folder, job.limits, uid, (os.getpid(), caller_pid))
        execution = _run_in_folder(job, start, lifeline_fd, wakeup_fd)
    except OSError as error:
        execution = infrastructure(f"cannot run programs: {error}", time.monotonic() - began)
    try:
        if not processes.kill_descendants(uid, _KILL_PATIENCE_SECONDS):
            return infrastructure("a process of the program cannot be killed", time.monotonic() - began)
        if folder is not None:
            folder.remove()
    except OSError as error:
        return infrastructure(f"cannot clean up after a program: {error}", time.monotonic() - began)
    return execution


def _run_in_folder(job: Job, start: Start, lifeline_fd: int, wakeup_fd: int) -> Execution:
    """Start it, watch it to its end, kill what it leaves, and judge."""
    stdin = os.open(start.folder.stdin, os.O_RDONLY | os.O_CLOEXEC)
    os.unlink(start.folder.stdin)
    stdout, stdout_end = os.pipe()
    stderr, stderr_end = os.pipe()
    ready, ready_end = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        become_program(job.confinement, start, Stdio(stdin, stdout_end, stderr_end, ready_end))
    for descriptor in (stdin, stdout_end, stderr_end, ready_end):
        os.close(descriptor)

    limit_bytes = job.limits.output_bytes
    output, errors = Stream(stdout, limit_bytes), Stream(stderr, limit_bytes, _STDERR_TAIL_BYTES)
    num_own_tasks = BUBBLEWRAP_PROCESSES if job.confinement.bubblewrap else 0
    watch = Watch(job.limits, num_own_tasks, start.folder, (output, errors), wakeup_fd, lifeline_fd)
    status, verdict = watch.until_end(pid, began)
    wall_seconds = time.monotonic() - began
    if not processes.kill_descendants(start.uid, _KILL_PATIENCE_SECONDS):
        raise OSError("a process of the program cannot be killed")
    verdict = watch.read_output() or verdict
    os.set_blocking(ready, False)
    message = os.read(ready, 4096)
    if message != READY:
        why = "no reason given" if verdict is None else verdict.detail
        said = message.decode(errors="replace") or _readable(errors.content) or why
        return infrastructure(f"the interpreter did not start: {said}", wall_seconds)
    if status is not None and verdict is None:
        exit_status, verdict = _judge(status, bool(job.confinement.bubblewrap), bytes(errors.content))
    else:
        exit_status = None
    assert verdict is not None, "it ended, or was stopped for a reason"
    return Execution(
        end=verdict.end,
        exit_status=exit_status,
        stdout=bytes(output.content),
        stderr=_readable(errors.content),
        wall_seconds=wall_seconds,
        detail=verdict.detail,
    )


def _judge(wait_status: int, is_wrapped: bool, errors: bytes) -> tuple[Optional[int], Verdict]:
    """Exit status, as `Execution` has it, and end of a program that was not stopped."""
    code = os.waitstatus_to_exitcode(wait_status)
    if is_wrapped and _SIGNAL_STATUS < code <= _SIGNAL_STATUS + signal.NSIG:
        code = _SIGNAL_STATUS - code
    if code == -signal.SIGXCPU:
        return None, Verdict(End.TIME, "its CPU time was used up")
    if code < 0:
        return code, Verdict(End.SIGNALLED, f"ended by signal {-code}")
    last_line = errors.rstrip().rpartition(b"\n")[2]
    if code != 0 and last_line.startswith(b"MemoryError"):
        return None, Verdict(End.MEMORY, "an allocation was refused")
    return code, Verdict(End.EXITED, "")


def _readable(content: bytes | bytearray) -> str:
    """Text in which nothing can command a terminal."""
    text = content.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
