"""What every part of a rank needs to know of it: configuration, place, signals, its connection to the hub."""

from __future__ import annotations

import signal
import time
from types import FrameType

from zbgrpo.config.schema import RunConfig
from zbgrpo.observe.trace import Trace
from zbgrpo.topology.env import TorchrunEnv
from zbgrpo.topology.roles import Topology
from zbgrpo.transport.channel import Channel


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

    @property
    def title(self) -> str:
        """Role and number, for people."""
        return f"{self.info.role.value} {self.info.index}"

    @property
    def name(self) -> str:
        """The peer name of this rank."""
        return f"{self.info.role.value}:{self.info.index}"
