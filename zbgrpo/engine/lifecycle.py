"""From a parsed configuration to an exit status: how a rank starts, runs its loop and ends.

The only place that catches everything: a rank that fails says so in one line, tells the hub, and ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback

from zbgrpo import failpoints
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.rank import Rank
from zbgrpo.engine.watchdog import Watchdog, end_stopped_siblings
from zbgrpo.errors import EXIT_STOPPED, EXIT_USER_ERROR, PeerLostError, UserError
from zbgrpo.groups.process_groups import says_rank_is_lost
from zbgrpo.topology.env import TorchrunEnv, failpoints_text
from zbgrpo.transport import messages as m
from zbgrpo.types import Role

logger = logging.getLogger(__name__)

_NAMING_SECONDS = 15.0
"""How long a rank whose collective has failed waits for the hub to say who is lost. A stopped process loses its
connection within some seconds, one that is gone at once."""


def run_rank(config: RunConfig, env: TorchrunEnv) -> int:
    """Run this rank to its end; the exit status: 0 finished, 85 stopped and saved, 2 user's error, 1 failure."""
    rank = Rank(config, env)
    watchdog = Watchdog(rank)
    watchdog.start()
    try:
        failpoints.arm(failpoints_text(), rank.name)
        reason = _run_role(rank)
    except (Exception, KeyboardInterrupt) as error:
        watchdog.stop()
        logger.info("%s", traceback.format_exc())  # for the log; the screen gets one line
        _report(rank, _cause(rank, error))
        rank.end_children()
        end_stopped_siblings()
        return EXIT_USER_ERROR if isinstance(error, UserError) else 1
    finally:
        watchdog.stop()
        rank.trace.close()
    return EXIT_STOPPED if reason == "stop" else 0


def _run_role(rank: Rank) -> str:
    # Imported here, because they bring torch, which must not be loaded before the thread settings are made.
    if rank.info.role is Role.CONSUMER:
        from zbgrpo.engine.build_consumer import run_consumer

        return run_consumer(rank)
    from zbgrpo.engine.build_producer import run_producer

    return run_producer(rank)


def _cause(rank: Rank, error: BaseException) -> BaseException:
    """What has ended this rank: its own error, or the loss of a process that others have noticed before, or know more
    of. A collective that fails does not say which rank is gone; the hub sees who is not there any more."""
    channel, is_loss = rank.channel, says_rank_is_lost(error)
    if channel is None or not (is_loss or isinstance(error, PeerLostError)):
        return error
    if is_loss and channel.failure is None:
        with contextlib.suppress(PeerLostError):
            channel.send(m.Failed(_failed_text(rank, error), lost=True))
        channel.wait_for_failure(_NAMING_SECONDS)
    return channel.failure or error


def _report(rank: Rank, error: BaseException) -> None:
    """One line on the screen, and word to everybody else; neither if the hub has told it."""
    channel = rank.channel
    if not (isinstance(error, PeerLostError) and error.reported):
        rank.tell(error)
    if channel is None or channel.failure is not None:
        return
    with contextlib.suppress(PeerLostError):
        channel.send(m.Failed(_failed_text(rank, error)))
    deadline = time.monotonic() + 2.0
    while not channel.drained() and channel.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)


def _failed_text(rank: Rank, error: BaseException) -> str:
    return f"rank {rank.env.rank} ({rank.title}) failed: {type(error).__name__}: {error}"
