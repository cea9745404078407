"""Namespaces of a program's own, made by bubblewrap (https://github.com/containers/bubblewrap)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Optional

from zbgrpo.rewards.sandbox.folder import PrivateFolder

_PSEUDO_FILE_SYSTEMS = ("/dev", "/proc")


def find() -> Optional[str]:
    """Path of the program; None if it is not installed."""
    path = shutil.which("bwrap")
    return None if path is None else os.path.realpath(path)


def command(executable: str, read_only: Sequence[str], folder: PrivateFolder, filter_fd: int) -> list[str]:
    """Arguments that run what is appended to them, with new namespaces for users, mounts, processes, IPC, host name
    and network, in a file system of `read_only` and the folder.

    `filter_fd`: the filter of system calls is read from it. Everything ends when the caller or the program does.
    """
    arguments = [executable, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox"]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in read_only:
        if not path.startswith(_PSEUDO_FILE_SYSTEMS):
            arguments += ["--ro-bind-try", path, path]
    # POSIX semaphores and shared memory work, within the limit of the folder.
    arguments += ["--bind", folder.shared_memory, "/dev/shm", "--bind", folder.home, folder.home]
    # What bubblewrap itself puts there is in memory that no limit counts.
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder.home]
    return [*arguments, "--seccomp", str(filter_fd), "--"]
