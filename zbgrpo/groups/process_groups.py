"""The one file that makes process groups: the world, and its subgroups, made by all ranks in one order.

    world      all ranks                                       start-up and the last barrier
    consumers  ranks 0 .. num_trainers - 1                     gradients, checkpoints
    producers  the other ranks
    dp, pp, tp lines of the consumers' mesh                    sharded weights, stages, tensor parallelism
    weights/i  source consumer of pipeline stage i + producers broadcasts, from a background thread

Every group has its own connections and its own timeout, so that a broadcast never waits for a gradient.

NCCL needs a GPU of its own for every rank of a group. Each rank therefore tells the others which GPU it uses, and the
backends follow from that list alone, so that all ranks choose the same. A group whose ranks share a GPU uses gloo,
which takes CUDA tensors too (through host memory). In the same way they learn which of them run on one machine, where
weights need not travel at all: producers read them out of the source's memory (`ipc`).
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError, PeerLostError, WeightSyncError
from zbgrpo.topology.addresses import interface_of, route_to
from zbgrpo.topology.env import TorchrunEnv, prefer_interface
from zbgrpo.topology.roles import Topology

_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of a run. A rank holds a handle of every group; it may only use those it belongs to."""

    store: Store
    consumers: dist.ProcessGroup
    producers: dist.ProcessGroup
    weights: list[dist.ProcessGroup]
    """By pipeline stage."""
    weights_transport: str
    """nccl, gloo, or ipc: through memory of the source, with gloo for the talk about it."""
    mesh: Any
    """A `DeviceMesh` with the axes dp, pp and tp over the consumers; None on producers and with a single consumer."""


