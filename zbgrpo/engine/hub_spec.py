"""What consumer 0 tells the hub when it starts it, and what the hub answers. Plain JSON over the child's pipes."""

from __future__ import annotations

from typing import Any, Optional

from msgspec import Struct

from zbgrpo.ledger.records import LedgerOptions
from zbgrpo.transport.channel import Timing


class ReaderSpec(Struct, frozen=True):
    """One consumer rank: where it is, and which groups it trains."""

    rank: int
    node: int
    dp_index: int

    @property
    def name(self) -> str:
        return f"reader:{self.rank}"


class HubSpec(Struct, frozen=True, kw_only=True):
    """Everything the hub needs; a relay uses the transport part of it."""

    run_id: str
    node: int
    host: Optional[str]
    """None: `ipc://`, when all ranks are on one node."""
    curve: bool
    timing: Timing
    ring_bytes: int
    max_message_bytes: int
    readers: list[ReaderSpec]
    events_path: str
    failpoints: str = ""
    """For the tests: `zbgrpo.failpoints`."""
    trace_limit: int = 0
    """Most records of the hub's trace; 0: none is written."""
    hub_address: Optional[dict[str, str]] = None
    """For a relay: where the hub is."""
    num_rows: int = 0
    num_episodes: int = 1
    seed: int = 0
    groups_per_step: int = 1
    groups_per_minibatch: int = 1
    dp_size: int = 1
    num_producers: int = 1
    producer_ranks: list[int] = []
    """First rank of every producer."""
    leases_per_producer: int = 1
    buffer_limit: int = 1
    max_staleness: int = 2
    stale: str = "mask"
    max_steps: Optional[int] = None
    save_interval: Optional[int] = None
    eval_interval: Optional[int] = None
    eval_rows: dict[str, int] = {}
    evaluate_first: bool = False
    """Evaluate the version that the run starts with."""
    model_saved: bool = False
    """Whether the restored version has a complete model folder, so that it need not be saved again."""
    restored: Optional[dict[str, Any]] = None
    """A snapshot of the ledger; bytes in it travel as base64."""

    def peers(self) -> set[str]:
        """Names of all peers that connect to this hub or relay."""
        readers = {reader.name for reader in self.readers if reader.node == self.node}
        if self.hub_address is not None:
            return readers
        producers = {f"producer:{index}" for index in range(self.num_producers)}
        consumers = {f"consumer:{reader.rank}" for reader in self.readers}
        relays = {f"relay:{reader.node}" for reader in self.readers if reader.node != self.node}
        return producers | consumers | readers | relays

    def title(self, name: str) -> str:
        """A peer for people: `rank 2 (producer 0)`."""
        kind, _, index = name.partition(":")
        if kind == "producer" and int(index) < len(self.producer_ranks):
            return f"rank {self.producer_ranks[int(index)]} (producer {index})"
        if kind in ("consumer", "reader"):
            return f"rank {index} (consumer {index})"
        return f"relay of node {index}" if kind == "relay" else name

    def ledger_options(self, order: Any) -> LedgerOptions:
        """The ledger's share of the spec."""
        return LedgerOptions(
            num_rows=self.num_rows,
            num_episodes=self.num_episodes,
            groups_per_step=self.groups_per_step,
            groups_per_minibatch=self.groups_per_minibatch,
            dp_size=self.dp_size,
            num_producers=self.num_producers,
            leases_per_producer=self.leases_per_producer,
            buffer_limit=self.buffer_limit,
            order=order,
            max_staleness=self.max_staleness,
            stale="wait" if self.stale == "wait" else "mask",
            max_steps=self.max_steps,
            save_interval=self.save_interval,
            eval_interval=self.eval_interval,
        )


class HubStarted(Struct, frozen=True):
    """First line of the hub's standard output."""

    address: dict[str, str]
    ring_path: str
    ring_bytes: int
