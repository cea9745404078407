"""A shared-memory ring: one writer process, several reader processes of one node. Memory and bookkeeping, no I/O.

The bytes of a record are in shared memory; that it exists is told to the readers by a `Descriptor` which the caller
sends on a socket. A flag in the shared memory could not do that: on a CPU that reorders stores a reader may see the
flag before the bytes. A message through the kernel orders both; checksums of what a record holds travel in it too.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import msgspec

from zbgrpo.errors import ProtocolError, ResourceError
from zbgrpo.transport import ring_file
from zbgrpo.transport.ring_file import Memory, RingFile

ALIGNMENT_BYTES = 64
"""Records begin at multiples of this, a cache line."""

_RECORD_MAGIC = b"zbgrecd1"
_RECORD_HEADER = struct.Struct("<8sQQ40x")  # magic, sequence, length, padding: 64 bytes

Frame = Union[memoryview, bytes, bytearray]


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Where a record is; what the writer sends to each reader of it. `offset` and `length` are in bytes."""

    sequence: int
    offset: int
    length: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def record_bytes(num_bytes: int) -> int:
    """Bytes of the ring that a record of this much content takes: with its header, and padded to 64."""
    return _RECORD_HEADER.size + _aligned(num_bytes)


@dataclass
class _Record:
    """A record that still occupies the ring. Positions count up for ever; modulo the capacity they are offsets."""

    start: int
    readers: frozenset[int]
    pending: set[int]


