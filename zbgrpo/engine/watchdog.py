"""A thread that ends this rank when its run is over and the main thread does not notice.

    waits for     nothing; it looks at the hub's word, the rank's own children and the launcher twice a second
    unblocked by  the end of the rank

The main thread may be in a collective, whose other ranks are gone or stopped, or in any call that takes long. It has
`cluster.exit_timeout_seconds` from the moment at which the run has failed. Nothing here closes what the main thread may
be using: it is like a kill, but with a line that says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path

from zbgrpo.engine.rank import Rank
from zbgrpo.errors import PeerLostError
from zbgrpo.transport import messages as m

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_LAUNCHERS = (b"torchrun", b"torch.distributed", b"slurmstepd")
_RANK_PROGRAM = b"zbgrpo.launch"


class Watchdog:
    """See the module's text."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._launcher = rank, Launcher(os.getppid())
        self._exit_seconds = rank.config.cluster.exit_timeout_seconds
        self._launcher_seconds = rank.config.transport.peer_timeout_seconds
        self._main_has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """The main thread has got to its end: all that it does from now on is bounded."""
        self._main_has_ended.set()

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._main_has_ended.wait(_LOOK_SECONDS):
            if (cause := self._cause()) is not None:
                self._end(cause)
                return

    def _cause(self) -> PeerLostError | None:
        """Why the run is over, if it is."""
        rank = self._rank
        if rank.channel is not None and rank.channel.failure is not None:
            return rank.channel.failure
        try:
            rank.check_children()
        except PeerLostError as error:
            return error
        loss = self._launcher.loss(self._launcher_seconds)
        return PeerLostError(loss) if loss is not None else None

    def _end(self, cause: PeerLostError) -> None:
        rank, channel = self._rank, self._rank.channel
        if channel is not None and channel.failure is None:
            # Nobody else knows. The hub's answer to this is what the main thread notices.
            rank.tell(cause)
            with contextlib.suppress(PeerLostError):
                channel.send(m.Failed(f"rank {rank.env.rank} ({rank.title}) failed: PeerLostError: {cause}"))
        if self._main_has_ended.wait(self._exit_seconds):
            return
        what, _ = rank.doing()
        stuck = f"{cause}; this rank was stuck ({what}) and is ended"
        logger.info("%s", stuck)
        if not cause.reported:
            rank.tell(PeerLostError(stuck))
        rank.end_children()
        end_stopped_siblings()
        os._exit(1)


class Launcher:
    """The process that started this rank: torchrun, or Slurm's daemon of the step. Anything else is not watched, since
    a shell may leave what it has started behind."""

    def __init__(self, process: int) -> None:
        self._process, self._stopped_since = process, 0.0
        self._is_watched = any(name in _command(process) for name in _LAUNCHERS)

    def loss(self, stopped_limit_seconds: float) -> str | None:
        """What is to be said of a launcher that has ended, or has been stopped for too long; None while it is well."""
        if not self._is_watched:
            return None
        if os.getppid() != self._process:
            return f"the launcher (process {self._process}) is gone"
        if _state(self._process) != "T":
            self._stopped_since = 0.0
            return None
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since <= stopped_limit_seconds:
            return None
        return f"the launcher (process {self._process}) has been stopped for {stopped_limit_seconds:.0f} s"


def end_stopped_siblings() -> None:
    """After a failure: kill the ranks of this node that are stopped. No other signal ends them, and the patience of the
    launcher (`--shutdown-timeout`) is meant for ranks that are saving."""
    launcher = os.getppid()
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        if _parent(process) == launcher and _RANK_PROGRAM in _command(process) and _state(process) == "T":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _state(process: int) -> str:
    return _fields(process)[0]


def _parent(process: int) -> int:
    return int(_fields(process)[1])


def _fields(process: int) -> list[str]:
    """State and parent of a process; a state of none if it is gone, or the system does not tell."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["", "0"]
