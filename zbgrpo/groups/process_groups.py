"""The one file that makes process groups: the world, and its subgroups, made by all ranks in one order.

    world      all ranks                                       start-up and the last barrier
    consumers  ranks 0 .. num_trainers - 1                     gradients, checkpoints
    producers  the other ranks
    weights/i  source consumer of pipeline stage i + producers broadcasts, from a background thread

Every group has its own connections and its own timeout, so that a broadcast never waits for a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import PeerLostError
from zbgrpo.topology.env import TorchrunEnv
from zbgrpo.topology.roles import Topology


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of a run. A rank holds a handle of every group; it may only use those it belongs to."""

    store: Store
    consumers: dist.ProcessGroup
    producers: dist.ProcessGroup
    weights: list[dist.ProcessGroup]
    """By pipeline stage."""


def connect(env: TorchrunEnv, config: RunConfig) -> Store:
    """Join the rendezvous and the world group; raises `PeerLostError` when ranks are missing after the timeout."""
    timeout = timedelta(seconds=config.cluster.timeout_seconds)
    try:
        store, rank, world_size = next(rendezvous("env://", rank=env.rank, world_size=env.world_size, timeout=timeout))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore("world", store), rank=rank, world_size=world_size, timeout=timeout
        )
    except dist.DistError as error:
        raise PeerLostError(f"rank {env.rank} could not meet the other {env.world_size - 1} ranks: {error}") from error
    return PrefixStore("zbgrpo", store)


def make_groups(store: Store, topology: Topology, config: RunConfig) -> ProcessGroups:
    """Make all subgroups. Every rank calls this once, after `connect`."""
    consumers = list(topology.consumer_ranks)
    producers = list(topology.producer_ranks)
    timeout = timedelta(seconds=config.cluster.timeout_seconds)
    weights_timeout = timedelta(seconds=config.weights.timeout_seconds)
    return ProcessGroups(
        store,
        _new_group(consumers, timeout, None),
        _new_group(producers, timeout, None),
        [
            _new_group(list(topology.weights_ranks(stage)), weights_timeout, weights_backend(config))
            for stage in range(topology.pp_size)
        ],
    )


def weights_backend(config: RunConfig) -> str:
    """Backend of the weights groups: nccl when every rank has a GPU of its own, else gloo."""
    if config.weights.transport != "auto":
        return "gloo" if config.weights.transport == "gloo" else "nccl"
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= config.world_size else "gloo"


def _new_group(ranks: list[int], timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    group: Any = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Around a collective: a peer that is gone or late becomes a `PeerLostError` that says what was going on."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise PeerLostError(f"{what}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The part of a collective's error message that says what happened, without paths and advice."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    found = re.search(r"(?:connection (?:closed|reset)[^.]*?by peer|timed out[^.]*|connection refused)", text, re.I)
    if found is None:
        return text[:300]
    return f"another rank is gone or silent ({found[0].lower()})"


def disconnect() -> None:
    """Leave all groups. Bounded: nothing is waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()
