"""What is watched while a program runs: its output, its time, and what its whole tree uses."""

from __future__ import annotations

import os
import select
import time
from typing import NamedTuple, Optional

from zbgrpo.rewards.sandbox import processes
from zbgrpo.rewards.sandbox.base import End, Limits
from zbgrpo.rewards.sandbox.folder import PrivateFolder

_CHECK_INTERVAL_SECONDS = 0.05
_MAX_CHECKING_SHARE = 0.1
"""Of the time of one core: on a machine with thousands of processes a look at them may take longer."""
_READ_BYTES = 1 << 16


class Verdict(NamedTuple):
    """Why a program was stopped."""

    end: End
    detail: str


class Stream:
    """One output of the program: all of it up to a limit, or its tail."""

    def __init__(self, descriptor: int, limit_bytes: int, tail_bytes: Optional[int] = None) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.is_open = True
        self.content = bytearray()
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._tail_bytes = tail_bytes

    @property
    def is_over(self) -> bool:
        """Whether more than the limit came."""
        return self.num_bytes > self._limit_bytes

    def read(self) -> None:
        """Take what is there now, at most up to a little more than the limit."""
        while self.is_open and not self.is_over:
            try:
                received = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            if not received:
                self.is_open = False
                return
            self.num_bytes += len(received)
            self.content += received
            if self._tail_bytes is not None:
                del self.content[: -self._tail_bytes]
            else:
                del self.content[self._limit_bytes :]


class Watch:
    """Waits until the program ends or has to be ended."""

    def __init__(
        self,
        limits: Limits,
        num_own_tasks: int,
        folder: PrivateFolder,
        streams: tuple[Stream, Stream],
        wakeup_fd: int,
        lifeline_fd: int,
    ) -> None:
        """`num_own_tasks`: processes of the tree that do not count. `wakeup_fd` becomes readable when a child ends,
        `lifeline_fd` when nobody waits for the result any more."""
        self._limits = limits
        self._num_own_tasks = num_own_tasks
        self._folder = folder
        self._streams = streams
        self._wakeup_fd = wakeup_fd
        self._lifeline_fd = lifeline_fd
        self._poll = select.poll()
        for descriptor in (wakeup_fd, lifeline_fd, *(stream.descriptor for stream in streams)):
            self._poll.register(descriptor, select.POLLIN)

    def until_end(self, pid: int, started: float) -> tuple[Optional[int], Optional[Verdict]]:
        """Wait for the program, process `pid`, child of this one: its wait status, or why it has to be stopped.

        Other children are reaped on the way. `started`: on the monotonic clock, when its time began.
        """
        deadline = started + self._limits.wall_seconds
        next_check = started + _CHECK_INTERVAL_SECONDS
        while True:
            now = time.monotonic()
            if now >= deadline:
                return None, Verdict(End.TIME, f"ran for more than {self._limits.wall_seconds:g} seconds")
            if now >= next_check:
                if (verdict := self._check_tree()) is not None:
                    return None, verdict
                checked = time.monotonic()
                next_check = checked + max(_CHECK_INTERVAL_SECONDS, (checked - now) / _MAX_CHECKING_SHARE)
                continue
            ready = {fd for fd, _ in self._poll.poll(1000 * (min(deadline, next_check) - now))}
            if self._lifeline_fd in ready:
                return None, Verdict(End.INFRASTRUCTURE, "nobody waits for the result")
            if (verdict := self.read_output(ready)) is not None:
                return None, verdict
            if self._wakeup_fd in ready:
                os.read(self._wakeup_fd, _READ_BYTES)
            if (status := processes.reap().statuses.get(pid)) is not None:
                return status, None

    def read_output(self, ready: Optional[set[int]] = None) -> Optional[Verdict]:
        """Read from these streams, by default from all; a verdict if one is over its limit."""
        for stream, name in zip(self._streams, ("output", "error"), strict=True):
            if ready is not None and stream.descriptor not in ready:
                continue
            was_open = stream.is_open
            stream.read()
            if was_open and not stream.is_open:
                self._poll.unregister(stream.descriptor)
            if stream.is_over:
                return Verdict(End.OUTPUT, f"more than {self._limits.output_bytes} bytes on standard {name}")
        return None

    def _check_tree(self) -> Optional[Verdict]:
        limits = self._limits
        pids = processes.descendants()
        usage = processes.measure(pids)
        if usage.num_tasks > limits.num_processes + self._num_own_tasks:
            return Verdict(End.MEMORY, f"more than {limits.num_processes} processes and threads")
        if usage.memory_bytes > limits.memory_bytes and processes.memory_shared_fairly(pids) > limits.memory_bytes:
            return Verdict(End.MEMORY, f"more than {limits.memory_bytes} bytes of memory")
        nameless = processes.nameless_file_bytes(pids)
        if nameless > limits.file_bytes or self._folder.holds_more_than(limits.file_bytes - nameless):
            return Verdict(End.OUTPUT, f"more than {limits.file_bytes} bytes of files")
        return None
