"""The ring between real processes: wrapping thousands of times, /dev/shm full, and the writer killed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from zbgrpo.errors import ProtocolError
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter

ROOT = Path(__file__).parents[2]
NUM_RECORDS = 20_000
LARGEST_FRAME = 1800

# Both sides know what record n is: its readers, the lengths of its frames and every byte of them.
RECORDS = """
def readers_of(n):
    return frozenset(([0, 1], [0], [1], [1, 0])[n % 4])

def frames_of(n):
    size = n * 7919 % 1801
    return [n.to_bytes(8, "little"), bytes([n % 251]) * size, b"", bytes([n % 241]) * (n % 67)]
"""
exec(RECORDS)

READER = (
    RECORDS
    + """
import os, random, select, struct, sys
import msgspec
from zbgrpo.transport.ring import Descriptor, RingReader

index, path, capacity, num_records, pipe_in, pipe_out = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
ring = RingReader.attach(path, capacity)
os.write(pipe_out, struct.pack("<q", -1))
shuffle = random.Random(index).shuffle
held = []

def release_all():
    shuffle(held)
    for sequence in held:
        os.write(pipe_out, struct.pack("<q", sequence))
    held.clear()

with open(pipe_in, "rb", buffering=0) as descriptors:
    for n in range(num_records):
        if index not in readers_of(n):
            continue
        if len(held) == 3 or not select.select([descriptors], [], [], 0)[0]:
            release_all()  # out of order
        (length,) = descriptors.read(1)
        descriptor = msgspec.msgpack.decode(descriptors.read(length), type=Descriptor)
        assert descriptor.sequence == n, (descriptor, n)
        expected = frames_of(n)
        frames = ring.read(descriptor, [len(frame) for frame in expected])
        assert [bytes(frame) for frame in frames] == expected, n
        held.append(n)
    release_all()
    assert descriptors.read(1) == b""
