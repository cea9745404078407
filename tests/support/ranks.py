"""Real processes that meet in a process group: start n, wait for all with a deadline, leave none behind."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
if sys.platform == "linux":
    ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"  # the name of a test machine need not resolve


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    timeout_seconds: float,
    *args: Any,
    dying: Collection[int] = (),
) -> list[Any]:
    """Call `function(rank, store, *args)` in `num_ranks` fresh processes of one gloo group; returns the results.

    `function` must be importable; `store` is a key-value store that all share. Ranks in `dying` are expected to end
    without a result. Fails with the traceback of the first rank that raises, or with the ranks that are late.
    """
    context = mp.get_context("spawn")
    results: list[Any] = [None] * num_ranks
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, ENVIRONMENT):
        pipes, children = {}, []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(
                target=_child, args=(rank, num_ranks, folder, sender, timeout_seconds, function, args), daemon=True
            )
            child.start()
            sender.close()
            pipes[receiver] = rank
            children.append(child)
        try:
            _collect(pipes, results, dying, time.monotonic() + timeout_seconds)
        finally:
            for child in children:
                child.join(0 if sys.exc_info()[0] else 10)
                if child.is_alive():
                    child.kill()
                    child.join()
    return results


def _collect(pipes: dict[Any, int], results: list[Any], dying: Collection[int], deadline: float) -> None:
    while pipes:
        for pipe in multiprocessing.connection.wait(list(pipes), max(0.0, deadline - time.monotonic())):
            rank = pipes.pop(pipe)
            try:
                error, value = pipe.recv()
            except EOFError:
                assert rank in dying, f"rank {rank} died without a result"
                continue
            assert error is None, f"rank {rank} failed:\n{error}"
            results[rank] = value
        assert not pipes or time.monotonic() < deadline, f"ranks {sorted(pipes.values())} are late"


def _child(
    rank: int,
    num_ranks: int,
    folder: str,
    pipe: Any,
    timeout_seconds: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        store.set_timeout(timedelta(seconds=timeout_seconds))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", store),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_seconds),
        )
        pipe.send((None, function(rank, dist.PrefixStore("test", store), *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    pipe.close()
    # Threads that wait for dead peers must not keep this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
