"""Hostile and honest programs at every level of isolation that this machine offers.

What hostile programs are after are stand-ins made here, open to every user, so that it is the sandbox that has to
refuse. The programs, and what each level promises about them, are in tests/support/programs.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ESCAPED, HONEST, HOSTILE, Honest, Hostile
from zbgrpo.rewards.sandbox import landlock
from zbgrpo.rewards.sandbox.base import End, Limits
from zbgrpo.rewards.sandbox.local import LocalSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")

PROMISED_SECONDS = 1.0
"""What a run may take beyond its program's time."""
SCHEDULING_SLACK_SECONDS = 1.0
"""For cores that others keep busy."""
NUM_ATTEMPTS = 3
"""On such cores an interpreter may not have started when its program's time is over: no fault of the program's, and
none of the sandbox's. A program that can bring that about does so every time."""
HONEST_LIMITS = Limits(wall_seconds=30.0)
PATIENCE_SECONDS = 30
PUBLIC_FOLDERS = ("/dev/shm", "/tmp", "/var/tmp", "/run/lock")

SECRET = f"SECRET-{secrets.token_hex(8)}"
EXPECTED = f"EXPECTED-{secrets.token_hex(8)}"
"""What a grader would hold: in this process, and nowhere else."""

CONTROL = "import json, sys\nprint(json.dumps(sum(json.load(sys.stdin))))"


