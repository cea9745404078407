"""What a level means on this machine: the same for all programs of one sandbox."""

from __future__ import annotations

import os
import tempfile
from typing import NamedTuple, Optional

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.sandbox.interpreter import Interpreter, outermost, this_interpreter
from zbgrpo.rewards.sandbox.mounts import Obstacles, may_mount, obstacles
from zbgrpo.rewards.sandbox.users import program_user

DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""Devices that may be written."""

_READABLE = ("/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu")


class Confinement(NamedTuple):
    """How programs are started and what they can reach."""

    level: int
    interpreter: Interpreter
    read_only: tuple[str, ...]
    """All that can be read from level 1 on: the interpreter, the system's programs and libraries, a few facts."""
    closed: Obstacles
    """What has to be opened for programs that run as a user of their own."""
    can_mount: bool
    """Whether, at any level, a program gets a mount namespace in which its folder and its shared memory are a small
    file system of their own; else the folder is watched, and shared memory is everybody's."""
    bubblewrap: Optional[str]
    """Its path: level 2."""

    @property
    def is_filtered(self) -> bool:
        """Whether system calls are filtered."""
        return self.level >= 1

    @property
    def is_landlocked(self) -> bool:
        """Whether Landlock guards the files; at level 2 there are no others to be seen."""
        return self.level == 1


def confinement(level: int, bubblewrap: Optional[str], read_only: tuple[str, ...] = ()) -> Confinement:
    """That of a level, which the machine must offer. `read_only`: more that may be read.

    `ConfigError` without an interpreter that programs can reach; `OSError` if root cannot become another user.
    """
    interpreter = this_interpreter()
    needed = outermost([*interpreter.paths, *(os.path.realpath(path) for path in read_only)])
    uid = program_user(os.getpid())
    on_the_way = [*needed, os.path.realpath(tempfile.gettempdir()), *filter(None, [bubblewrap])]
    closed = {} if uid is None else obstacles(outermost(on_the_way), uid)
    can_mount = may_mount(with_user=uid is None)
    if closed and not can_mount:
        raise ConfigError(
            f"programs run as a user of their own, who may not pass {', '.join(closed)} to reach "
            f"{', '.join(path for paths in closed.values() for path in paths)}, and this process may not mount: "
            f"run it as an ordinary user, or let others pass (chmod a+x {' '.join(closed)})"
        )
    return Confinement(
        level=level,
        interpreter=interpreter,
        read_only=(*needed, *_READABLE),
        closed=closed,
        can_mount=can_mount,
        bubblewrap=bubblewrap if level == 2 else None,
    )
