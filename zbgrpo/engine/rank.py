"""What every part of a rank needs to know of it: configuration, place, signals, its connection to the hub."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from types import FrameType

from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.hub_process import ChildProcess
from zbgrpo.errors import PeerLostError
from zbgrpo.observe.logs import error_line
from zbgrpo.observe.timeledger import STARTUP, TimeLedger
from zbgrpo.observe.trace import Trace
from zbgrpo.topology.env import TorchrunEnv
from zbgrpo.topology.roles import Topology
from zbgrpo.transport.channel import Channel

CHILD_EXIT_SECONDS = 4.0
"""How long the hub or a relay may go on when its rank has failed: it tells its peers."""


class StopSignal:
    """Remembers that the job was asked to stop: SIGTERM, SIGUSR1, or the first Ctrl-C."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def install(self) -> None:
        """Catch the signals from now on. A second Ctrl-C interrupts at once."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._caught)

    def requested(self) -> str | None:
        """Name of the signal, or None."""
        return self._reason

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Rank:
    """What the ends of a rank need to know of it, wherever it has got to."""

    def __init__(self, config: RunConfig, env: TorchrunEnv) -> None:
        self.config, self.env = config, env
        self.topology = Topology.build(config, env.world_size)
        self.info = self.topology[env.rank]
        self.stop = StopSignal()
        self.channel: Channel | None = None
        self.started = time.monotonic()
        self.trace = Trace(config.observe.trace)
        self.children: list[ChildProcess] = []
        self.time: TimeLedger | None = None
        self._told = threading.Lock()

    @property
    def title(self) -> str:
        """Role and number, for people."""
        return f"{self.info.role.value} {self.info.index}"

    @property
    def name(self) -> str:
        """The peer name of this rank."""
        return f"{self.info.role.value}:{self.info.index}"

    def tell(self, error: BaseException) -> None:
        """The one line on the screen that says why this rank ends; the first error is the one that is told."""
        if self._told.acquire(blocking=False):
            with contextlib.suppress(OSError):  # nobody may be reading any more
                sys.stderr.write(error_line(self.env.rank, self.title, error) + "\n")  # at once: others write here too
                sys.stderr.flush()

    def doing(self) -> tuple[str, bool]:
        """What the main thread is at, and whether it waits for other ranks in that. Any thread may ask."""
        from zbgrpo.groups.process_groups import running_collective  # brings torch

        if (what := running_collective()) is not None:
            return what, True
        return self.time.current if self.time is not None else STARTUP, False

    def check_children(self) -> None:
        """Raise `PeerLostError` if a process of this rank has failed."""
        for child in self.children:
            if (status := child.poll()) not in (None, 0):
                raise PeerLostError(f"the {child.title} ended with status {status}")

    def end_children(self) -> None:
        """After a failure: give them a moment to tell others, then make sure of their end."""
        for child in self.children:
            child.close(CHILD_EXIT_SECONDS)
