"""The ring inside one process: the sentences of its docstrings, its errors, and the file that holds it."""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from zbgrpo.errors import ProtocolError, ResourceError
from zbgrpo.transport import ring as ring_module
from zbgrpo.transport import ring_file
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter, record_bytes, split_frames

HEADER_BYTES = 64


@pytest.fixture
def ring() -> Iterator[RingWriter]:
    writer = RingWriter.create("test", 1024, num_readers=2)
    yield writer
    writer.close()


@pytest.fixture
def reader(ring: RingWriter) -> Iterator[RingReader]:
    attached = RingReader.attach(ring.path, ring.capacity_bytes)
    yield attached
    attached.close()


def test_the_worked_example_of_the_docstring_is_true() -> None:
    results = doctest.testmod(ring_module)
    assert results.attempted > 10
    assert results.failed == 0


def test_record_bytes_counts_header_and_padded_frames() -> None:
    assert record_bytes([]) == HEADER_BYTES
    assert [record_bytes([n]) - HEADER_BYTES for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert record_bytes([1, 0, 65]) == HEADER_BYTES + 64 + 128


def test_frames_come_back_in_order_and_aligned(ring: RingWriter, reader: RingReader) -> None:
    tokens = np.arange(33, dtype=np.int32)
    frames = [b"first", memoryview(tokens), b"", bytearray(b"x" * 64), memoryview(np.zeros((0, 3), np.float32))]
    descriptor = ring.try_write(frames, [0, 1])
    assert descriptor is not None
    record = reader.read(descriptor)
    parts = split_frames(record, [memoryview(frame).nbytes for frame in frames])
    assert [bytes(part) for part in parts] == [bytes(memoryview(frame)) for frame in frames]
    assert np.array_equal(np.frombuffer(parts[1], np.int32), tokens)
    addresses = [np.frombuffer(part, np.uint8).__array_interface__["data"][0] for part in parts if len(part)]
    base = np.frombuffer(record, np.uint8).__array_interface__["data"][0]
    assert [(address - base) % 64 for address in addresses] == [0, 0, 0]


def test_the_copy_outlives_release_and_the_reader_owns_it(ring: RingWriter, reader: RingReader) -> None:
    first = ring.try_write([b"a" * 900], [0])
    assert first is not None
    record = reader.read(first)
    ring.release(0, first.sequence)
    assert ring.try_write([b"b" * 900], [0]) is not None
    (frame,) = split_frames(record, [900])
    assert bytes(frame) == b"a" * 900
    frame[:1] = b"z"  # writable
    with pytest.raises(ProtocolError, match="ring record 0 is corrupt"):
        reader.read(first)


def test_the_source_may_be_reused_after_try_write(ring: RingWriter, reader: RingReader) -> None:
    source = bytearray(b"a" * 100)
    descriptor = ring.try_write([source], [0])
    source[:] = b"b" * 100
    assert descriptor is not None
    assert bytes(split_frames(reader.read(descriptor), [100])[0]) == b"a" * 100


def test_padding_holds_nothing_of_former_records(ring: RingWriter, reader: RingReader) -> None:
    secret = ring.try_write([b"s" * 960], [0])
    assert secret is not None
    ring.release(0, secret.sequence)
    descriptor = ring.try_write([b"a"], [0])
    assert descriptor is not None
    record = reader.read(descriptor)
    assert bytes(record[HEADER_BYTES:]) == b"a" + bytes(63)
    assert zlib.crc32(record) == descriptor.crc


def test_a_record_of_the_whole_ring_fits_and_one_byte_more_never_does(ring: RingWriter) -> None:
    for _ in range(3):  # wherever the records before ended
        small = ring.try_write([b"x"], [0])
        assert small is not None
        assert ring.try_write([b"y" * 960], [0]) is None
        ring.release(0, small.sequence)
        whole = ring.try_write([b"y" * 960], [0])
        assert whole is not None
        assert ring.used_bytes == ring.capacity_bytes == 1024
        ring.release(0, whole.sequence)
    with pytest.raises(ResourceError, match=r"1088 bytes can never fit into a ring of 1024; set transport\.ring_bytes"):
        ring.try_write([b"y" * 961], [0])
    assert ring.live_records == 0


def test_capacity_is_rounded_up_to_the_alignment() -> None:
    with contextlib.closing(RingWriter.create("test", 65, 1)) as writer:
        assert writer.capacity_bytes == 128
        assert os.path.getsize(writer.path) == HEADER_BYTES + 128


def test_release_twice_changes_nothing(ring: RingWriter) -> None:
    first = ring.try_write([b"a"], [0, 1])
    second = ring.try_write([b"b"], [0])
    assert first is not None and second is not None
    for _ in range(2):
        ring.release(0, first.sequence)
    assert ring.live_records == 2
    ring.release(1, first.sequence)
    ring.release(1, first.sequence)  # reclaimed by now
    assert ring.live_records == 1
    assert ring.used_bytes == second.length


@pytest.mark.parametrize(("reader_index", "sequence"), [(0, 1), (0, -1), (2, 0), (-1, 0), (1, 0)])
def test_wrong_releases_are_errors_and_change_nothing(ring: RingWriter, reader_index: int, sequence: int) -> None:
    assert ring.try_write([b"a"], [0]) is not None
    with pytest.raises(ProtocolError, match="released ring record"):
        ring.release(reader_index, sequence)
    assert ring.live_records == 1


@pytest.mark.parametrize("readers", [[], [2], [-1], [0, 7]])
def test_wrong_readers_are_errors_and_change_nothing(ring: RingWriter, readers: list[int]) -> None:
    with pytest.raises(ProtocolError, match="in a ring of 2 readers"):
        ring.try_write([b"a"], readers)
    assert ring.live_records == 0


def test_a_frame_that_cannot_be_copied_changes_nothing(ring: RingWriter, reader: RingReader) -> None:
    scattered = memoryview(np.arange(100, dtype=np.int32)[::2])
    with pytest.raises(TypeError):
        ring.try_write([b"a", scattered], [0])
    assert (ring.live_records, ring.used_bytes) == (0, 0)
    descriptor = ring.try_write([b"b"], [0])
    assert descriptor is not None and descriptor.sequence == 0
    reader.read(descriptor)


def test_every_wrong_descriptor_is_refused(ring: RingWriter, reader: RingReader) -> None:
    for _ in range(3):
        good = ring.try_write([b"payload"], [0])
    assert good is not None
    reader.read(good)
    for field in ("sequence", "offset", "length", "crc"):
        value = getattr(good, field)
        for wrong in (value + 1, value - 1, value + 64, value - 64, -1, 0, 2**63, -(2**63)):
            if wrong != value:
                with pytest.raises(ProtocolError, match=r"ring record .* corrupt"):
                    reader.read(msgspec.structs.replace(good, **{field: wrong}))


def test_every_flipped_bit_of_a_record_is_noticed(ring: RingWriter, reader: RingReader) -> None:
    assert ring.try_write([b"before"], [0]) is not None
    descriptor = ring.try_write([b"payload", b"q" * 70], [0])
    assert descriptor is not None
    with open(ring.path, "r+b", buffering=0) as memory:
        for position in range(descriptor.offset, descriptor.offset + descriptor.length):
            place = HEADER_BYTES + position
            value = os.pread(memory.fileno(), 1, place)[0]
            for bit in range(8):
                os.pwrite(memory.fileno(), bytes([value ^ (1 << bit)]), place)
                with pytest.raises(ProtocolError, match="ring record 1 is corrupt"):
                    reader.read(descriptor)
            os.pwrite(memory.fileno(), bytes([value]), place)
    reader.read(descriptor)


def test_descriptors_travel_as_small_arrays() -> None:
    descriptor = Descriptor(3, 128, 192, 0xFFFFFFFF)
    wire = msgspec.msgpack.encode(descriptor)
    assert msgspec.msgpack.decode(wire) == [3, 128, 192, 0xFFFFFFFF]
    assert msgspec.msgpack.decode(wire, type=Descriptor) == descriptor


@pytest.mark.parametrize("lengths", [[], [7, 1], [65], [-1], [128]])
def test_split_frames_refuses_lengths_of_another_record(
    ring: RingWriter, reader: RingReader, lengths: list[int]
) -> None:
    descriptor = ring.try_write([b"payload"], [0])
    assert descriptor is not None
    with pytest.raises(ProtocolError, match="cannot hold frames"):
        split_frames(reader.read(descriptor), lengths)


def test_the_file_is_private_and_its_name_is_random() -> None:
    rings = [RingWriter.create("a b/../c", 64, 1) for _ in range(2)]
    folder, names = {os.path.dirname(ring.path) for ring in rings}, {os.path.basename(ring.path) for ring in rings}
    assert len(folder) == 1 and len(names) == 2
    assert all(re.fullmatch(r"zbgrpo-a_b____c-[0-9a-f]{16}", name) for name in names)
    assert stat.S_IMODE(os.stat(rings[0].path).st_mode) == 0o600
    for ring in rings:
        ring.close()
        assert not os.path.exists(ring.path)
        ring.close()


def test_all_memory_is_reserved_from_the_start() -> None:
    with contextlib.closing(RingWriter.create("test", 1 << 20, 1)) as writer:
        assert os.stat(writer.path).st_blocks * 512 >= 1 << 20


def test_without_dev_shm_the_folder_for_temporary_files_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ring_file, "_SHARED_MEMORY_FOLDER", str(tmp_path / "missing"))
    monkeypatch.setattr(ring_file.tempfile, "gettempdir", lambda: str(tmp_path))
    writer = RingWriter.create("test", 128, 1)
    assert os.path.dirname(writer.path) == str(tmp_path)
    reader = RingReader.attach(writer.path, writer.capacity_bytes)
    descriptor = writer.try_write([b"hello"], [0])
    assert descriptor is not None
    assert bytes(split_frames(reader.read(descriptor), [5])[0]) == b"hello"
    reader.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_maps_the_ring_read_only(ring: RingWriter, reader: RingReader) -> None:
    assert reader._view.readonly


