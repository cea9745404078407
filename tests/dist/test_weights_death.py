"""Weights between processes of which one dies or falls silent: an error in time, and never half a version."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import weight_ends
from tests.support.ranks import run_ranks
from tests.support.weight_ends import BUCKET_BYTES, Net, Sink, Source, same
from zbgrpo.errors import ZbgrpoError
from zbgrpo.weights.manifest import WeightManifest

PEER_TIMEOUT_SECONDS = 3.0
PATIENCE_SECONDS = 30.0
WIDTH = 20_000  # too much to fit into socket buffers


def error_of(call: Callable[[], Any]) -> str:
    """The error of the package that `call`, tried again and again, raises within the patience; else empty."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            call()
        except ZbgrpoError as error:
            return f"{type(error).__name__}: {error}"
        time.sleep(0.01)
    return ""


def death(rank: int, store: Any, shared: bool) -> dict[str, str]:
    weight_ends.SHARED_MEMORY = shared
    timeout = timedelta(seconds=PEER_TIMEOUT_SECONDS)
    with_silent = dist.new_group([0, 1], timeout=timeout)
    with_dead_sink = dist.new_group([0, 1, 3], timeout=timeout)
    with_dead_source = dist.new_group([0, 1, 2], timeout=timeout)
    stores = {name: dist.PrefixStore(name, store) for name in ("silent", "sink", "source")}
    found: dict[str, str] = {}
    if rank == 0:
        source = Source(with_silent, stores["silent"], torch.float32, width=WIDTH)
        source.publish(1)  # rank 1 never joins
        found["silent sink"] = error_of(lambda: source.publisher.flush(0.1))
        found["after it"] = error_of(lambda: source.publish(2))
    dist.barrier()
    if rank == 3:
        assert stores["sink"].get("announce/1")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        source = Source(with_dead_sink, stores["sink"], torch.float32, width=WIDTH)
        source.publish(1)
        found["dead sink"] = error_of(lambda: source.publisher.flush(0.1))
    if rank == 1:
        sink = Sink(with_dead_sink, stores["sink"], torch.float32, width=WIDTH)
        sink.subscriber.expect(sink.next_announced())
    weight_ends.SHARED_MEMORY = False  # of a dead source nothing arrives in either way; a part of it, when it is sent
    if rank == 2:
        bucket = torch.zeros(WeightManifest.of(Net(0, width=WIDTH), torch.float32, BUCKET_BYTES).bucket_sizes[0])
        store.wait(["ready/0", "ready/1"])
        dist.broadcast(bucket.to(torch.uint8), src=2, group=with_dead_source)
        os.kill(os.getpid(), signal.SIGKILL)  # one bucket of several has been sent
    if rank in (0, 1):
        sink = Sink(with_dead_source, stores["source"], torch.float32, source=2, width=WIDTH)
        kept = {name: tensor.clone() for name, tensor in sink.live.items()}
        sink.subscriber.expect(9)
        store.set(f"ready/{rank}", "")
        found["dead source"] = error_of(sink.subscriber.ready)
        found["used"] = "nothing" if sink.subscriber.apply() is None and same(sink.live, kept) else "half"
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["broadcast", "memory"])
def test_dead_and_silent_peers_are_errors_within_the_timeout(shared: bool) -> None:
    first, second, *_ = run_ranks(4, death, 3 * PATIENCE_SECONDS, shared, dying=(2, 3))
    for name in ("silent sink", "after it", "dead sink"):
        assert first[name].startswith("WeightSyncError: broadcast 1 of the weights failed"), (name, first)
    for found in (first, second):
        assert found["dead source"].startswith("WeightSyncError: receiving new weights failed"), found
        assert found["used"] == "nothing"
