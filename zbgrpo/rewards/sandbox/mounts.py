"""What can be done with mounts for a program, in a mount namespace that ends with it. Outside nothing changes.

Root may do it, and whoever may make a user namespace. Root's own Python often lies in its home, which nobody else may
enter. So an empty folder is put over the first folder on the way that is closed, and what is needed is bound into it at
its old path. Nothing else of it can be seen.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import PurePosixPath

import msgspec

from zbgrpo.rewards.sandbox.system import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    MS_SLAVE,
    mount,
    unshare,
)
from zbgrpo.rewards.sandbox.users import become_user

Obstacles = dict[str, tuple[str, ...]]
"""Closed folder, and the needed paths beneath it."""


def obstacles(paths: tuple[str, ...], uid: int) -> Obstacles:
    """First folder on the way to each of these absolute paths that the user may not pass, if there is one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_user(uid)
            os.write(writer, msgspec.json.encode([_obstacle(path) for path in paths]))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        found = msgspec.json.decode(answer.read() or b"[]", type=list[str])
    os.waitpid(pid, 0)
    if len(found) != len(paths):
        raise OSError(f"cannot become the user {uid}")
    return {
        point: tuple(path for path, other in zip(paths, found, strict=True) if other == point)
        for point in dict.fromkeys(found)
        if point
    }


def enter_namespace(with_user: bool) -> None:
    """Enter a mount namespace of which nothing comes out. `OSError` if this process may not.

    `with_user`: by way of a user namespace in which nobody exists but this user, for who is not root.
    """
    if with_user:
        uid, gid = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    else:
        unshare(CLONE_NEWNS)
    mount("none", "/", "none", MS_REC | MS_SLAVE)


def may_mount(with_user: bool) -> bool:
    """Whether `enter_namespace` works and mounting in it; tried in another process."""
    pid = os.fork()
    if pid == 0:
        try:
            enter_namespace(with_user)
            mount("tmpfs", tempfile.gettempdir(), "tmpfs", MS_NOSUID | MS_NODEV)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def open_way(closed: Obstacles) -> None:
    """In a namespace of this process's own, make the paths reachable."""
    for point, paths in closed.items():
        sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
        mount("tmpfs", point, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
        for path, source in sources.items():
            _make_place(path, os.path.isdir(f"/proc/self/fd/{source}"))
            mount(f"/proc/self/fd/{source}", path, "none", MS_BIND | MS_REC)
            os.close(source)
        mount("tmpfs", point, "tmpfs", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, "mode=755,size=1m")


def replace(folder: str, by: str) -> None:
    """In a namespace of this process's own, let one folder be seen in place of another, if that exists."""
    if os.path.isdir(folder):
        mount(by, folder, "none", MS_BIND)


def _obstacle(path: str) -> str:
    """The first folder above `path` that this process may not pass, or an empty text."""
    above = [str(folder) for folder in reversed(PurePosixPath(path).parents)]
    return next((folder for folder in above if not os.access(folder, os.X_OK)), "")


def _make_place(path: str, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
