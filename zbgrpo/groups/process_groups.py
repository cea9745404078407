"""The one file that makes process groups: the world, and its subgroups, made by all ranks in one order.

    world      all ranks                                       start-up and the last barrier
    consumers  ranks 0 .. num_trainers - 1                     gradients, checkpoints
    producers  the other ranks
    dp, pp, tp lines of the consumers' mesh                    sharded weights, stages, tensor parallelism
    weights/i  source consumer of pipeline stage i + producers broadcasts, from a background thread

Every group has its own connections and its own timeout, so that a broadcast never waits for a gradient.

NCCL needs a GPU of its own for every rank of a group. Each rank therefore tells the others which GPU it uses, and the
backends follow from that list alone, so that all ranks choose the same. A group whose ranks share a GPU uses gloo,
which takes CUDA tensors too (through host memory).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError, PeerLostError
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
    mesh: Any
    """A `DeviceMesh` with the axes dp, pp and tp over the consumers; None on producers and with a single consumer."""


def connect(env: TorchrunEnv, config: RunConfig) -> Store:
    """Join the rendezvous and the world group; raises `PeerLostError` when ranks are missing after the timeout."""
    timeout = timedelta(seconds=config.cluster.timeout_seconds)
    try:
        store, rank, world_size = next(rendezvous("env://", rank=env.rank, world_size=env.world_size, timeout=timeout))
        ours = PrefixStore("zbgrpo", store)
        ours.set(f"gpu/{rank}", _own_gpu(env))
        dist.init_process_group(
            group_backend(_gpus(ours, range(world_size))),
            store=PrefixStore("world", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except dist.DistError as error:
        raise PeerLostError(f"rank {env.rank} could not meet the other {env.world_size - 1} ranks: {error}") from error
    return ours


def make_groups(store: Store, topology: Topology, config: RunConfig) -> ProcessGroups:
    """Make all subgroups. Every rank calls this once, after `connect`.

    Raises `ConfigError`, on every rank, when the weights cannot travel the way that was asked for.
    """
    consumers = list(topology.consumer_ranks)
    producers = list(topology.producer_ranks)
    timeout = timedelta(seconds=config.cluster.timeout_seconds)
    weights_timeout = timedelta(seconds=config.weights.timeout_seconds)
    gpus = _gpus(store, range(topology.world_size))
    for_weights = weights_backend(config, gpus)
    return ProcessGroups(
        store,
        _new_group(consumers, timeout, group_backend([gpus[rank] for rank in consumers])),
        _new_group(producers, timeout, group_backend([gpus[rank] for rank in producers])),
        [
            _new_group(list(topology.weights_ranks(stage)), weights_timeout, for_weights)
            for stage in range(topology.pp_size)
        ],
        make_mesh(
            (topology.dp_size, topology.pp_size, topology.tp_size),
            timeout,
            group_backend([gpus[rank] for rank in consumers]),
        ),
    )


def make_mesh(sizes: tuple[int, int, int], timeout: timedelta, backend: str) -> Any:
    """The (dp, pp, tp) mesh of the lowest ranks of the world, tp fastest. Every rank of the world calls this; those
    outside of the mesh get None, and so does everybody if it has a single rank."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(math.prod(sizes)).view(sizes)
    if ranks.numel() == 1:
        return None
    me, own = dist.get_rank(), []
    for axis in range(len(sizes)):
        for line in ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist():
            group = _new_group(line, timeout, backend)
            if me in line:
                own.append(group)
    if not own:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return DeviceMesh.from_group(own, device, mesh=ranks, mesh_dim_names=("dp", "pp", "tp"))


def group_backend(gpus: Sequence[str]) -> str:
    """Backend of a group whose ranks use these GPUs: NCCL for CUDA tensors if each rank has one of its own, else
    gloo for everything."""
    return "cpu:gloo,cuda:nccl" if shared_gpu(gpus) is None else "gloo"


def weights_backend(config: RunConfig, gpus: Sequence[str]) -> str:
    """Backend of the weights groups, from the GPUs of all ranks. `auto`: nccl if each rank has its own, else gloo.

    Raises `ConfigError` for nccl between ranks that share a GPU or have none, and for nccl with staging on the CPU.
    """
    transport, shared = config.weights.transport, shared_gpu(gpus)
    if transport == "gloo" or (transport == "auto" and shared is not None):
        return "gloo"
    if shared is not None:
        raise ConfigError(
            f"--weight-transport {transport}: needs a GPU of its own for every rank, but {shared}; use auto or gloo, "
            "or start no more ranks on a node than it has GPUs"
        )
    if config.weights.staging == "cpu":
        raise ConfigError(
            f"--weight-staging cpu: nccl (--weight-transport {transport}) cannot send from the CPU; use "
            "--weight-staging device, or --weight-transport gloo, which is slower"
        )
    return "nccl"


def shared_gpu(gpus: Sequence[str]) -> str | None:
    """None if every rank has a GPU of its own, else what is in the way, for people. By rank; "" stands for no GPU."""
    users: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if not gpu:
            return f"rank {rank} has none"
        if gpu in users:
            return f"ranks {users[gpu]} and {rank} share one"
        users[gpu] = rank
    return None


def _own_gpu(env: TorchrunEnv) -> str:
    """A name of this rank's GPU that no other GPU of any node has; "" without one."""
    if not torch.cuda.is_available():
        return ""
    # By its UUID and not by counting, for a launcher may show each rank a single GPU, and two launchers one machine.
    return str(torch.cuda.get_device_properties(env.local_rank % torch.cuda.device_count()).uuid)


def _gpus(store: Store, ranks: range) -> list[str]:
    return [store.get(f"gpu/{rank}").decode() for rank in ranks]


def _new_group(ranks: list[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
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
