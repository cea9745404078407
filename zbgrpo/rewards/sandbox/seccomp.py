"""System calls that no program of a model needs: a filter for the kernel, assembled and installed without packages.

The filter is a list of what is refused, not of what is allowed, so that every honest Python program works: threads,
pipes, subprocesses, `socketpair`, `multiprocessing`, numpy. It refuses, with `EPERM` unless said otherwise:

- every socket but a connected pair: no network, and no way to the Unix sockets of other processes;
- looking into other processes, or changing their limits, priority or place;
- namespaces, mounts, the kernel's own business (modules, keys, bpf, clocks), and io_uring, which would go around this;
- what outlives a program without being a file, or holds memory that no limit counts: System V objects, memfd;
- to be told what happens to files (inotify);
- what Landlock does not judge: modes, owners, times and attributes of files, and truncation before kernel 6.2;
- `kill(-1)`, and signals to the processes it was told to protect; it cannot know all others, Landlock's scope does.

A call through the numbers of another architecture (32-bit, x32) kills the process. `clone3` and `openat2`, whose
arguments a filter cannot read, and calls newer than this table fail with `ENOSYS`; libc then uses the older ones.

Imported between fork and exec: standard library only, and nothing heavy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False  # `typing` would take longer to import than everything here
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# (x86_64, aarch64); None where the architecture has no such call.
_Numbers = tuple[int | None, int | None]

_REFUSED: dict[str, _Numbers] = {
    # Sockets. `socketpair` stays.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # Other processes, and scheduling: a real-time program would starve whoever watches it.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # The kernel's own business.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),  # Landlock lets it tell what happens in any folder
    "inotify_init1": (294, 26),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # What outlives the program, or is memory outside its address space; and the same of others, by its number.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Changes to files by path that no Landlock rule covers. The f* calls too: reading a file is enough to open it.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
}

# Calls that are refused for some of their arguments only; `_conditions` has the rest.
_CONDITIONAL: dict[str, _Numbers] = {
    "socketpair": (53, 199),
    "clone": (56, 220),
    "ioctl": (16, 29),
    "personality": (135, 92),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "open": (2, None),
    "openat": (257, 56),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "prctl": (157, 167),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
}

_UNKNOWN: dict[str, _Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
_LAST_KNOWN = 469
_X32_BIT = 0x40000000

_AF_UNIX = 1
_SOCK_STREAM, _SOCK_SEQPACKET = 1, 5
# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}. CLONE_NEWTIME shares a bit with the exit signal and is for clone3 only.
_CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR = 0x40086602, 0x401C5820
_O_ACCMODE, _O_NO_ACCESS, _O_TRUNC = 0o3, 0o3, 0o1000
_S_IFMT, _S_IFREG, _S_IFIFO, _S_IFSOCK = 0o170000, 0o100000, 0o010000, 0o140000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_ASK_PERSONALITY = 0xFFFFFFFF
_PRIO_PROCESS, _ITSELF = 0, 0
_WORD = 0xFFFFFFFF

# One instruction of classic BPF: code, instructions to jump over if true, if false, operand.
_Instruction = tuple[int, int, int, int]
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _ABOVE, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x25, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Of `struct seccomp_data`. Both architectures are little-endian: the low half of an argument comes first. The kernel
# takes no more than that of any argument judged here.
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16

_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class _Check:
    """What an argument has to be, after masking, for a call to go through: one of the values, or none of them."""

    def __init__(self, argument: int, values: tuple[int, ...], one_of: bool, mask: int = _WORD) -> None:
        self.argument = argument
        self.values = values
        self.one_of = one_of
        self.mask = mask


def filter_program(protected_pids: Sequence[int] = (), machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`, for `install` or for the descriptor bubblewrap reads.

    `protected_pids`: processes (and their groups) that must not be signalled, by their numbers in the program's own
    namespace. `machine`: as `uname -m` says, this machine by default. `OSError` (`ENOSYS`) for one not supported.
    """
    name = os.uname().machine if machine is None else machine
    if name not in _AUDIT_ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter for the architecture {name}")
    column = 0 if name == "x86_64" else 1
    program = [
        _statement(_LOAD, _OFFSET_ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[name]),
        _statement(_RETURN, _KILL_PROCESS),
        _statement(_LOAD, _OFFSET_NUMBER),
    ]
    if name == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32_BIT), _statement(_RETURN, _KILL_PROCESS)]
    program += [(_ABOVE, 0, 1, _LAST_KNOWN), _statement(_RETURN, _ERRNO | errno.ENOSYS)]
    program += _return_for(_present(_UNKNOWN.values(), column), _ERRNO | errno.ENOSYS)
    for call, checks in _conditions(protected_pids).items():
        body = _body(checks)
        for number in _present([_CONDITIONAL[call]], column):
            program += [(_EQUAL, 0, len(body), number), *body]
    program += _return_for(_present(_REFUSED.values(), column), _ERRNO | errno.EPERM)
    program.append(_statement(_RETURN, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def install(program: bytes) -> None:
    """Put this thread, and all that it starts, under the filter for good. After `no_new_privileges`."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = _FilterHeader(len(program) // _INSTRUCTION.size, ctypes.addressof(buffer))
    _control(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def no_new_privileges() -> None:
    """Give up for good, for this thread and all that it starts, gaining rights through a set-user-ID program."""
    _control(_PR_SET_NO_NEW_PRIVS, 1)


def _conditions(protected_pids: Sequence[int]) -> dict[str, tuple[_Check, ...]]:
    """What each call of `_CONDITIONAL` has to fulfil, all checks of it."""
    protected = tuple(pid & _WORD for pid in protected_pids)
    groups = tuple(-pid & _WORD for pid in protected_pids)
    everything = -1 & _WORD
    spares_the_protected = (_Check(0, protected, False),)
    # Opened for reading only, or for neither, O_TRUNC still empties the file: Landlock before ABI 3 lets it.
    empties = (_O_TRUNC, _O_TRUNC | _O_NO_ACCESS)
    no_device = (0, _S_IFREG, _S_IFIFO, _S_IFSOCK)
    return {
        # A pair of datagram sockets (SOCK_RAW makes one too) could still send to the address of anybody.
        "socketpair": (_Check(0, (_AF_UNIX,), True), _Check(1, (_SOCK_STREAM, _SOCK_SEQPACKET), True, 0xF)),
        "clone": (_Check(0, (0,), True, _CLONE_NEW),),
        # Typing into a terminal; flags with which nobody could delete a file.
        "ioctl": (_Check(1, (_TIOCSTI, _TIOCLINUX, _FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR), False),),
        "personality": (_Check(0, (_ASK_PERSONALITY,), True),),
        "prlimit64": (_Check(0, (_ITSELF,), True),),
        "setpriority": (_Check(0, (_PRIO_PROCESS,), True), _Check(1, (_ITSELF,), True)),
        "open": (_Check(1, empties, False, _O_ACCMODE | _O_TRUNC),),
        "openat": (_Check(2, empties, False, _O_ACCMODE | _O_TRUNC),),
        "mknod": (_Check(1, no_device, True, _S_IFMT),),
        "mknodat": (_Check(2, no_device, True, _S_IFMT),),
        # It ends with whoever started it.
        "prctl": (_Check(0, (_PR_SET_PDEATHSIG,), False),),
        "kill": (_Check(0, (everything, *protected, *groups), False),),
        "tkill": spares_the_protected,
        "tgkill": spares_the_protected,
        "rt_sigqueueinfo": spares_the_protected,
        "rt_tgsigqueueinfo": spares_the_protected,
        "pidfd_open": spares_the_protected,
    }


def _body(checks: Sequence[_Check]) -> list[_Instruction]:
    """Return the instructions that answer a call of which all checks must hold."""
    body: list[_Instruction] = []
    for check in checks:
        body.append(_statement(_LOAD, _OFFSET_ARGUMENTS + 8 * check.argument))
        if check.mask != _WORD:
            body.append(_statement(_AND, check.mask))
        if check.one_of:
            body += [(_EQUAL, len(check.values) - index, 0, value) for index, value in enumerate(check.values)]
            body.append(_statement(_RETURN, _ERRNO | errno.EPERM))
        else:
            body += _return_for(check.values, _ERRNO | errno.EPERM)
    return [*body, _statement(_RETURN, _ALLOW)]


def _return_for(values: Sequence[int], answer: int) -> list[_Instruction]:
    """Return the instructions that answer so if what is loaded is one of the values, else go on behind."""
    chain = [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*chain, _statement(_JUMP, 1), _statement(_RETURN, answer)]


def _present(calls: Iterable[_Numbers], column: int) -> list[int]:
    """Numbers of the calls that the architecture has."""
    return [number for numbers in calls if (number := numbers[column]) is not None]


def _statement(code: int, operand: int) -> _Instruction:
    return (code, 0, 0, operand)


class _FilterHeader(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_libc.prctl.restype = ctypes.c_int


def _control(option: int, first: int, second: int = 0) -> None:
    """Call `prctl`; `OSError` if the kernel refuses."""
    if _libc.prctl(option, first, second, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
