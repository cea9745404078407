"""Landlock: what a process may do to files, TCP ports, signals and abstract sockets, taken away without being root.

Everything that the kernel's version of Landlock can refuse is refused, except for what `restrict` is told. By ABI: 1
files (5.13), 2 also moving between folders, 3 also truncation (6.2), 4 also TCP (6.7), 5 also ioctl on devices, 6 also
signals and abstract Unix sockets to processes outside (6.12). No version judges modes, owners, times, `stat`, UDP or
Unix sockets in the file system; the filter of system calls does. Source: the kernel's userspace-api/landlock.

Imported between fork and exec: standard library only, and nothing heavy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

TYPE_CHECKING = False  # `typing` would take longer to import than everything here
if TYPE_CHECKING:
    from collections.abc import Sequence

# The same on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_FIFO, _MAKE_SYM, _REFER, _TRUNCATE = 1 << 10, 1 << 12, 1 << 13, 1 << 14

# Every right of the file system that an ABI knows: ABI 1 has 13 of them, later ones add to these.
_FILE_SYSTEM_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_BIND_AND_CONNECT_TCP = 0b11
_SCOPE_ABSTRACT_UNIX_SOCKET_AND_SIGNAL = 0b11

_READ_ONLY = _EXECUTE | _READ_FILE | _READ_DIR
# No devices and no sockets are made there, and no file run by its name.
_WRITABLE = (
    (_WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE)
    | (_MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM | _REFER | _TRUNCATE)
)  # fmt: skip
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

_RULESET = struct.Struct("=QQQ")
_PATH_BENEATH = struct.Struct("=Qi")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def abi() -> int:
    """Return the version of Landlock that the kernel offers, 0 for none."""
    return max(0, _call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))


def restrict(read_only: Sequence[str], writable: Sequence[str]) -> None:
    """Leave this thread, and all that it starts, no rights but these; there is no way back.

    `read_only`: folders and files, with all beneath them, to read and execute; one that does not exist is left out.
    `writable`: the same for reading and writing; each must exist. The caller must have given up new privileges first.
    Descriptors that are open already keep their rights. `OSError` if the kernel has no Landlock or refuses.
    """
    version = abi()
    if version < 1:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    handled = _FILE_SYSTEM_RIGHTS[min(version, 5)]
    # A kernel that does not know the later fields accepts them as zeros.
    attributes = _RULESET.pack(
        handled,
        _NET_BIND_AND_CONNECT_TCP if version >= 4 else 0,
        _SCOPE_ABSTRACT_UNIX_SOCKET_AND_SIGNAL if version >= 6 else 0,
    )
    ruleset = _checked(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in read_only:
            try:
                _allow(ruleset, path, _READ_ONLY & handled)
            except FileNotFoundError:
                continue
        for path in writable:
            _allow(ruleset, path, _WRITABLE & handled)
        _checked(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow the rights beneath a path; of a file, those that files have."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        _checked(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, _PATH_BENEATH.pack(rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _checked(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; `OSError` if it fails."""
    result = _call(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock, system call {number}: {os.strerror(code)}")
    return result


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; its result, or -1. `syscall` is variadic: integers have to be passed as whole words."""
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *words))
