"""A further rank of a producer of several: the engine of its first rank works in its place.

consumes      nothing
waits for     the end of its producer
unblocked by  the first rank, through the rendezvous store; the loss of that store

It holds the place (a GPU, some cores) that the launcher has counted, and the engine's worker uses.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbgrpo.engine import startup
from zbgrpo.engine.common import device_of, gather_nodes, log_start
from zbgrpo.engine.rank import Rank
from zbgrpo.errors import PeerLostError
from zbgrpo.groups.process_groups import connect, disconnect, make_groups
from zbgrpo.observe.logs import setup_rank_logging

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


def run_follower(rank: Rank) -> str:
    """Join, keep the place, leave. Returns why the run ended."""
    store = connect(rank.env, rank.config)
    gather_nodes(store, rank)
    document = startup.receive(store)
    setup_rank_logging(Path(document.log_dir), rank.env.rank, f"{rank.title}, part {rank.info.tp_index}")
    make_groups(store, rank.topology, rank.config)
    log_start(rank, device_of(rank))
    dist.barrier()
    rank.stop.install()  # the first rank asks for the stop, and ends this one with it
    reason = _wait_for_end(store, rank.info.index)
    disconnect()
    return reason


def tell_end(store: Any, rank: Rank, reason: str) -> None:
    """First rank: let the others of its producer leave."""
    if rank.topology.producer_tp_size > 1:
        store.set(_key(rank.info.index), reason)


def _wait_for_end(store: Any, producer: int) -> str:
    while True:
        try:
            store.wait([_key(producer)], timedelta(seconds=_LOOK_SECONDS))
            reason: bytes = store.get(_key(producer))
            return reason.decode()
        except dist.DistStoreError:
            continue  # not yet; a rank that fails ends the run, and this process with it
        except (dist.DistError, RuntimeError) as error:
            raise PeerLostError(f"the rendezvous store is gone: {error}") from error


def _key(producer: int) -> str:
    return f"producer/{producer}/ended"
