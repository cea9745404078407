"""Damage in the shared memory, as the consumers meet it: a group that is not what its producer made is never read.

What is covered is what is used: of a record its magic, sequence, length and the bytes of the groups; of a descriptor
all fields. The rest of the 64 bytes of a record's header, and the padding behind the groups, are never looked at.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest

from tests.support.wire_messages import random_group
from zbgrpo.errors import ProtocolError
from zbgrpo.ledger.records import PlanEntry, PlanKind
from zbgrpo.transport.messages import PlanFor
from zbgrpo.transport.plan_stream import read_groups
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter
from zbgrpo.transport.wire import payload_frame

SEED = 22
NUM_FLIPS = 10_000
FILE_HEADER_BYTES = 64
HEADER_BYTES = 64
USED_HEADER_BYTES = 24
"""Magic, sequence and length, 8 bytes each."""


class Written(NamedTuple):
    """A record and what was written into it."""

    message: PlanFor
    """What its readers are told."""
    descriptor: Descriptor
    content: bytes

    @property
    def num_used(self) -> int:
        """Bytes of it that are looked at."""
        return USED_HEADER_BYTES + len(self.content)

    def place(self, used: int) -> int:
        """Where in the file the used byte with this number is."""
        inside = used if used < USED_HEADER_BYTES else used - USED_HEADER_BYTES + HEADER_BYTES
        return FILE_HEADER_BYTES + self.descriptor.offset + inside

    def unused_places(self) -> list[int]:
        """The bytes of the record that nobody looks at."""
        begin = FILE_HEADER_BYTES + self.descriptor.offset
        header = range(begin + USED_HEADER_BYTES, begin + HEADER_BYTES)
        padding = range(begin + HEADER_BYTES + len(self.content), begin + self.descriptor.length)
        return [*header, *padding]


class World(NamedTuple):
    """A ring with some groups in it, and its memory as a file."""

    reader: RingReader
    records: list[Written]
    file: int

    def flip(self, place: int, bit: int) -> None:
        value = os.pread(self.file, 1, place)[0]
        os.pwrite(self.file, bytes([value ^ 1 << bit]), place)

    def check(self, record: Written) -> None:
        """What is read is what was written."""
        groups = read_groups(self.reader, record.message)
        assert b"".join(payload_frame(group.payload) for group in groups) == record.content


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    writer = RingWriter.create("damage", 1 << 16, num_readers=1)
    reader = RingReader.attach(writer.path, writer.capacity_bytes)
    rng = random.Random(SEED)
    records = []
    for number in (1, 2, 3, 8):
        groups = [random_group(rng.randrange(1 << 30)) for _ in range(number)]
        descriptor = writer.try_write([frame for _, frame in groups], frozenset([0]))
        assert descriptor is not None
        message = PlanFor(PlanEntry(0, PlanKind.TRAIN, 0), [header for header, _ in groups], descriptor)
        records.append(Written(message, descriptor, b"".join(frame for _, frame in groups)))
    file = os.open(writer.path, os.O_RDWR)
    yield World(reader, records, file)
    os.close(file)
    reader.close()
    writer.close()


def test_ten_thousand_random_flips_of_records_are_all_refused(world: World) -> None:
    for number in range(NUM_FLIPS):
        rng = random.Random(f"{SEED} record {number}")
        record = rng.choice(world.records)
        # As often in the header as in the groups, however large they are.
        used = rng.randrange(USED_HEADER_BYTES) if rng.random() < 0.5 else rng.randrange(record.num_used)
        place, bit = record.place(used), rng.randrange(8)
        world.flip(place, bit)
        try:
            read_groups(world.reader, record.message)
        except ProtocolError as error:
            assert "corrupt" in str(error)
        else:
            pytest.fail(f"Random('{SEED} record {number}'): bit {bit} of byte {place} made no difference")
        finally:
            world.flip(place, bit)
    for record in world.records:
        world.check(record)


def test_flips_of_what_is_not_used_change_nothing(world: World) -> None:
    for record in world.records:
        for place in record.unused_places():
            world.flip(place, 3)
        world.check(record)
        for place in record.unused_places():
            world.flip(place, 3)


def test_flips_of_descriptors_are_all_refused(world: World) -> None:
    """They travel in headers, which have a checksum of their own; this holds without it."""
    for number in range(NUM_FLIPS):
        rng = random.Random(f"{SEED} descriptor {number}")
        record = rng.choice(world.records)
        field = rng.choice(Descriptor.__struct_fields__)
        bit = rng.randrange(63)
        wrong = msgspec.structs.replace(record.descriptor, **{field: getattr(record.descriptor, field) ^ 1 << bit})
        try:
            read_groups(world.reader, msgspec.structs.replace(record.message, record=wrong))
        except ProtocolError:
            continue
        pytest.fail(f"Random('{SEED} descriptor {number}'): {wrong} was read in place of {record.descriptor}")


def test_a_group_in_the_place_of_another_one_is_refused(world: World) -> None:
    """Every record's descriptor with the place of every other one."""
    for record in world.records:
        for other in world.records:
            if other is not record:
                wrong = msgspec.structs.replace(record.descriptor, offset=other.descriptor.offset)
                with pytest.raises(ProtocolError, match="corrupt"):
                    read_groups(world.reader, msgspec.structs.replace(record.message, record=wrong))
