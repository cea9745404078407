"""One program from the caller's side: fork its supervisor, wait for the result, believe nothing to take for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Optional

import msgspec

from zbgrpo.rewards.sandbox.base import End, Execution, Limits
from zbgrpo.rewards.sandbox.confinement import Confinement
from zbgrpo.rewards.sandbox.supervisor import Job, infrastructure, supervise

_SUPERVISOR_GRACE_SECONDS = 20.0
"""What a supervisor may take beyond the program's time on a machine that is overloaded; it needs milliseconds."""
_SUPERVISOR_CLEANUP_SECONDS = 5.0
_REAP_INTERVAL_SECONDS = 0.002
_READ_BYTES = 1 << 20


def run_confined(confinement: Confinement, source: str, stdin: bytes, limits: Limits) -> Execution:
    """Run a program to its end. The calling process forks, so this is for processes with one thread, or with threads
    that hold no locks for long."""
    job = Job(source.encode(errors="surrogatepass"), stdin, limits, confinement)
    began = time.monotonic()
    caller_pid = os.getpid()
    try:
        channel, far_end = socket.socketpair()
    except OSError as error:
        return infrastructure(f"cannot run programs: {error}")
    pid: Optional[int] = None
    with channel:
        with far_end:
            try:
                pid = os.fork()
            except OSError as error:
                return infrastructure(f"cannot run programs: {error}")
            if pid == 0:
                supervise(job, far_end, caller_pid)
        try:
            answer = _receive(channel, began + limits.wall_seconds + _SUPERVISOR_GRACE_SECONDS)
        finally:  # also if this is interrupted: without the channel the supervisor kills, cleans up and ends
            channel.close()
            status = _await_end(pid)
    return _execution(answer, status, confinement, time.monotonic() - began)


def _receive(channel: socket.socket, deadline: float) -> Optional[bytes]:
    """All that comes until the supervisor closes its end; None if it does not within the time."""
    answer = bytearray()
    while True:
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            received = channel.recv(_READ_BYTES)
        except TimeoutError:
            return None
        except ConnectionError:
            received = b""
        if not received:
            return bytes(answer)
        answer += received


def _await_end(pid: int) -> int:
    """Reap the supervisor, if need be by force; its wait status."""
    deadline = time.monotonic() + _SUPERVISOR_CLEANUP_SECONDS
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # the caller ignores SIGCHLD
            return 0
        if found:
            return status
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_REAP_INTERVAL_SECONDS)


def _execution(answer: Optional[bytes], status: int, confinement: Confinement, wall_seconds: float) -> Execution:
    if answer is None:
        return infrastructure("the supervisor of the program did not answer in time", wall_seconds)
    try:
        return msgspec.msgpack.decode(answer, type=Execution)
    except msgspec.DecodeError:
        pass
    if os.WIFSIGNALED(status) and confinement.level == 0 and os.geteuid() != 0:
        # At this level a program may signal it, and must not gain from that.
        return Execution(
            end=End.SIGNALLED,
            exit_status=-os.WTERMSIG(status),
            stdout=b"",
            stderr="",
            wall_seconds=wall_seconds,
            detail="the supervisor of the program was killed",
        )
    return infrastructure("the supervisor of the program was lost", wall_seconds)