def connect(env: TorchrunEnv, config: RunConfig) -> Store:
    """Join the rendezvous and the world group; raises `PeerLostError` when ranks are missing after the timeout.

    Every rank leaves its address on the way to MASTER_ADDR in the store, as `address/RANK`; empty without a route.
    """
    timeout = timedelta(seconds=config.cluster.timeout_seconds)
    try:
        store, rank, world_size = next(rendezvous("env://", rank=env.rank, world_size=env.world_size, timeout=timeout))
        start = agree_on_start(PrefixStore("zbgrpo-start", store), rank, world_size, config.cluster.timeout_seconds)
        ours = PrefixStore(f"zbgrpo-{start}", store)
        ours.set(f"gpu/{rank}", _own_gpu(env))
        ours.set(f"machine/{rank}", _own_machine(env))
        ours.set(f"address/{rank}", route_to(env.master_addr, env.master_port) or "")
        if env.local_world_size < world_size and (interface := interface_to_others(ours, env)) is not None:
            prefer_interface(interface)
        dist.init_process_group(
            group_backend(_told(ours, "gpu", world_size)),
            store=PrefixStore(f"world-{start}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (RuntimeError, dist.DistError) as error:
        hint = "" if env.local_world_size == env.world_size else "; the interface is that of GLOO_SOCKET_IFNAME, if set"
        raise PeerLostError(
            f"rank {env.rank} could not meet the other {env.world_size - 1} ranks: {reason_of(error)}{hint}"
        ) from error
    return ours


def agree_on_start(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A word that all ranks of this start get, and no other start. Every rank of it calls this.

    torchrun keeps its store when it starts all ranks again (--max-restarts), so that what an earlier start has left in
    it, addresses above all, would be taken for this one's. Nothing in the environment tells starts apart on all nodes:
    the count of restarts is that of each launcher. So every rank leaves a name that is new, and rank 0 answers each
    name that it finds with its own, until all have confirmed that one. An old name gets an answer that nobody reads.

    Raises `PeerLostError` when ranks are missing after the timeout.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout_seconds
    if rank != 0:
        store.set(f"name/{rank}", own)
        start = store.get(f"answer/{own}").decode()  # bounded by the store's own timeout
        store.set(f"confirmed/{start}/{rank}", "")
        return start
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"confirmed/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"name/{other}"]):
                store.set(f"answer/{store.get(f'name/{other}').decode()}", own)
        if missing and time.monotonic() > deadline:
            raise PeerLostError(f"ranks {sorted(missing)} have not come within {timeout_seconds:.0f} s")
        time.sleep(_LOOK_SECONDS if missing else 0.0)
    return own


def make_groups(store: Store, topology: Topology, config: RunConfig) -> ProcessGroups:
    """Make all subgroups. Every rank calls this once, after `connect`.

    Raises `ConfigError`, on every rank, when the weights cannot travel the way that was asked for.
    """
    consumers = list(topology.consumer_ranks)
    producers = list(topology.producer_ranks)
    timeout = timedelta(seconds=config.cluster.timeout_seconds)
    weights_timeout = timedelta(seconds=config.weights.timeout_seconds)
    gpus = _told(store, "gpu", topology.world_size)
    machines = _told(store, "machine", topology.world_size)
    lines = [topology.weights_ranks(stage) for stage in range(topology.pp_size)]
    transport = weights_transport(config, gpus, machines, lines)
    return ProcessGroups(
        store,
        _new_group(consumers, timeout, group_backend([gpus[rank] for rank in consumers])),
        _new_group(producers, timeout, group_backend([gpus[rank] for rank in producers])),
        [_new_group(list(ranks), weights_timeout, "gloo" if transport == "ipc" else transport) for ranks in lines],
        transport,
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


def weights_transport(
    config: RunConfig, gpus: Sequence[str], machines: Sequence[str], lines: Sequence[Sequence[int]]
) -> str:
    """How weights travel, from the GPUs and machines of all ranks; `lines`: the ranks of each weights group.

    `auto`: nccl if each rank has a GPU of its own, else ipc if the ranks of each line are on one machine, all with a
    GPU or all without, else gloo. Raises `ConfigError` for nccl between ranks that share a GPU or have none, for nccl
    with staging on the CPU, and for ipc between ranks that cannot reach each other's memory.
    """
    transport, shared = config.weights.transport, shared_gpu(gpus)
    if transport == "gloo":
        return "gloo"
    if transport == "ipc" or (transport == "auto" and shared is not None):
        obstacle = next(filter(None, (_apart(ranks, gpus, machines) for ranks in lines)), None)
        if obstacle is None:
            return "ipc"
        if transport == "auto":
            return "gloo"
        raise ConfigError(f"--weight-transport ipc: {obstacle}; use auto or gloo")
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


def _apart(ranks: Sequence[int], gpus: Sequence[str], machines: Sequence[str]) -> str | None:
    """None if these ranks can read each other's memory, else what is in the way, for people."""
    source = ranks[0]
    for rank in ranks[1:]:
        if machines[rank] != machines[source]:
            return f"ranks {source} and {rank} are on different machines, or in different containers"
        if bool(gpus[rank]) != bool(gpus[source]):
            return f"one of ranks {source} and {rank} has a GPU and the other has none"
    return None


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


def interface_to_others(store: Store, env: TorchrunEnv) -> str | None:
    """The network interface over which this node reaches the others: that of its address on the way to MASTER_ADDR.
    None if there is none.

    By itself gloo takes the address that the machine's own name has, which is often a loopback address in /etc/hosts,
    or of another network. The same file may make MASTER_ADDR a loopback address on its own node: there it is the
    interface on the way to the first rank that is elsewhere. `store` has the addresses of all ranks.
    """
    own: str = store.get(f"address/{env.rank}").decode()
    if own and _is_loopback(own):
        # Where all are on loopback, the nodes are launchers on one machine.
        others = filter(None, _told(store, "address", env.world_size))
        own = next((route_to(other, env.master_port) or own for other in others if not _is_loopback(other)), own)
    return interface_of(own) if own else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _own_gpu(env: TorchrunEnv) -> str:
    """A name of this rank's GPU that no other GPU of any node has; "" without one."""
    if not torch.cuda.is_available():
        return ""
    # By its UUID and not by counting, for a launcher may show each rank a single GPU, and two launchers one machine.
    return str(torch.cuda.get_device_properties(env.local_rank % torch.cuda.device_count()).uuid)


def _own_machine(env: TorchrunEnv) -> str:
    """A name that ranks share if they can open each other's memory through /proc: node, boot, process namespace and
    user are the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"rank {env.rank}"
    return f"{env.node_rank} {boot} {namespace} {os.geteuid()}"


def _told(store: Store, key: str, world_size: int) -> list[str]:
    """What each rank has told of itself, by rank."""
    return [store.get(f"{key}/{rank}").decode() for rank in range(world_size)]


def _new_group(ranks: list[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    group: Any = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group


_running: list[str] = []
_GONE = "another rank is gone or silent"


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Around a collective of the main thread: a peer that is gone or late becomes a `PeerLostError` that says what was
    going on."""
    _running.append(what)
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise PeerLostError(f"{what}: {reason_of(error)}") from error
    finally:
        _running.pop()


def running_collective() -> str | None:
    """What the main thread is doing together with other ranks; None if nothing. Any thread may ask."""
    return next(reversed(tuple(_running)), None)


def says_rank_is_lost(error: BaseException) -> bool:
    """Whether this error of a collective, or of something that used one, comes from another rank's end or silence."""
    collective_failed = isinstance(error, (RuntimeError, PeerLostError, WeightSyncError))
    return collective_failed and (_GONE in str(error) or _GONE in reason_of(error))


def reason_of(error: BaseException) -> str:
    """The part of a collective's error message that says what happened, without paths and advice."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    found = re.search(
        r"(?:connection (?:closed|reset)[^.]*?by peer|timed out[^.]*|connection refused|broken pipe)", text, re.I
    )
    if found is None:
        return text[:300]
    return f"{_GONE} ({found[0].lower()})"


def disconnect() -> None:
    """Leave all groups. Bounded: nothing is waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()