print("all", num_records)
"""
)


def start_reader(ring: RingWriter, index: int) -> tuple[subprocess.Popen[str], int, int]:
    """The process, the end its descriptors are written to, and the end its releases are read from."""
    descriptors_out, descriptors_in = os.pipe()
    releases_out, releases_in = os.pipe()
    arguments = [str(index), ring.path, *map(str, (ring.capacity_bytes, NUM_RECORDS, descriptors_out, releases_in))]
    process = subprocess.Popen(
        [sys.executable, "-c", READER, *arguments],
        pass_fds=(descriptors_out, releases_in),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    os.close(descriptors_out)
    os.close(releases_in)
    return process, descriptors_in, releases_out


def take_releases(ring: RingWriter, releases: Sequence[int]) -> int:
    """Wait for releases and hand them to the ring; the number of readers that said they have attached."""
    ready, _, _ = select.select(releases, [], [], 60)
    assert ready, "no reader released anything for 60 s"
    num_attached = 0
    for index, pipe in enumerate(releases):
        if pipe in ready:
            data = os.read(pipe, 8 * 64)
            assert data, f"reader {index} ended"
            for (sequence,) in struct.iter_unpack("<q", data):
                if sequence == -1:
                    num_attached += 1
                else:
                    ring.release(index, sequence)
    return num_attached


def test_two_readers_get_every_record_of_a_ring_that_wraps_thousands_of_times() -> None:
    ring = RingWriter.create("stress", 4 * (LARGEST_FRAME + 448), num_readers=2)
    processes, descriptor_pipes, releases = zip(*[start_reader(ring, index) for index in range(2)], strict=True)
    try:
        num_attached = 0
        while num_attached < 2:
            num_attached += take_releases(ring, releases)
        ring.unlink()
        num_wraps = num_full = last_offset = 0
        for n in range(NUM_RECORDS):
            while (descriptor := ring.try_write(frames_of(n), readers_of(n))) is None:  # noqa: F821
                num_full += 1
                take_releases(ring, releases)
            num_wraps += descriptor.offset < last_offset
            last_offset = descriptor.offset
            message = msgspec.msgpack.encode(descriptor)
            for index in readers_of(n):  # noqa: F821
                os.write(descriptor_pipes[index], bytes([len(message)]) + message)
        while ring.live_records:
            take_releases(ring, releases)
        for pipe in descriptor_pipes:
            os.close(pipe)
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert outputs == [f"all {NUM_RECORDS}\n"] * 2
        assert num_wraps > 1000
        assert num_full > 1000
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for pipe in releases:
            os.close(pipe)
        ring.close()


WRITER = """
import sys
import msgspec
from zbgrpo.transport.ring import RingWriter
ring = RingWriter.create(sys.argv[1], 4096, 1)
print(ring.path, ring.capacity_bytes, flush=True)
sys.stdin.readline()
ring.unlink()
print(msgspec.json.encode(ring.try_write([b"last words"], frozenset([0]))).decode(), flush=True)
sys.stdin.readline()
"""


def test_a_killed_writer_leaves_nothing_after_unlink_and_readers_keep_the_memory() -> None:
    name = f"killed-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        path, capacity = writer.stdout.readline().split()
        reader = RingReader.attach(path, int(capacity))
        writer.stdin.write("attached\n")
        writer.stdin.flush()
        descriptor = msgspec.json.decode(writer.stdout.readline(), type=Descriptor)
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
    assert not os.path.exists(path)
    assert [entry for entry in os.listdir(os.path.dirname(path)) if name in entry] == []
    assert bytes(reader.read(descriptor, [10])[0]) == b"last words"
    reader.close()


def run_with_tiny_shm(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code where /dev/shm has 1 MiB, in a mount namespace of its own."""
    if not os.path.isdir("/dev/shm") or shutil.which("unshare") is None:
        pytest.skip("needs /dev/shm and unshare")
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    probe = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode:
        pytest.skip(f"no private mount namespace here: {probe.stderr.strip()}")
    return subprocess.run(
        [*unshare, "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize("free_space_lies", [False, True])
def test_a_full_dev_shm_is_an_error_with_figures_and_no_bus_error(free_space_lies: bool) -> None:
    """Also if the space goes to somebody else between the look at it and the reservation."""
    result = run_with_tiny_shm(f"""
import os
from types import SimpleNamespace
from zbgrpo.errors import ResourceError
from zbgrpo.transport import ring, ring_file
if {free_space_lies}:
    ring_file._free_bytes, honest = lambda folder: 1 << 40, ring_file._free_bytes
try:
    ring.RingWriter.create("full", 4 << 20, 1)
except ResourceError as error:
    print(error, "|", type(error.__cause__).__name__, os.listdir("/dev/shm"))
""")
    assert result.returncode == 0, result
    message, _, rest = result.stdout.partition("|")
    assert "/dev/shm has" in message and f"needs {(4 << 20) + 64}" in message
    assert "--shm-size" in message and "transport.ring_bytes" in message
    assert rest.split() == ["OSError" if free_space_lies else "NoneType", "[]"]


def test_a_ring_can_be_written_to_the_end_when_dev_shm_is_full_by_then() -> None:
    result = run_with_tiny_shm("""
import errno
from zbgrpo.transport import ring
writer = ring.RingWriter.create("reserved", 512 << 10, 1)
with open("/dev/shm/others", "wb", buffering=0) as others:
    try:
        while True:
            others.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
reader = ring.RingReader.attach(writer.path, writer.capacity_bytes)
descriptor = writer.try_write([b"x" * ((512 << 10) - 64)], frozenset([0]))
assert bytes(reader.read(descriptor, [(512 << 10) - 64])[0]) == b"x" * ((512 << 10) - 64)
print("intact")
""")
    assert (result.returncode, result.stdout) == (0, "intact\n"), result


def test_the_full_dev_shm_of_these_tests_does_kill_a_mapping_that_is_not_reserved() -> None:
    result = run_with_tiny_shm("""
import mmap, os
file = os.open("/dev/shm/sparse", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4 << 20)
mmap.mmap(file, 4 << 20)[:] = bytes(4 << 20)
""")
    assert result.returncode == -signal.SIGBUS


def test_a_reader_of_a_shorter_file_gets_an_error_and_no_bus_error(tmp_path: Path) -> None:
    ring = RingWriter.create("short", 8192, 1)
    shorter = tmp_path / "shorter"
    shorter.write_bytes(Path(ring.path).read_bytes()[:4096])
    with pytest.raises(ProtocolError, match="has 4096 bytes, not 8256"):
        RingReader.attach(str(shorter), ring.capacity_bytes)
    ring.close()
