"""What both roles do at start-up: devices, dtypes, nodes, channels."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.hub_process import address_of
from zbgrpo.engine.rank import Rank
from zbgrpo.engine.startup import MAX_MESSAGE_BYTES, Document
from zbgrpo.errors import PeerLostError
from zbgrpo.observe.profiling import Profiler
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.memory import keep_freed_memory
from zbgrpo.transport.wire import Sender

DRAIN_SECONDS = 15.0
"""How long a leaving rank waits for the hub to acknowledge its last messages."""

logger = logging.getLogger(__name__)


def device_of(rank: Rank) -> torch.device:
    """This rank's GPU, or the CPU. With fewer GPUs than ranks they are shared."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank.env.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def dtype_of(config: RunConfig) -> torch.dtype:
    """The dtype that both roles compute in and weights travel in."""
    return torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32


def make_profiler(rank: Rank, log_dir: str, max_calls: int | None = None) -> Profiler:
    """The profiler of this rank, which does nothing unless it is asked for (--enable_profiling)."""
    observe, path = rank.config.observe, Path(log_dir) / "trace" / f"rank-{rank.env.rank}.json.gz"
    return Profiler(path, observe.enable_profiling, observe.profiling_steps, max_calls)


def open_trace(rank: Rank, document: Document, channel: Channel) -> None:
    """Write this rank's trace, and the hub's time in it as `channel` measures it."""
    rank.trace.open(
        Path(document.log_dir) / "trace" / f"rank-{rank.env.rank}.jsonl",
        rank.title,
        rank.env.rank,
        rank.info.role.value,
        document.run_id,
        rank.config.observe.trace_limit,
        channel.hub_clock,
    )


def log_start(rank: Rank, device: torch.device) -> None:
    """First lines of a rank's log: where it runs and with what."""
    logger.info(
        "%s of %d ranks, node %d (%s), device %s, %d threads, torch %s, Python %s",
        rank.title,
        rank.env.world_size,
        rank.env.node_rank,
        platform.node(),
        device,
        torch.get_num_threads(),
        torch.__version__,
        platform.python_version(),
    )


def gather_nodes(store: Any, rank: Rank) -> list[int]:
    """Node of every rank, by rank."""
    store.set(f"node/{rank.env.rank}", str(rank.env.node_rank))
    return [int(store.get(f"node/{other}")) for other in range(rank.env.world_size)]


def connect_to_hub(
    rank: Rank, document: Document, prepare: Callable[[Channel], None] = lambda channel: None
) -> Channel:
    """Open this rank's channel, and its trace on the hub's clock; `prepare` sets routes.

    To be called before the model is loaded, so that a rank that dies or is stopped meanwhile is missed. The hub counts
    a rank in only when it says hello.
    """
    channel = make_channel(rank.config, document, document.hub, rank.name)
    channel.doing = rank.doing
    prepare(channel)
    rank.channel = channel.start()
    open_trace(rank, document, channel)
    return channel


def make_channel(config: RunConfig, document: Document, address: dict[str, str], name: str) -> Channel:
    """A channel to a hub or relay, not started."""
    keep_freed_memory()
    transport = config.transport
    timing = Timing(transport.heartbeat_seconds, transport.peer_timeout_seconds, transport.resend_seconds)
    return Channel(address_of(address), Sender(document.run_id, name), timing, MAX_MESSAGE_BYTES)


def say_hello(channel: Channel, rank: Rank, node: int) -> None:
    """Introduce this rank and wait until the hub has heard it; raises `PeerLostError`."""
    channel.send(m.Hello(rank.env.rank, node, rank.info.dp_index))
    if not wait_drained(channel, rank.config.cluster.timeout_seconds):
        raise PeerLostError(f"the hub does not answer rank {rank.env.rank}")


def wait_drained(channel: Channel, timeout_seconds: float) -> bool:
    """Wait until everything sent has been acknowledged."""
    import time

    deadline = time.monotonic() + timeout_seconds
    while not channel.drained():
        channel.check()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
