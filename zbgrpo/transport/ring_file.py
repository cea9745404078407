"""The memory of a ring: a file that one process makes and others of its machine map."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from zbgrpo.errors import ProtocolError, ResourceError

_SHARED_MEMORY_FOLDER = "/dev/shm"
_MAGIC = b"zbgring1"
_HEADER = struct.Struct("<8sQ40x8s")  # magic, capacity, padding, magic again: 64 bytes
HEADER_BYTES = _HEADER.size
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
Memory = mmap.mmap
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RingFile(NamedTuple):
    """A file that its maker has mapped, with `HEADER_BYTES` before the content."""

    path: str
    """By which others open it, until `unname`."""
    memory: Memory
    unname: Callable[[], None]


def create_named(name_hint: str, capacity_bytes: int) -> RingFile:
    """A file in /dev/shm (in the folder for temporary files where there is none), readable by this user only, under a
    random name: `name_hint` only helps a human. All of its memory is reserved.

    Raises `ResourceError`, with the number of bytes needed and free, when there is no room for it.
    """
    folder = _SHARED_MEMORY_FOLDER if os.path.isdir(_SHARED_MEMORY_FOLDER) else tempfile.gettempdir()
    if _free_bytes(folder) < HEADER_BYTES + capacity_bytes:
        raise _no_room(folder, HEADER_BYTES + capacity_bytes)
    path = os.path.join(folder, f"zbgrpo-{_printable(name_hint)}-{secrets.token_hex(8)}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as if_it_fails:
        if_it_fails.callback(os.unlink, path)
        try:
            memory = _reserved(descriptor, capacity_bytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise _no_room(folder, HEADER_BYTES + capacity_bytes) from error
            raise
        finally:
            os.close(descriptor)
        if_it_fails.pop_all()
    return RingFile(path, memory, lambda: _unlink(path))


def create_anonymous(name_hint: str, capacity_bytes: int) -> RingFile:
    """A file that has no name anywhere, so that nothing is left behind however the processes end, and whose size nobody
    can change. Others open it through the descriptor of this process. All of its memory is reserved.

    Raises `ResourceError` when there is no memory or no descriptor for it.
    """
    with contextlib.ExitStack() as if_it_fails:
        try:
            descriptor = os.memfd_create(f"zbgrpo-{_printable(name_hint)}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            if_it_fails.callback(os.close, descriptor)
            memory = _reserved(descriptor, capacity_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
        except OSError as error:
            size = HEADER_BYTES + capacity_bytes
            raise ResourceError(f"no memory file of {size} bytes to share: {error.strerror}") from error
        if_it_fails.pop_all()
    return RingFile(f"/proc/{os.getpid()}/fd/{descriptor}", memory, lambda: os.close(descriptor))


def map_named(path: str, capacity_bytes: int) -> Memory:
    """Map for reading what `create_named` made with exactly this capacity; raises `ProtocolError` if it is not that."""
    return _map(path, capacity_bytes, os.O_NOFOLLOW, must_be_sealed=False)


def map_anonymous(path: str, capacity_bytes: int) -> Memory:
    """Map for reading what `create_anonymous` made, in whatever process; raises `ProtocolError` if it is not that."""
    return _map(path, capacity_bytes, 0, must_be_sealed=True)


def _map(path: str, capacity_bytes: int, flags: int, must_be_sealed: bool) -> Memory:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ProtocolError(f"cannot attach to the ring {path}: {why}") from error
    try:
        # The size comes first: touching a mapping beyond the end of its file is SIGBUS.
        status = os.fstat(descriptor)
        num_bytes = HEADER_BYTES + capacity_bytes
        if not stat.S_ISREG(status.st_mode) or capacity_bytes < 1 or status.st_size != num_bytes:
            raise ProtocolError(f"the ring {path} has {status.st_size} bytes, not {num_bytes}")
        if must_be_sealed and not _is_sealed(descriptor):
            raise ProtocolError(f"the size of {path} can still be changed")
        if os.pread(descriptor, HEADER_BYTES, 0) != _HEADER.pack(_MAGIC, capacity_bytes, _MAGIC):
            raise ProtocolError(f"{path} is not a ring of {capacity_bytes} bytes")
        return mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _reserved(descriptor: int, capacity_bytes: int) -> Memory:
    # ftruncate would succeed where there is no memory left, and the first write to a page without memory would then
    # kill the process with SIGBUS. This fails instead.
    os.posix_fallocate(descriptor, 0, HEADER_BYTES + capacity_bytes)
    memory = mmap.mmap(descriptor, HEADER_BYTES + capacity_bytes)
    memory[:HEADER_BYTES] = _HEADER.pack(_MAGIC, capacity_bytes, _MAGIC)
    return memory


def _is_sealed(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE
    except OSError:  # a file of another kind
        return False


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _printable(name_hint: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name_hint)[:64]


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _no_room(folder: str, num_bytes: int) -> ResourceError:
    return ResourceError(
        f"{folder} has {_free_bytes(folder)} bytes free, but the ring of this node needs {num_bytes}: enlarge it "
        f"(containers: --shm-size), remove what others left there, or set transport.ring_bytes to less"
    )
