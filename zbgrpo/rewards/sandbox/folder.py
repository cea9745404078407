"""The private folder of one program: made, measured, and removed whatever is in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from typing import Optional

from zbgrpo.rewards.sandbox.system import MS_NODEV, MS_NOSUID, mount, unmount

PREFIX = "zbgrpo-program-"
PROGRAM = "program.py"

_LEAST_BYTES_OF_ENTRY = 4096
"""What an entry counts at least, so that a limit on bytes is also one on their number."""
_OWN_ENTRIES = 8
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A folder that only its owner can list, with `home`, where a program starts, and `shared_memory` beside it."""

    def __init__(self, source: bytes, stdin: bytes, owner: Optional[int], most_bytes: Optional[int]) -> None:
        """Make it, with the source in `home`.

        `owner`: user and group of the program, None for this process's own. `most_bytes`: if not None, `home` and
        `shared_memory` are in a file system of that size, which only the mount namespace of this process has.
        """
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._space = os.path.join(self.path, "space")
        self.home = os.path.join(self._space, "home")
        self.shared_memory = os.path.join(self._space, "shm")
        self.program = os.path.join(self.home, PROGRAM)
        self.stdin = os.path.join(self.path, "stdin")
        self.is_bounded = False
        try:
            self._fill(source, stdin, owner, most_bytes)
        except OSError:
            self.remove()
            raise

    def _fill(self, source: bytes, stdin: bytes, owner: Optional[int], most_bytes: Optional[int]) -> None:
        os.chmod(self.path, 0o711)  # others may pass, if they know where to
        with open(self.stdin, "wb") as file:
            file.write(stdin)
        os.mkdir(self._space, 0o711)
        if most_bytes is not None:
            options = f"mode=711,size={most_bytes},nr_inodes={most_bytes // _LEAST_BYTES_OF_ENTRY + _OWN_ENTRIES}"
            mount("tmpfs", self._space, "tmpfs", MS_NOSUID | MS_NODEV, options)
            self.is_bounded = True
        for folder in (self.home, self.shared_memory):
            os.mkdir(folder, 0o700)
        with open(self.program, "wb") as file:
            file.write(source)
        if owner is not None:
            for path in (self.home, self.shared_memory, self.program):
                os.chown(path, owner, owner)

    def holds_more_than(self, num_bytes: int) -> bool:
        """Whether more lies in it; the count stops there, so it takes no longer the more there is."""
        if self.is_bounded:
            return False
        total = 0
        waiting = [self.home, self.shared_memory]
        while waiting:
            # A program may take away what is being looked at, or the right to look.
            with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        total += max(status.st_blocks * 512, _LEAST_BYTES_OF_ENTRY)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                    if total > num_bytes:
                        return True
        return False

    def remove(self) -> None:
        """Remove it. `OSError` if something cannot be; nobody may be at work in it any more."""
        if self.is_bounded:
            unmount(self._space)
            self.is_bounded = False
        remove_tree(self.path)


def remove_tree(path: str) -> None:
    """Remove a folder with all its content, however deep it nests and whatever its modes are; follows no link.

    The folders within a folder are first lifted up to the top. So no path gets long and nothing recurses.
    """
    token = secrets.token_hex(8)
    num_lifted = 0
    top = os.open(path, _FOLDER_FLAGS)
    try:
        while folders := _remove_files(top):
            for name in folders:
                folder = os.open(name, _FOLDER_FLAGS, dir_fd=top)
                try:
                    for inner in _remove_files(folder):
                        os.rename(inner, f"{token}-{num_lifted}", src_dir_fd=folder, dst_dir_fd=top)
                        num_lifted += 1
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _remove_files(folder: int) -> list[str]:
    """Remove everything in it but folders; their names, and they can be opened, emptied and moved now."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:
            os.chmod(name, 0o700, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found if is_folder]
