"""The plan on its way to the consumers of one node: entries in order, their groups through the shared-memory ring.

Writer side (hub or relay): `PlanPublisher`. Reader side (one per local consumer rank): `PlanReader`, which copies each
record out of the ring in the thread of its channel, gives it back at once, and queues whole entries for the training
loop.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zbgrpo import failpoints
from zbgrpo.errors import ProtocolError, ZbgrpoError
from zbgrpo.ledger.records import PlanEntry, PlanKind
from zbgrpo.transport.channel import Channel, Received
from zbgrpo.transport.messages import GroupHeader, Message, PlanFor, Release
from zbgrpo.transport.ring import RingReader, RingWriter
from zbgrpo.transport.wire import Buffer, frame_bytes, payloads_from_frames
from zbgrpo.types import GroupPayload

_RECORDS_IN_RING = 8
_MAX_RECORD_BYTES = 8 << 20
"""The groups of a record are at most this much, and this share of the ring, unless there is only one: readers copy one
record while the next one is written, and a reader's other threads wait while it does."""


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


class _Share(NamedTuple):
    """What is still to be sent of an entry to the readers of one data-parallel rank, which get the same groups."""

    readers: frozenset[int]
    groups: deque[StoredGroup]


class PlanPublisher:
    """Writes the groups of each entry into the ring and tells the readers, strictly in plan order.

    States of an entry: QUEUED -> PARTLY SENT (its next record has no room yet) -> SENT. Invariant: an entry is sent to
    all local readers, and nothing of it before the end of the entry before it. The groups of one rank are written
    together, in one record or a few, and a record is told as soon as it is written, so that readers make room for the
    next: the ring need only hold one group, whatever the size of an entry. It never waits: `pump` goes on when a
    reader's release has made room.
    """

    def __init__(self, ring: RingWriter, readers: Mapping[str, int], send: Callable[[str, Message], None]) -> None:
        """`readers`: names of the local readers, in the ring's order, to their dp_index."""
        self._ring, self._send = ring, send
        self._names = list(readers)
        self._index = {name: number for number, name in enumerate(readers)}
        ranks: dict[int, set[int]] = {}
        for number, dp in enumerate(readers.values()):
            ranks.setdefault(dp, set()).add(number)
        self._readers_of = {dp: frozenset(numbers) for dp, numbers in ranks.items()}
        self._max_bytes = min(ring.capacity_bytes // _RECORDS_IN_RING, _MAX_RECORD_BYTES)
        self._queue: deque[tuple[PlanEntry, deque[_Share]]] = deque()

    def publish(self, entry: PlanEntry, groups: Mapping[int, StoredGroup]) -> None:
        """Queue an entry with the groups (by lease id) of this node's ranks; `ProtocolError` if one is not there."""
        shares: deque[_Share] = deque()
        try:
            for dp, readers in self._readers_of.items():
                ids = entry.ranks[dp] if entry.ranks else []
                shares.append(_Share(readers, deque([groups[lease_id] for lease_id in ids])))
        except (KeyError, IndexError) as error:
            raise ProtocolError(f"plan entry {entry.sequence} lacks a group or a rank: {error}") from error
        self._queue.append((entry, shares))
        self.pump()

    def released(self, reader: str, sequence: int) -> None:
        """A reader has copied this record."""
        self._ring.release(self._index[reader], sequence)
        self.pump()

    def pump(self) -> None:
        """Send whatever now fits."""
        while self._queue:
            entry, shares = self._queue[0]
            while shares:
                if not self._send_share(entry, shares[0]):
                    return
                shares.popleft()
            self._queue.popleft()

    def _send_share(self, entry: PlanEntry, share: _Share) -> bool:
        """Whether all of it could be sent."""
        while True:
            part, record = self._next_part(share.groups), None
            if part:
                frames = [group.frame for group in part]
                frames[0] = failpoints.damaged("ring.write", frames[0])
                record = self._ring.try_write(frames, share.readers)
                if record is None:
                    return False
                for _ in part:
                    share.groups.popleft()
            message = PlanFor(entry, [group.header for group in part], record, complete=not share.groups)
            for reader in share.readers:
                self._send(self._names[reader], message)
            if message.complete:
                return True

    def _next_part(self, waiting: deque[StoredGroup]) -> list[StoredGroup]:
        """The groups of the next record: at least one, if there is one."""
        part: list[StoredGroup] = []
        num_bytes = 0
        for group in waiting:
            num_bytes += len(group.frame)
            if part and num_bytes > self._max_bytes:
                break
            part.append(group)
        return part

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
        self._groups += read_groups(self._ring, plan)
        if plan.record is not None:
            self._channel.send(Release(plan.record.sequence))
        if plan.complete:
            self.stop_ahead = self.stop_ahead or plan.entry.kind is PlanKind.STOP
            self._ready.put(PlannedEntry(plan.entry, self._groups))
            self._groups = []


def read_groups(ring: RingReader, plan: PlanFor) -> list[TrainGroup]:
    """Copy the groups of a message out of the ring; the record can be released then. Raises `ProtocolError` unless
    every one of them is what its producer made."""
    if plan.record is None or not plan.groups:
        if plan.record is not None or plan.groups:
            raise ProtocolError(f"a plan entry of {len(plan.groups)} groups, with the ring record {plan.record}")
        return []
    failpoints.fire("ring.read")
    (content,) = ring.read(plan.record, [sum(map(frame_bytes, plan.groups))])
    payloads = payloads_from_frames(plan.groups, content)
    return list(map(TrainGroup, plan.groups, payloads))