class RingWriter:
    """The writing end: places records, and takes their space back when their readers have released them.

    States of a record::

        try_write -> LIVE: at least one of its readers has yet to release it
                  -> RELEASED: by all its readers, but an older record is still live
                  -> RECLAIMED: it and every older record are released; its bytes may be written again

    Guarantees:

    - The bytes of a record do not change until all its readers have released it.
    - Records lie one after the other in order of their sequence, each in one piece; a record that does not fit before
      the end of the ring starts at its beginning. So does one for which there is as much room there as all live records
      take: a ring from which records are taken at once stays small, and in the processor's cache.
    - `used_bytes`, from the start of the oldest record that is not reclaimed to the end of the newest, never exceeds
      `capacity_bytes`. An empty ring starts at its beginning again, so it takes any record up to `capacity_bytes`.
    - All memory is reserved by `create`: no later write can fail for lack of memory. No call waits, and a call that
      raises changes nothing.

    A ring of 512 bytes, two readers. A frame of 100 bytes is padded to 128 and has a header of 64:

    >>> ring = RingWriter.create("example", capacity_bytes=512, num_readers=2)
    >>> both, one = frozenset([0, 1]), frozenset([1])
    >>> first = ring.try_write([b"a" * 100], both)
    >>> second = ring.try_write([b"b" * 60, b"b" * 40], one)
    >>> (first.sequence, first.offset, first.length), (second.sequence, second.offset, second.length)
    ((0, 0, 192), (1, 192, 192))

    128 bytes are left at the end, too few, and the beginning is not free before both readers have released `first`:

    >>> ring.try_write([b"c" * 100], frozenset([0])) is None
    True
    >>> ring.release(0, sequence=0)
    >>> ring.try_write([b"c" * 100], frozenset([0])) is None
    True
    >>> ring.release(1, sequence=0)
    >>> third = ring.try_write([b"c" * 100], frozenset([0]))
    >>> third.sequence, third.offset, ring.live_records, ring.used_bytes
    (2, 0, 2, 512)

    `third` is released before `second`, but its space comes back only together with that of `second`:

    >>> ring.release(0, sequence=2)
    >>> ring.live_records, ring.used_bytes
    (2, 512)
    >>> ring.release(1, sequence=1)
    >>> ring.live_records, ring.used_bytes
    (0, 0)
    >>> ring.close()

    One thread at a time may use it.
    """

    def __init__(self, file: RingFile, capacity_bytes: int, num_readers: int) -> None:
        """Use `create` or `create_anonymous`."""
        self.path = file.path
        self.capacity_bytes = capacity_bytes
        self._num_readers = num_readers
        self._all_readers = frozenset(range(num_readers))
        self._file = file
        self._view = memoryview(file.memory)
        self._records: collections.deque[_Record] = collections.deque()
        self._next_sequence = 0
        self._end = 0  # position after the newest record
        self._linked = True

    @classmethod
    def create(cls, name_hint: str, capacity_bytes: int, num_readers: int) -> RingWriter:
        """Create the file that holds the ring, reserve all its memory and map it; see `ring_file.create_named`.

        `capacity_bytes` is rounded up to a multiple of 64. Raises `ResourceError` when there is no room for it.
        """
        if capacity_bytes < 1 or num_readers < 1:
            raise ValueError(f"a ring needs bytes and readers, not {capacity_bytes} and {num_readers}")
        capacity_bytes = _aligned(capacity_bytes)
        return cls(ring_file.create_named(name_hint, capacity_bytes), capacity_bytes, num_readers)

    @classmethod
    def create_anonymous(cls, name_hint: str, capacity_bytes: int) -> RingWriter:
        """The same for a single reader, in memory without a name; see `ring_file.create_anonymous`."""
        capacity_bytes = _aligned(capacity_bytes)
        return cls(ring_file.create_anonymous(name_hint, capacity_bytes), capacity_bytes, 1)

    @property
    def used_bytes(self) -> int:
        """Bytes between the start of the oldest record not reclaimed and the end of the newest; 0 without one."""
        return self._end - self._records[0].start if self._records else 0

    @property
    def live_records(self) -> int:
        """Records that are not reclaimed."""
        return len(self._records)

    def try_write(self, frames: Sequence[Frame], readers: frozenset[int]) -> Descriptor | None:
        """Copy the frames into a record, one behind the other, or return None when there is no room now. Never waits.

        `readers` are the indices of those who will release the record; at least one. The frames, of bytes, may be
        reused as soon as this returns. The caller sends the descriptor to each of the readers, with what tells them
        how long the frames are and whether they are whole. Raises `ResourceError` when the record is larger than the
        ring, `ProtocolError` on a wrong reader.
        """
        length = record_bytes(sum(map(len, frames)))
        start = self._place(length, readers)
        if start is None:
            return None
        begin = ring_file.HEADER_BYTES + start % self.capacity_bytes
        _RECORD_HEADER.pack_into(self._view, begin, _RECORD_MAGIC, self._next_sequence, length)
        begin += _RECORD_HEADER.size
        for frame in frames:
            end = begin + len(frame)
            self._view[begin:end] = frame
            begin = end
        self._records.append(_Record(start, readers, set(readers)))
        self._next_sequence += 1
        self._end = start + length
        return Descriptor(self._next_sequence - 1, start % self.capacity_bytes, length)

    def release(self, reader: int, sequence: int) -> None:
        """Reader `reader` needs the record no longer. A second release of the same record changes nothing.

        Raises `ProtocolError` for a record that was never written or a reader the record is not for (which of its
        readers a reclaimed record had is no longer known, so there any reader of the ring passes).
        """
        if not 0 <= sequence < self._next_sequence:
            raise ProtocolError(f"reader {reader} released ring record {sequence}; {self._next_sequence} are written")
        if not 0 <= reader < self._num_readers:
            raise ProtocolError(f"unknown reader {reader} released ring record {sequence}")
        index = sequence - (self._next_sequence - len(self._records))
        if index < 0:
            return
        record = self._records[index]
        if reader not in record.readers:
            raise ProtocolError(f"reader {reader} released ring record {sequence} for readers {sorted(record.readers)}")
        record.pending.discard(reader)
        while self._records and not self._records[0].pending:
            self._records.popleft()
        if not self._records:
            self._end = 0

    def unlink(self) -> None:
        """Nobody can attach any more, for every reader has. The memory lives as long as a process maps it.

        From here on nothing is left behind, however the processes end. Calling it again changes nothing.
        """
        if self._linked:
            self._linked = False
            self._file.unname()

    def close(self) -> None:
        """Unmap the memory, and remove the name if `unlink` was not called. Calling it again changes nothing."""
        self._view.release()
        self._file.memory.close()
        self.unlink()

    def _place(self, length: int, readers: frozenset[int]) -> int | None:
        """Position of the next record, or None when it would reach into one that is not reclaimed."""
        if not readers or not readers <= self._all_readers:
            raise ProtocolError(f"a ring record for readers {sorted(readers)} in a ring of {self._num_readers} readers")
        if length > self.capacity_bytes:
            raise ResourceError(
                f"a record of {length} bytes can never fit into a ring of {self.capacity_bytes}; "
                f"set transport.ring_bytes to {length} or more"
            )
        start = self._end
        room_before_end = self.capacity_bytes - start % self.capacity_bytes
        oldest = self._records[0].start if self._records else start
        if length > room_before_end or self._is_free_before(oldest, max(length, start - oldest)):
            start += room_before_end
        return start if start + length - oldest <= self.capacity_bytes else None

    def _is_free_before(self, oldest: int, num_bytes: int) -> bool:
        """Whether the live records lie in one piece, from `oldest` on, behind this much free space."""
        offset = oldest % self.capacity_bytes
        return offset >= num_bytes and offset + self._end - oldest < self.capacity_bytes


