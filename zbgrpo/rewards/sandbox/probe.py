"""What this machine offers to keep programs away from it: tried, not read from version numbers."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import subprocess
import tempfile
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Optional

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.sandbox import bubblewrap, landlock, seccomp
from zbgrpo.rewards.sandbox.base import End, Isolation, Limits
from zbgrpo.rewards.sandbox.confinement import confinement
from zbgrpo.rewards.sandbox.mounts import enter_namespace, may_mount
from zbgrpo.rewards.sandbox.runner import run_confined
from zbgrpo.rewards.sandbox.system import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    adopt_orphans,
    unshare,
)
from zbgrpo.rewards.sandbox.users import become_user, program_user

ACTIVE = "active"
_NOT_USED = "not used at this level"
_LIMITS = Limits(wall_seconds=10.0)

# What a program tries at each level; it prints what it should not be able to do.
_SELF_TEST = """\
import os, _socket
level = {level}
def can(action):
    try:
        action()
    except OSError:
        return False
    return True
if level >= 1:
    if can(lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)):
        print("make a socket")
    if can(lambda: open({outside!r}).close()):
        print("read a file outside")
    if can(lambda: open({beside!r}, "w").close()):
        print("write a file outside")
if level >= 2 and os.getppid() != 1:
    print("see processes outside")
with open("inside", "w") as file:
    print("done", file=file)
print(open("inside").read())
"""
_SELF_TEST_PASSED = b"done\n\n"


class Machine(NamedTuple):
    """What was found."""

    levels: tuple[int, ...]
    """Levels at which a program ran and was refused what the level promises; empty if no program can be run."""
    bubblewrap: Optional[str]
    """Its path."""
    mechanisms: dict[str, str]
    """By name, `active` or why not."""
    shortfalls: dict[int, str]
    """Why the other levels are not offered."""


def probe() -> Isolation:
    """The highest level this machine offers; tried once in a process. `ConfigError` if it cannot run programs."""
    return isolation(highest_level())


def highest_level() -> int:
    """The highest level this machine offers. `ConfigError` if it cannot run programs at all."""
    machine = examine()
    if not machine.levels:
        raise ConfigError(f"programs cannot be run on this machine: {machine.shortfalls[0]}")
    return max(machine.levels)


def isolation(level: int) -> Isolation:
    """What is active at a level. `ConfigError` if this machine does not offer it."""
    machine = examine()
    if level not in machine.levels:
        reason = machine.shortfalls.get(level, "there is no such level of a local sandbox")
        raise ConfigError(f"isolation level {level} is not offered by this machine: {reason}")
    unused = {name for name in machine.mechanisms if _first_level(name) > level}
    if level == 2:
        unused |= {name for name in machine.mechanisms if name.startswith("landlock")}
    states = {
        name: _NOT_USED if name in unused and state == ACTIVE else state for name, state in machine.mechanisms.items()
    }
    return Isolation(level=level, mechanisms=states)


@functools.lru_cache(maxsize=1)
def examine() -> Machine:
    """Try everything; well under a second."""
    path = bubblewrap.find()
    wrapper = "bubblewrap" if path is None else _version(path)
    mechanisms = {
        "limits": _outcome(_try_limits),
        "adopted orphans": _outcome(_try_adopting),
        "own user": _outcome(_try_own_user),
        "own mounts": _outcome(_try_mounts),
        "no new privileges": _outcome(seccomp.no_new_privileges),
        "system call filter": _outcome(_try_filter),
        f"landlock {landlock.abi() or ''}".rstrip(): _outcome(_try_landlock),
        "user, mount, process, IPC and host name namespaces": _outcome(_try_namespaces),
        "network namespace": _outcome(_try_network_namespace),
        wrapper: "not installed" if path is None else ACTIVE,
    }
    levels, shortfalls = [], {}
    for level in (0, 1, 2):
        reason = "bubblewrap is not installed" if level == 2 and path is None else _self_test(level, path)
        if reason:
            shortfalls[level] = reason
        else:
            levels.append(level)
    if path is not None and 2 in shortfalls:
        mechanisms[wrapper] = shortfalls[2]
    return Machine(tuple(levels), path, mechanisms, shortfalls)


def _self_test(level: int, path: Optional[str]) -> str:
    """Why programs cannot be run at a level, or are not held by it; empty if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        outside, beside = os.path.join(folder, "outside"), os.path.join(folder, "beside")
        with open(outside, "w"):
            os.chmod(folder, 0o777)
        source = _SELF_TEST.format(level=level, outside=outside, beside=beside)
        try:
            execution = run_confined(confinement(level, path), source, b"", _LIMITS)
        except (OSError, ConfigError) as error:
            return str(error)
    if execution.end is not End.EXITED:
        return execution.detail
    if execution.stdout == _SELF_TEST_PASSED:
        return ""
    could = execution.stdout.decode(errors="replace").replace("\n", ", ")
    return f"a program could {could}" if could else execution.stderr


def _first_level(mechanism: str) -> int:
    if "namespace" in mechanism or mechanism.startswith("bubblewrap"):
        return 2
    return 1 if mechanism == "system call filter" or mechanism.startswith("landlock") else 0


def _version(path: str) -> str:
    """`bubblewrap 0.8.0`, as it says itself."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        return said or "bubblewrap"
    return "bubblewrap"


def _outcome(attempt: Callable[[], None]) -> str:
    """`active` if the attempt succeeds, in a process of its own, or why it does not."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report(attempt, writer)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return said or "the attempt crashed"


def _report(attempt: Callable[[], None], writer: int) -> NoReturn:
    try:
        try:
            attempt()
            outcome = ACTIVE
        except OSError as error:
            outcome = str(error)
        os.write(writer, outcome.encode())
    finally:
        os._exit(0)


def _try_limits() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    _expect_refusal(os.pipe, "a limit was not kept")


def _try_adopting() -> None:
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os.fork()
        os._exit(0)
    os.waitpid(child, 0)
    os.waitpid(-1, 0)  # the grandchild, which is nobody else's now


def _try_own_user() -> None:
    if os.geteuid() != 0:
        raise OSError("not root: programs run as this user")
    uid = program_user(os.getpid())
    if uid is None:
        raise OSError("root is the only user here: programs run as root without capabilities")
    become_user(uid)


def _try_mounts() -> None:
    with_user = program_user(os.getpid()) is None
    if not may_mount(with_user):
        enter_namespace(with_user)  # says why
        raise OSError("nothing can be mounted")


def _try_filter() -> None:
    seccomp.no_new_privileges()
    seccomp.install(seccomp.filter_program())
    _expect_refusal(lambda: socket.socket(socket.AF_INET).close(), "a socket could be made")


def _try_landlock() -> None:
    seccomp.no_new_privileges()
    landlock.restrict(["/usr"], [])
    _expect_refusal(lambda: os.listdir("/"), "a folder could be read")


def _try_namespaces() -> None:
    _be_unprivileged()
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS)


def _try_network_namespace() -> None:
    _be_unprivileged()
    unshare(CLONE_NEWUSER | CLONE_NEWNET)


def _be_unprivileged() -> None:
    """As what runs bubblewrap."""
    uid = program_user(os.getpid())
    if uid is not None:
        become_user(uid)


def _expect_refusal(action: Callable[[], object], otherwise: str) -> None:
    try:
        action()
    except OSError:
        return
    raise OSError(otherwise)