def test_after_unlink_the_name_is_gone_and_the_memory_stays(ring: RingWriter, reader: RingReader) -> None:
    ring.unlink()
    assert not os.path.exists(ring.path)
    ring.unlink()
    descriptor = ring.try_write([b"still here"], [0])
    assert descriptor is not None
    assert bytes(split_frames(reader.read(descriptor), [10])[0]) == b"still here"
    with pytest.raises(ProtocolError, match="cannot attach"):
        RingReader.attach(ring.path, ring.capacity_bytes)
    reader.close()
    reader.close()


def test_attach_refuses_what_is_not_this_ring(ring: RingWriter, tmp_path: Path) -> None:
    for wrong in (ring.capacity_bytes - 64, ring.capacity_bytes + 64, 0, -64):
        with pytest.raises(ProtocolError, match="has 1088 bytes, not"):
            RingReader.attach(ring.path, wrong)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(bytes(1088))
    with pytest.raises(ProtocolError, match="is not a ring"):
        RingReader.attach(str(foreign), 1024)
    link = tmp_path / "link"
    link.symlink_to(ring.path)
    with pytest.raises(ProtocolError, match="cannot attach"):
        RingReader.attach(str(link), 1024)
    with pytest.raises(ProtocolError):
        RingReader.attach(str(tmp_path), 1024)


def test_the_free_space_is_looked_at_first() -> None:
    free = os.statvfs("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")
    needed = free.f_bavail * free.f_frsize * 2
    with pytest.raises(ResourceError, match=rf"bytes free, but .* needs {needed + 64}: .*--shm-size.*ring_bytes"):
        RingWriter.create("huge", needed, 1)


def test_importing_the_ring_loads_neither_torch_nor_zmq() -> None:
    code = "import sys, zbgrpo.transport.ring; sys.exit(any(name in sys.modules for name in ('torch', 'zmq')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