class RingReader:
    """The reading end, in another process. It maps the ring read-only and so cannot damage it.

    It returns copies: a record can be released to the writer (`RingWriter.release`, through the caller's socket) as
    soon as `read` returns, and what the caller checks is what it uses.
    """

    def __init__(self, memory: Memory, capacity_bytes: int) -> None:
        """Use `attach`."""
        self.capacity_bytes = capacity_bytes
        self._memory = memory
        self._view = memoryview(memory)

    @classmethod
    def attach(cls, path: str, capacity_bytes: int) -> RingReader:
        """Map the ring that a writer created at `path` with exactly this capacity (`RingWriter.capacity_bytes`).

        Raises `ProtocolError` when there is no such file or it is not such a ring.
        """
        return cls(ring_file.map_named(path, capacity_bytes), capacity_bytes)

    @classmethod
    def attach_anonymous(cls, path: str, capacity_bytes: int) -> RingReader:
        """The same for a ring of `create_anonymous`."""
        return cls(ring_file.map_anonymous(path, capacity_bytes), capacity_bytes)

    def read(self, descriptor: Descriptor, lengths: Sequence[int]) -> list[memoryview]:
        """Copies of the frames of a record, which have these lengths; the caller owns them and may write to them.

        That they are whole is for the caller to check. Raises `ProtocolError` when a record with such frames would not
        have the size of this one, when the descriptor points outside the ring, and when what is there has another
        magic, sequence or length.
        """
        if min(lengths, default=0) < 0 or record_bytes(sum(lengths)) != descriptor.length:
            raise ProtocolError(
                f"a ring record of {descriptor.length} bytes cannot hold frames of {lengths[:16]} bytes"
            )
        begin = self._begin(descriptor)
        magic, found_sequence, found_length = _RECORD_HEADER.unpack_from(self._view, begin)
        if magic != _RECORD_MAGIC or found_sequence != descriptor.sequence or found_length != descriptor.length:
            raise _corrupt(descriptor, "its header does not match the descriptor")
        begin += _RECORD_HEADER.size
        frames = []
        for length in lengths:
            frames.append(memoryview(bytearray(self._view[begin : begin + length])))
            begin += length
        return frames

    def _begin(self, descriptor: Descriptor) -> int:
        """Where in the file a record is, which must be inside the ring."""
        offset, end = descriptor.offset, descriptor.offset + descriptor.length
        if offset < 0 or descriptor.length < _RECORD_HEADER.size or end > self.capacity_bytes:
            raise _corrupt(descriptor, f"bytes {offset} to {end} of a ring of {self.capacity_bytes}")
        return ring_file.HEADER_BYTES + offset

    def close(self) -> None:
        """Unmap the memory. Calling it again changes nothing."""
        self._view.release()
        self._memory.close()


def _corrupt(descriptor: Descriptor, why: str) -> ProtocolError:
    return ProtocolError(f"ring record {descriptor.sequence} is corrupt: {why}")
