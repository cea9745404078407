"""Writing that is on the disk when it returns, and reading that proves what is there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from isal.isal_zlib import crc32

from zbgrpo import failpoints
from zbgrpo.errors import ResourceError

_CHUNK_BYTES = 4 * 1024 * 1024


def sync_files(files: Iterable[Path]) -> None:
    """Put files on the disk. Each rank of a `FolderTransaction` does this for its own: only the node that wrote a file
    can flush it."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        failpoints.fire("checkpoint.fsync")


def measure_file(file: Path, sync: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file, which is put on the disk before if `sync`."""
    size_bytes = crc = 0
    with open(file, "rb", buffering=0) as stream:
        if sync:
            os.fsync(stream.fileno())
            failpoints.fire("checkpoint.fsync")
        while chunk := stream.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            crc = crc32(chunk, crc)
    return size_bytes, crc


def write_durably(file: Path, content: bytes) -> None:
    """Create a file, which must not exist, with this content."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        failpoints.fire("checkpoint.write")
        os.fsync(descriptor)
        failpoints.fire("checkpoint.fsync")
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk; the content of its files is another matter."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems cannot and need not
            raise
    finally:
        os.close(descriptor)
    failpoints.fire("checkpoint.fsync")


@contextlib.contextmanager
def disk_full_named(target: Path) -> Iterator[None]:
    """Turns "no space left" into a `ResourceError` that names what was being written and the bytes that are free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free_bytes = shutil.disk_usage(next(folder for folder in target.parents if folder.exists())).free
        raise ResourceError(
            f"no room for {target}: {free_bytes} bytes are free ({error.strerror}); what was complete before still is. "
            f"Free some space, keep fewer states (checkpoint.keep_states) or choose another checkpoint.save_dir"
        ) from error
