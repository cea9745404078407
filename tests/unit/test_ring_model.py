"""The ring against a model that knows nothing of positions: a list of the areas that are occupied."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zbgrpo.errors import ProtocolError, ResourceError
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter, record_bytes

CAPACITY_BYTES = 1024
LARGEST_FRAME = CAPACITY_BYTES - 64
NUM_READERS = 3
HEADER_BYTES = 24  # magic, sequence and length
FILE_HEADER_BYTES = 64

SIZES = st.sampled_from([0, 1, 63, 64, 65, CAPACITY_BYTES // 2 - 64, CAPACITY_BYTES // 2, LARGEST_FRAME])
READERS = st.sets(st.integers(0, NUM_READERS - 1), min_size=1)


@dataclass
class Occupied:
    descriptor: Descriptor
    frames: list[bytes]
    readers: set[int]
    pending: set[int]

    @property
    def lengths(self) -> list[int]:
        return [len(frame) for frame in self.frames]


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.writer = RingWriter.create("model", CAPACITY_BYTES, NUM_READERS)
        self.reader = RingReader.attach(self.writer.path, CAPACITY_BYTES)
        self.occupied: list[Occupied] = []  # oldest first
        self.num_written = 0

    def teardown(self) -> None:
        self.reader.close()
        self.writer.close()

    def free_offset(self, length: int) -> int | None:
        """Where the next record must go: after the newest one, or at the beginning if that is too near the end, or if
        as much is free before all that is occupied."""
        begin = self.occupied[-1].descriptor.offset + self.occupied[-1].descriptor.length if self.occupied else 0
        areas = [(entry.descriptor.offset, entry.descriptor.length) for entry in self.occupied]
        first = areas[0][0] if areas else 0
        is_one_piece = all(offset >= first for offset, _ in areas)
        if begin + length > CAPACITY_BYTES or (is_one_piece and first >= max(length, begin - first)):
            begin = 0
        overlaps = any(begin < offset + size and offset < begin + length for offset, size in areas)
        return None if overlaps else begin

    @rule(sizes=st.lists(SIZES, max_size=3), readers=READERS, seed=st.integers(1, 255))
    def write(self, sizes: list[int], readers: set[int], seed: int) -> None:
        frames = [bytes([(seed + index) % 256]) * size for index, size in enumerate(sizes)]
        length = record_bytes(sum(sizes))
        if length > CAPACITY_BYTES:
            with pytest.raises(ResourceError):
                self.writer.try_write(frames, frozenset(readers))
            return
        expected = self.free_offset(length)
        descriptor = self.writer.try_write(frames, frozenset(readers))
        assert (descriptor.offset if descriptor else None) == expected
        if descriptor is not None:
            assert (descriptor.sequence, descriptor.length) == (self.num_written, length)
            self.occupied.append(Occupied(descriptor, frames, readers, set(readers)))
            self.num_written += 1

    @rule(excess=st.integers(1, 200))
    def write_too_large(self, excess: int) -> None:
        with pytest.raises(ResourceError):
            self.writer.try_write([bytes(LARGEST_FRAME + excess)], frozenset([0]))

    @precondition(lambda self: self.occupied)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any record, any of its readers, also one that has released it already."""
        entry = data.draw(st.sampled_from(self.occupied))
        reader = data.draw(st.sampled_from(sorted(entry.readers)))
        self.writer.release(reader, entry.descriptor.sequence)
        entry.pending.discard(reader)
        while self.occupied and not self.occupied[0].pending:
            self.occupied.pop(0)

    @precondition(lambda self: self.occupied)
    @rule()
    def release_everything(self) -> None:
        for entry in reversed(self.occupied):
            for reader in entry.readers:
                self.writer.release(reader, entry.descriptor.sequence)
        self.occupied.clear()

    @precondition(lambda self: self.num_written > len(self.occupied))
    @rule(data=st.data())
    def release_reclaimed(self, data: st.DataObject) -> None:
        sequence = data.draw(st.integers(0, self.num_written - len(self.occupied) - 1))
        self.writer.release(data.draw(st.integers(0, NUM_READERS - 1)), sequence)

    @rule(ahead=st.integers(0, 3))
    def release_unknown(self, ahead: int) -> None:
        with pytest.raises(ProtocolError):
            self.writer.release(0, self.num_written + ahead)

    @precondition(lambda self: self.occupied)
    @rule(data=st.data())
    def flip_a_byte_of_a_header(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.occupied))
        place = FILE_HEADER_BYTES + entry.descriptor.offset + data.draw(st.integers(0, HEADER_BYTES - 1))
        file = os.open(self.writer.path, os.O_RDWR)
        value = os.pread(file, 1, place)
        os.pwrite(file, bytes([value[0] ^ data.draw(st.integers(1, 255))]), place)
        with pytest.raises(ProtocolError, match="is corrupt"):
            self.reader.read(entry.descriptor, entry.lengths)
        os.pwrite(file, value, place)
        os.close(file)

    @invariant()
    def records_are_intact_until_reclaimed(self) -> None:
        for entry in self.occupied:
            frames = self.reader.read(entry.descriptor, entry.lengths)
            assert [bytes(frame) for frame in frames] == entry.frames

    @invariant()
    def the_accounts_agree(self) -> None:
        assert self.writer.live_records == len(self.occupied)
        occupied_bytes = sum(entry.descriptor.length for entry in self.occupied)
        assert occupied_bytes <= self.writer.used_bytes <= CAPACITY_BYTES
        assert (self.writer.used_bytes == 0) == (not self.occupied)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True, deadline=None)