class World:
    """What is not a program's own: a folder, files, listeners, a process, secrets."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="zbgrpo-world-", dir="/tmp"))
        self.base.chmod(0o755)
        self.temporary = self.base / "tmp"
        self.temporary.mkdir()
        self.folder = self.base / "others"
        self.canary = self.folder / "canary"
        self.shared = Path("/dev/shm", f"zbgrpo-world-{secrets.token_hex(6)}")
        self.key = secrets.randbelow(2**30) + 1
        self.shm = ctypes.CDLL(None).shmget(0, 4096, 0o1666)
        self.restore_files()
        self.streams = [self._listener(socket.AF_INET), self._listener(socket.AF_UNIX), self._listener(None)]
        self.datagrams = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_UNIX)]
        self.datagrams[0].bind(("127.0.0.1", 0))
        self.datagrams[1].bind(f"\0zbgrpo-datagrams-{self.key}")
        for listener in (*self.streams, *self.datagrams):
            listener.setblocking(False)
        self.bait = self._new_bait()

    def _listener(self, family: int | None) -> socket.socket:
        if family == socket.AF_INET:
            return socket.create_server(("127.0.0.1", 0))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0zbgrpo-abstract-{self.key}" if family is None else str(self.base / "socket"))
        listener.listen()
        if family is not None:
            (self.base / "socket").chmod(0o777)
        return listener

    def _new_bait(self) -> subprocess.Popen[bytes]:
        """A process of the user who runs this, with a secret, that waits."""
        command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
        environment = {"SECRET": SECRET, "PATH": os.defpath}
        bait = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert bait.stdout is not None
        bait.stdout.readline()
        return bait

    def context(self, mark: str) -> bytes:
        """The line that tells a hostile program where everything is."""
        told = {
            "mark": mark,
            "folder": str(self.folder),
            "canary": str(self.canary),
            "shared": str(self.shared),
            "key": self.key,
            "shm": self.shm,
            "tcp_port": self.streams[0].getsockname()[1],
            "udp_port": self.datagrams[0].getsockname()[1],
            "unix": str(self.base / "socket"),
            "abstract": f"zbgrpo-abstract-{self.key}",
            "datagrams": f"zbgrpo-datagrams-{self.key}",
            "bait_pid": self.bait.pid,
            "parent_pid": os.getpid(),
        }
        return json.dumps(told).encode() + b"\n"

    def changes(self, mark: str) -> list[str]:
        """What a program has touched or left that is not its own."""
        found = []
        if self._state_of_files() != self._files:
            found.append("files")
        for number, listener in enumerate(self.streams):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append(f"connection {number}")
        for number, receiver in enumerate(self.datagrams):
            with contextlib.suppress(BlockingIOError):
                receiver.recv(100)
                found.append(f"datagram {number}")
        if self.bait.poll() is not None:
            found.append("the other process is dead")
        elif self._bait_limits() != resource.getrlimit(resource.RLIMIT_NOFILE):
            found.append("limits of the other process")
        found += [path for folder in PUBLIC_FOLDERS for path in glob.glob(f"{folder}/{mark}*")]
        found += [kind for kind in ("shm", "sem", "msg") if self._has_object(kind)]
        if not self._has_shared_memory():
            found.append("shared memory")
        return found

    def restore(self, mark: str) -> None:
        """Undo what a program did at a level that does not promise to prevent it."""
        self.restore_files()
        if self.bait.poll() is not None or self._bait_limits() != resource.getrlimit(resource.RLIMIT_NOFILE):
            self._end_bait()
            self.bait = self._new_bait()
        for path in (path for folder in PUBLIC_FOLDERS for path in glob.glob(f"{folder}/{mark}*")):
            os.unlink(path)
        libc = ctypes.CDLL(None)
        for find, control in ((libc.shmget, libc.shmctl), (libc.semget, libc.semctl), (libc.msgget, libc.msgctl)):
            identity = find(self.key, 0, 0)
            if identity >= 0:
                control(identity, 0, 0, 0)  # IPC_RMID is 0, wherever each of them expects it
        if not self._has_shared_memory():
            self.shm = libc.shmget(0, 4096, 0o1666)
        while self.changes(mark):
            pass

    def restore_files(self) -> None:
        if self.folder.is_symlink() or not self.folder.is_dir():
            self.folder.unlink(missing_ok=True)
        else:
            self.folder.chmod(0o777)
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        for path in (self.canary, self.shared):
            path.unlink(missing_ok=True)
            path.write_text(SECRET)
            path.chmod(0o666)
        self.folder.chmod(0o777)
        self._files = self._state_of_files()

    def _state_of_files(self) -> list[object]:
        state: list[object] = []
        for path in (self.folder, self.canary, self.shared):
            try:
                status = path.lstat()
                state.append((status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns))
                state.append(sorted(os.listdir(path)) if path.is_dir() else path.read_text())
                state.append(os.listxattr(path))
            except OSError as error:
                state.append(error.errno)
        return state

    def _bait_limits(self) -> tuple[int, int]:
        return resource.prlimit(self.bait.pid, resource.RLIMIT_NOFILE)

    def _has_object(self, kind: str) -> bool:
        lines = Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
        return any(int(line.split()[0]) == self.key for line in lines)

    def _has_shared_memory(self) -> bool:
        lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return self.shm in [int(line.split()[1]) for line in lines]

    def _end_bait(self) -> None:
        self.bait.kill()
        self.bait.communicate(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        for each in (*self.streams, *self.datagrams):
            each.close()
        self._end_bait()
        ctypes.CDLL(None).shmctl(self.shm, 0, 0)
        self.shared.unlink(missing_ok=True)
        shutil.rmtree(self.base)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZBGRPO_TEST_SECRET", SECRET)
        patch.setattr(tempfile, "tempdir", str(world.temporary))
        yield world
    world.close()


def shortfall(level: int) -> str:
    """Why this machine cannot offer a level; found without asking the sandbox."""
    if level >= 1 and (platform.machine() not in {"x86_64", "aarch64"} or landlock.abi() < 1):
        return "no filter of system calls or no Landlock on this machine"
    if level >= 2:
        command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed"
        if subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_SECONDS).returncode != 0:
            return "bubblewrap cannot make namespaces on this machine"
    return ""


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda level: f"level{level}")
def sandbox(request: pytest.FixtureRequest, world: World) -> Iterator[LocalSandbox]:
    if reason := shortfall(request.param):
        pytest.skip(reason)
    sandbox = LocalSandbox(request.param)
    yield sandbox
    sandbox.close()


def left_processes(mark: str) -> list[str]:
    """Processes, ended but not reaped ones too, that carry the mark in their name or arguments."""
    found = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            told = Path(entry.path, "comm").read_bytes() + Path(entry.path, "cmdline").read_bytes()
            if entry.name.isdigit() and mark.encode() in told:
                found.append(f"{entry.name}: {told!r}")
    return found


def own_children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, listed.read_text().split())) if listed.exists() else set()


def test_sandbox_has_the_level_asked_for(sandbox: LocalSandbox, request: pytest.FixtureRequest) -> None:
    assert f"level{sandbox.isolation().level}" in request.node.name


@pytest.mark.parametrize("program", HOSTILE, ids=lambda program: program.name)
def test_hostile_program(program: Hostile, sandbox: LocalSandbox, world: World) -> None:
    level = sandbox.isolation().level
    if level < program.runs_from:
        pytest.skip("would work at this level, and do harm")
    if program.signals and level == 1 and landlock.abi() < 6:
        pytest.skip("Landlock of this kernel does not judge signals")
    mark = f"zb{secrets.token_hex(6)}"
    children = own_children() | {world.bait.pid}

    for _ in range(NUM_ATTEMPTS):
        began = time.monotonic()
        execution = sandbox.run(program.source, world.context(mark), program.limits)
        wall_seconds = time.monotonic() - began
        if execution.end is not End.INFRASTRUCTURE:
            break

    left = left_processes(mark)
    left_children = own_children() - children
    left_files = os.listdir(world.temporary)
    said = (
        f"{execution.end} {execution.exit_status} {execution.detail}\n{execution.stdout[-500:]!r}\n{execution.stderr}"
    )
    changes = world.changes(mark)
    if changes:
        world.restore(mark)
    assert (left, left_children, left_files) == ([], set(), []), said
    assert wall_seconds <= program.limits.wall_seconds + PROMISED_SECONDS + SCHEDULING_SLACK_SECONDS, said
    assert execution.end in program.ends, said
    assert len(execution.stdout) <= program.limits.output_bytes
    assert execution.stderr.isascii() or execution.stderr.encode()
    if program.stdout is not None:
        assert execution.stdout == program.stdout, said
    if program.exit_status is not None:
        assert execution.exit_status == program.exit_status, said
    if level >= program.from_level:
        assert ESCAPED not in execution.stdout, said
        assert changes == [], said
        told = execution.stdout + execution.stderr.encode()
        assert SECRET.encode() not in told
        assert EXPECTED.encode() not in told

    control = sandbox.run(CONTROL, b"[1, 2, 3]", HONEST_LIMITS)
    assert (control.end, control.stdout) == (End.EXITED, b"6\n"), control


@pytest.mark.parametrize("program", HONEST, ids=lambda program: program.name)
def test_honest_program(program: Honest, sandbox: LocalSandbox, world: World) -> None:
    active = sandbox.isolation()
    if program.shared_memory and active.level == 1 and active.mechanisms.get("own mounts") != "active":
        pytest.skip("level 1 has no /dev/shm on a machine that lets it mount nothing")
    execution = sandbox.run(program.source, program.stdin, HONEST_LIMITS)
    assert (execution.end, execution.exit_status) == (End.EXITED, program.exit_status), execution
    assert execution.stdout == program.stdout
    assert os.listdir(world.temporary) == []
