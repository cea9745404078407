"""The plan on its way to the consumers of one node: entries in order, their groups through the shared-memory ring.

Writer side (hub or relay): `PlanPublisher`. Reader side (one per local consumer rank): `PlanReader`, which copies each
record out of the ring in the thread of its channel, gives it back at once, and queues whole entries for the training
loop.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zbgrpo import failpoints
from zbgrpo.errors import ProtocolError, ZbgrpoError
from zbgrpo.ledger.records import PlanEntry, PlanKind
from zbgrpo.transport.channel import Channel, Received
from zbgrpo.transport.messages import GroupHeader, Message, PlanFor, Release
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter
from zbgrpo.transport.wire import Buffer, frame_bytes, payload_from_frame
from zbgrpo.types import GroupPayload


class StoredGroup(NamedTuple):
    """A group in the hub's or a relay's memory: header and the bytes of its tensors."""

    header: GroupHeader
    frame: Buffer


class TrainGroup(NamedTuple):
    """A group as the trainer gets it."""

    header: GroupHeader
    payload: GroupPayload


class PlannedEntry(NamedTuple):
    """A plan entry with this rank's groups (empty unless TRAIN)."""

    entry: PlanEntry
    groups: list[TrainGroup]


class PlanPublisher:
    """Writes the groups of each entry into the ring and tells the readers, strictly in plan order.

    States of an entry: QUEUED -> PARTLY SENT (its next group has no room yet) -> SENT. Invariant: an entry is sent to
    all local readers, and nothing of it before the end of the entry before it. Groups are told as soon as they are
    written, so that readers make room for the next: the ring need only hold one group, whatever the size of an entry.
    It never waits: `pump` goes on when a reader's release has made room.
    """

    def __init__(self, ring: RingWriter, readers: Mapping[str, int], send: Callable[[str, Message], None]) -> None:
        """`readers`: names of the local readers, in the ring's order, to their dp_index."""
        self._ring, self._send = ring, send
        self._readers = list(readers.items())
        self._index = {name: number for number, name in enumerate(readers)}
        self._queue: deque[tuple[PlanEntry, deque[StoredGroup]]] = deque()

    def publish(self, entry: PlanEntry, groups: Mapping[int, StoredGroup]) -> None:
        """Queue an entry with the groups (by lease id, in the order of `entry.ranks`) of this node's ranks."""
        self._queue.append((entry, deque(groups.values())))
        self.pump()

    def released(self, reader: str, sequences: Sequence[int]) -> None:
        """A reader has copied these records."""
        for sequence in sequences:
            self._ring.release(self._index[reader], sequence)
        self.pump()

    def pump(self) -> None:
        """Send whatever now fits."""
        while self._queue:
            entry, waiting = self._queue[0]
            for name, headers, descriptors in self._write(entry, waiting):
                if headers or not waiting:
                    self._send(name, PlanFor(entry, headers, descriptors, complete=not waiting))
            if waiting:
                return
            self._queue.popleft()

    def _write(
        self, entry: PlanEntry, waiting: deque[StoredGroup]
    ) -> list[tuple[str, list[GroupHeader], list[Descriptor]]]:
        """Move as many groups as fit from `waiting` into the ring; what each reader got."""
        parts: list[tuple[str, list[GroupHeader], list[Descriptor]]] = [(name, [], []) for name, _ in self._readers]
        of_rank = [
            frozenset(i for i, (_, dp) in enumerate(self._readers) if dp == rank) for rank in range(len(entry.ranks))
        ]
        readers_of = {lease_id: readers for ids, readers in zip(entry.ranks, of_rank, strict=True) for lease_id in ids}
        while waiting:
            header, frame = waiting[0]
            readers = readers_of[header.lease_id]
            descriptor = self._ring.try_write_content(failpoints.damaged("ring.write", frame), header.crc, readers)
            if descriptor is None:
                break
            waiting.popleft()
            for reader in readers:
                parts[reader][1].append(header)
                parts[reader][2].append(descriptor)
        return parts

    @property
    def num_queued(self) -> int:
        return len(self._queue)


class PlanReader:
    """Iterates over the plan of one consumer rank. `next_entry` gives entries in plan order, each once."""

    def __init__(self, channel: Channel, ring: RingReader) -> None:
        self._channel, self._ring = channel, ring
        channel.deliver(PlanFor, self._arrived, self._stopped)
        self._ready: queue.SimpleQueue[PlannedEntry | ZbgrpoError] = queue.SimpleQueue()
        self._groups: list[TrainGroup] = []
        """Groups of the entry that is not complete yet."""
        self.stop_ahead = False
        """Whether STOP has arrived, perhaps behind entries that have not been taken yet."""
        self._broken = False

    def start(self) -> PlanReader:
        """Start the channel."""
        self._channel.start()
        return self

    def next_entry(self, timeout_seconds: float) -> PlannedEntry | None:
        """The next entry; None when none came in time; raises, from then on, what stopped the reader."""
        try:
            item = self._ready.get(timeout=timeout_seconds) if timeout_seconds > 0 else self._ready.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, ZbgrpoError):
            self._ready.put(item)
            raise item
        return item

    def close(self) -> None:
        """Close the channel, with whose thread nothing is read any more, and let go of the ring."""
        self._channel.close(drain_seconds=5.0)
        self._stopped(ProtocolError("the plan reader has stopped"))
        self._ring.close()

    # ------------------------------------------------------------------------------------------ the channel's thread

    def _arrived(self, received: Received) -> None:
        assert isinstance(received.message, PlanFor)
        if self._broken:
            return
        try:
            self._read(received.message)
        except ZbgrpoError as error:
            self._stopped(error)

    def _stopped(self, error: ZbgrpoError) -> None:
        self._broken = True
        self._ready.put(error)

    def _read(self, plan: PlanFor) -> None:
        if len(plan.groups) != len(plan.records):
            raise ProtocolError(f"a plan entry of {len(plan.groups)} groups with {len(plan.records)} ring records")
        for header, descriptor in zip(plan.groups, plan.records, strict=True):
            failpoints.fire("ring.read")
            frame = self._ring.read_content(descriptor, frame_bytes(header))
            if descriptor.crc != header.crc:
                raise ProtocolError(f"group {header.lease_id} was changed on its way: its checksum does not match")
            self._groups.append(TrainGroup(header, payload_from_frame(header, frame)))
        if plan.records:
            self._channel.send(Release([descriptor.sequence for descriptor in plan.records]))
        if plan.complete:
            self.stop_ahead = self.stop_ahead or plan.entry.kind is PlanKind.STOP
            self._ready.put(PlannedEntry(plan.entry, self._groups))
            self._groups = []
