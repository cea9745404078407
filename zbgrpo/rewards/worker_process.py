"""One scoring process as its parent sees it: starting, talking to it without ever blocking, killing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Optional

from zbgrpo import failpoints
from zbgrpo.rewards.messages import encode_frame, take_frame

_READ_BYTES = 1 << 16


class WorkerProcess:
    """A fresh interpreter in a process group of its own, and this end of the channel to it.

    It dies with the thread that started it, so that thread has to be the one that uses it.
    """

    def __init__(self) -> None:
        """Start it; `OSError` if the system cannot."""
        self.channel, far_end = socket.socketpair()
        with far_end, contextlib.ExitStack() as on_error:
            on_error.callback(self.channel.close)
            self._process = subprocess.Popen(
                _command(far_end.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a reward function prints belongs to stderr
                pass_fds=(far_end.fileno(),),
                start_new_session=True,
            )
            on_error.pop_all()
        self.channel.setblocking(False)
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes are waiting for room in the channel."""
        return bool(self._outgoing)

    def send(self, payload: bytes) -> None:
        """Queue one frame and write as much as fits now. `OSError` if the process is gone."""
        self._outgoing += encode_frame(payload)
        self.flush()

    def flush(self) -> None:
        """Write what the channel takes now. `OSError` if the process is gone."""
        while self._outgoing:
            try:
                num_bytes = self.channel.send(self._outgoing)
            except BlockingIOError:
                return
            del self._outgoing[:num_bytes]

    def receive(self) -> tuple[list[bytes], bool]:
        """Payloads of the frames that have arrived, and whether the channel is still open."""
        is_open = True
        while True:
            try:
                received = self.channel.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                received = b""
            if not received:
                is_open = False
                break
            self._incoming += received
        payloads = []
        while (payload := take_frame(self._incoming)) is not None:
            payloads.append(payload)
        return payloads, is_open

    def kill(self) -> None:
        """Kill the process group and close the channel; the process still has to be reaped with `has_ended`.

        The group exists as long as its leader is not reaped, so the signal cannot hit anybody else.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.channel.close()

    def has_ended(self, timeout_seconds: float = 0.0) -> bool:
        """Reap the process if it ends within this time."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def exit_status(self) -> Optional[int]:
        """Exit status, negative for a signal; None as long as the process is not reaped."""
        return self._process.returncode


def _command(channel_fd: int) -> list[str]:
    # `env` adds variables to those that are inherited. The hash seed, because sympy's order of terms follows it and a
    # verdict must not change from worker to worker. Python's own integers for sympy and mpmath, because GMP aborts the
    # process where Python raises. And the module path of this process, wherever it was started from.
    path = [entry or os.getcwd() for entry in sys.path if os.pathsep not in entry]
    return [
        "env",
        "PYTHONHASHSEED=0",
        "SYMPY_GROUND_TYPES=python",
        "MPMATH_NOGMPY=1",
        f"PYTHONPATH={os.pathsep.join(path)}",
        sys.executable,
        "-m",
        "zbgrpo.rewards.worker",
        str(channel_fd),
        str(os.getpid()),
        failpoints.armed_text(),
    ]
