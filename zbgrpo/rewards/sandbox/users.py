"""Users that own nothing, one for each running program, where this process may change users.

As root, a program runs as a user with a number that no account has and no other program has at that time. So it can
signal, trace and read nothing but itself, the kernel counts its processes apart from all others (RLIMIT_NPROC), and one
kill(-1) by that user ends it with everything it started.

Without root it runs as the user of this process. Then only Landlock's scope, the filter of system calls or a process
namespace keeps it from signalling that user's other processes: at level 0, nothing does.
"""

from __future__ import annotations

import os
from typing import Optional

from zbgrpo.rewards.sandbox.system import drop_capabilities

# Above the numbers that distributions and systemd give to accounts, subordinate users and containers. Two for each
# process number (of which there are at most 2**22): the program's and its killer's.
_WIDE_BASE, _WIDE_NUM = 0x70000000, 1 << 22
# In a container that knows only 65536 users.
_NARROW_BASE, _NARROW_NUM = 10_000, 27_000


def program_user(pid: int) -> Optional[int]:
    """User, and group of the same number, for the program that process `pid` watches; None if there is none to be had.

    That is without root, and in a user namespace in which root is all there is (`unshare --map-root-user`).
    """
    if os.geteuid() != 0:
        return None
    for base, num in ((_WIDE_BASE, _WIDE_NUM), (_NARROW_BASE, _NARROW_NUM)):
        uid = base + 2 * (pid % num)
        if all(_is_mapped(uid + 1, kind) and _is_mapped(uid, kind) for kind in ("uid", "gid")):
            return uid
    return None


def become_user(uid: int) -> None:
    """Be this user and the group of the same number for good, in no other group, without capabilities."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    drop_capabilities()


def become_killer(uid: int) -> None:
    """Be able to signal the processes of a `program_user`, and no others; they cannot signal this one.

    Who may signal whom: the sender's real or effective user must be the receiver's real or saved one. `OSError` if it
    did not work in all points; a signal to everybody would then hit the wrong ones.
    """
    apart = uid + 1
    os.setgroups([])
    os.setresgid(apart, apart, apart)
    os.setresuid(apart, uid, apart)
    drop_capabilities()
    if os.getresuid() != (apart, uid, apart) or uid < _NARROW_BASE:
        raise PermissionError(f"could not become the user {uid}")


def _is_mapped(number: int, kind: str) -> bool:
    """Whether the user namespace of this process knows this user (`uid`) or group (`gid`)."""
    with open(f"/proc/self/{kind}_map") as ranges:
        for line in ranges:
            first, _, num = map(int, line.split())
            if first <= number < first + num:
                return True
    return False
