"""How the C library treats the memory of messages."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGE_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Let this process keep the memory of messages that are gone for those that come, instead of asking the system for
    fresh pages every time, each of which it has to clear first: for a group of 200 KB that takes as long as sending it.

    glibc begins with 128 KiB and comes to these limits by itself, block size by block size, in one of its arenas and
    not in another. At most 64 MiB stay at the end of each arena. Elsewhere than with glibc nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)
