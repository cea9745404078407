"""The few system calls that Python lacks. `OSError` if the kernel refuses one."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Optional

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_MNT_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.unshare.argtypes = [ctypes.c_int]
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.capset.argtypes = [ctypes.c_void_p] * 2


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def hide_memory() -> None:
    """Let no process of the same user read or trace this one. An `execve` undoes it."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the thread that forked this process ends; leave at once if its process already has.

    A change of user clears it, so it comes after that.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent_pid:
        os._exit(1)


def drop_capabilities() -> None:
    """Give up what makes root powerful. With `no_new_privs` an `execve` does not bring it back."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: Optional[str] = None) -> None:
    """mount(2)."""
    data = None if options is None else options.encode()
    _checked(_libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, data), f"mount on {target}")


def unmount(target: str) -> None:
    """Take a mount away; what is still in use of it ends with its users."""
    _checked(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"unmount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
