"""The ring inside one process: the sentences of its docstrings, its errors, and the file that holds it."""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from zbgrpo.errors import ProtocolError, ResourceError
from zbgrpo.transport import ring as ring_module
from zbgrpo.transport import ring_file
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter, record_bytes

HEADER_BYTES = 64
FIRST, SECOND, BOTH = frozenset([0]), frozenset([1]), frozenset([0, 1])


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


def test_record_bytes_counts_the_header_and_padding() -> None:
    assert [record_bytes(n) - HEADER_BYTES for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_frames_come_back_in_order(ring: RingWriter, reader: RingReader) -> None:
    frames = [b"first", memoryview(np.arange(33, dtype=np.int32)).cast("B"), b"", bytearray(b"x" * 64)]
    descriptor = ring.try_write(frames, BOTH)
    assert descriptor is not None
    assert [bytes(part) for part in reader.read(descriptor, [5, 132, 0, 64])] == [bytes(frame) for frame in frames]
    (together,) = reader.read(descriptor, [5 + 132 + 64])
    assert bytes(together) == b"".join(frames), "they lie one behind the other"
    assert np.frombuffer(together, np.uint8).__array_interface__["data"][0] % 8 == 0


def test_a_record_of_nothing(ring: RingWriter, reader: RingReader) -> None:
    descriptor = ring.try_write([], FIRST)
    assert descriptor is not None and descriptor.length == HEADER_BYTES
    assert reader.read(descriptor, []) == []


def test_the_copy_outlives_release_and_the_reader_owns_it(ring: RingWriter, reader: RingReader) -> None:
    first = ring.try_write([b"a" * 900], FIRST)
    assert first is not None
    (frame,) = reader.read(first, [900])
    ring.release(0, first.sequence)
    assert ring.try_write([b"b" * 900], FIRST) is not None
    assert bytes(frame) == b"a" * 900
    frame[:1] = b"z"  # writable
    with pytest.raises(ProtocolError, match="ring record 0 is corrupt"):
        reader.read(first, [900])


def test_the_source_may_be_reused_after_try_write(ring: RingWriter, reader: RingReader) -> None:
    source = bytearray(b"a" * 100)
    descriptor = ring.try_write([source], FIRST)
    source[:] = b"b" * 100
    assert descriptor is not None
    assert bytes(reader.read(descriptor, [100])[0]) == b"a" * 100


def test_a_record_of_the_whole_ring_fits_and_one_byte_more_never_does(ring: RingWriter) -> None:
    for _ in range(3):  # wherever the records before ended
        small = ring.try_write([b"x"], FIRST)
        assert small is not None
        assert ring.try_write([b"y" * 960], FIRST) is None
        ring.release(0, small.sequence)
        whole = ring.try_write([b"y" * 960], FIRST)
        assert whole is not None
        assert ring.used_bytes == ring.capacity_bytes == 1024
        ring.release(0, whole.sequence)
    with pytest.raises(ResourceError, match=r"1088 bytes can never fit into a ring of 1024; set transport\.ring_bytes"):
        ring.try_write([b"y" * 961], FIRST)
    assert ring.live_records == 0


def test_capacity_is_rounded_up_to_the_alignment() -> None:
    with contextlib.closing(RingWriter.create("test", 65, 1)) as writer:
        assert writer.capacity_bytes == 128
        assert os.path.getsize(writer.path) == HEADER_BYTES + 128


def test_release_twice_changes_nothing(ring: RingWriter) -> None:
    first = ring.try_write([b"a"], BOTH)
    second = ring.try_write([b"b"], FIRST)
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
    assert ring.try_write([b"a"], FIRST) is not None
    with pytest.raises(ProtocolError, match="released ring record"):
        ring.release(reader_index, sequence)
    assert ring.live_records == 1


@pytest.mark.parametrize("readers", [[], [2], [-1], [0, 7]])
def test_wrong_readers_are_errors_and_change_nothing(ring: RingWriter, readers: list[int]) -> None:
    with pytest.raises(ProtocolError, match="in a ring of 2 readers"):
        ring.try_write([b"a"], frozenset(readers))
    assert ring.live_records == 0


def test_a_frame_that_cannot_be_copied_changes_nothing(ring: RingWriter, reader: RingReader) -> None:
    words = memoryview(np.arange(100, dtype=np.int32))
    with pytest.raises(ValueError, match="different structures"):
        ring.try_write([b"a", words], FIRST)  # type: ignore[list-item]
    assert (ring.live_records, ring.used_bytes) == (0, 0)
    descriptor = ring.try_write([b"b"], FIRST)
    assert descriptor is not None and descriptor.sequence == 0
    reader.read(descriptor, [1])


def test_every_wrong_descriptor_is_refused(ring: RingWriter, reader: RingReader) -> None:
    for _ in range(3):
        good = ring.try_write([b"payload"], FIRST)
    assert good is not None
    reader.read(good, [7])
    for field in Descriptor.__struct_fields__:
        value = getattr(good, field)
        for wrong in (value + 1, value - 1, value + 64, value - 64, -1, 0, 2**63, -(2**63)):
            if wrong != value:
                with pytest.raises(ProtocolError, match=r"ring record .* (corrupt|cannot hold)"):
                    reader.read(msgspec.structs.replace(good, **{field: wrong}), [7])


def test_descriptors_travel_as_small_arrays() -> None:
    descriptor = Descriptor(3, 128, 192)
    wire = msgspec.msgpack.encode(descriptor)
    assert msgspec.msgpack.decode(wire) == [3, 128, 192]
    assert msgspec.msgpack.decode(wire, type=Descriptor) == descriptor


@pytest.mark.parametrize("lengths", [[], [7, 58], [65], [-1], [8, -1], [128]])
def test_lengths_of_another_record_are_refused(ring: RingWriter, reader: RingReader, lengths: list[int]) -> None:
    descriptor = ring.try_write([b"payload"], FIRST)
    assert descriptor is not None
    with pytest.raises(ProtocolError, match="cannot hold frames"):
        reader.read(descriptor, lengths)


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
    descriptor = writer.try_write([b"hello"], FIRST)
    assert descriptor is not None
    assert bytes(reader.read(descriptor, [5])[0]) == b"hello"
    reader.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_maps_the_ring_read_only(ring: RingWriter, reader: RingReader) -> None:
    assert reader._view.readonly


def test_after_unlink_the_name_is_gone_and_the_memory_stays(ring: RingWriter, reader: RingReader) -> None:
    ring.unlink()
    assert not os.path.exists(ring.path)
    ring.unlink()
    descriptor = ring.try_write([b"still here"], FIRST)
    assert descriptor is not None
    assert bytes(reader.read(descriptor, [10])[0]) == b"still here"
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
