"""From a parsed configuration to an exit status: how a rank starts, runs its loop and ends.

The only place that catches everything: a rank that fails says so in one line, tells the hub, and ends the run.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback

from zbgrpo import failpoints
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.rank import Rank
from zbgrpo.errors import EXIT_STOPPED, EXIT_USER_ERROR, PeerLostError, UserError
from zbgrpo.observe.logs import error_line
from zbgrpo.topology.env import TorchrunEnv, failpoints_text
from zbgrpo.transport import messages as m
from zbgrpo.types import Role

logger = logging.getLogger(__name__)


def run_rank(config: RunConfig, env: TorchrunEnv) -> int:
    """Run this rank to its end; the exit status: 0 finished, 85 stopped and saved, 2 user's error, 1 failure."""
    rank = Rank(config, env)
    try:
        failpoints.arm(failpoints_text(), rank.name)
        reason = _run_role(rank)
    except PeerLostError as error:
        logger.info("%s", error)
        if not error.reported:
            print(error_line(env.rank, rank.title, error), file=sys.stderr, flush=True)
        return 1
    except UserError as error:
        _report(rank, error)
        return EXIT_USER_ERROR
    except (Exception, KeyboardInterrupt) as error:
        logger.info("%s", traceback.format_exc())  # for the log; the screen gets one line
        _report(rank, error)
        return 1
    finally:
        rank.trace.close()
    return EXIT_STOPPED if reason == "stop" else 0


def _run_role(rank: Rank) -> str:
    # Imported here, because they bring torch, which must not be loaded before the thread settings are made.
    if rank.info.role is Role.CONSUMER:
        from zbgrpo.engine.build_consumer import run_consumer

        return run_consumer(rank)
    from zbgrpo.engine.build_producer import run_producer

    return run_producer(rank)


def _report(rank: Rank, error: BaseException) -> None:
    """One line on the screen, and word to everybody else."""
    print(error_line(rank.env.rank, rank.title, error), file=sys.stderr, flush=True)
    if rank.channel is None:
        return
    try:
        cause = f"{type(error).__name__}: {error}"
        rank.channel.send(m.Failed(f"rank {rank.env.rank} ({rank.title}) failed: {cause}"))
    except PeerLostError:
        return
    deadline = time.monotonic() + 2.0
    while not rank.channel.drained() and time.monotonic() < deadline:
        time.sleep(0.01)
