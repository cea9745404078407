"""What the system call filter and Landlock refuse, and that honest programs do not notice them.

The filter is judged twice: by running its instructions here for both architectures, and by the kernel in processes
that install it. Landlock by the kernel only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

import zbgrpo
from zbgrpo.rewards.sandbox import landlock, seccomp

PATIENCE_SECONDS = 60
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
TABLES = {**seccomp._REFUSED, **seccomp._CONDITIONAL, **seccomp._UNKNOWN}

needs_filter = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ARCHITECTURES, reason="no filter for this machine"
)
needs_landlock = pytest.mark.skipif(sys.platform != "linux" or landlock.abi() < 1, reason="no Landlock")


def answer(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would answer: its machine for classic BPF, as far as the filter uses it."""
    words = [argument & 0xFFFFFFFFFFFFFFFF for argument in (*arguments, *(0,) * 6)][:6]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *words)
    code = list(struct.iter_unpack("<HBBI", program))
    position = accumulator = 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x05:
            position += operand
        else:
            holds = {0x15: accumulator == operand, 0x25: accumulator > operand, 0x35: accumulator >= operand}[operation]
            position += if_true if holds else if_false


def numbers_of(machine: str) -> dict[str, int]:
    column = 0 if machine == "x86_64" else 1
    return {name: pair[column] for name, pair in TABLES.items() if pair[column] is not None}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("x86_64", "/usr/include/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_are_those_of_the_kernel_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed here")
    pattern = re.compile(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)\s*$", re.MULTILINE)
    official = {name: int(number) for name, number in pattern.findall(Path(header).read_text())}
    ours = numbers_of(machine)
    known = ours.keys() & official.keys()
    assert {name: ours[name] for name in known} == {name: official[name] for name in known}
    assert len(known) >= len(ours) - 6  # those newer than old headers
    column = 0 if machine == "x86_64" else 1
    assert not [name for name, pair in TABLES.items() if pair[column] is None and name in official]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_filter_answers_for_every_architecture(machine: str) -> None:
    program, numbers = seccomp.filter_program(machine=machine), numbers_of(machine)
    architecture = ARCHITECTURES[machine]
    for name in seccomp._REFUSED.keys() & numbers.keys():
        assert answer(program, architecture, numbers[name], (1,) * 6) == EPERM, name
    for name in seccomp._UNKNOWN:
        assert answer(program, architecture, numbers[name]) == ENOSYS, name
    assert answer(program, architecture, 470) == ENOSYS
    listed = set(numbers.values())
    for number in set(range(470)) - listed:
        assert answer(program, architecture, number, (1,) * 6) == ALLOW, number
    for other in {*ARCHITECTURES.values(), 0x40000003, 0x40000028} - {architecture}:
        assert answer(program, other, numbers["ioctl"]) == KILL
    if machine == "x86_64":
        assert answer(program, architecture, 0x40000000 | 39) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 5 | 0o2000000 | 0o4000), ALLOW),
        ("socketpair", (1, 2), EPERM),
        ("socketpair", (1, 3), EPERM),
        ("socketpair", (2, 1), EPERM),
        ("socketpair", (30, 1), EPERM),
        ("clone", (0x3D0F00 | 17,), ALLOW),
        ("clone", (0x10000000 | 17,), EPERM),
        ("clone", (0x20000000 | 0x00020000 | 17,), EPERM),
        ("clone", (0x40000000,), EPERM),
        ("ioctl", (0, 0x541B), ALLOW),
        ("ioctl", (0, 0x5412), EPERM),
        ("ioctl", (0, 0x5412 | 1 << 40), EPERM),
        ("ioctl", (3, 0x40086602), EPERM),
        ("personality", (0xFFFFFFFF,), ALLOW),
        ("personality", (0x0040000,), EPERM),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (4711, 7), EPERM),
        ("setpriority", (0, 0, 19), ALLOW),
        ("setpriority", (0, 4711, 19), EPERM),
        ("setpriority", (2, 0, 19), EPERM),
        ("openat", (-100, 0, 0), ALLOW),
        ("openat", (-100, 0, 0o1 | 0o100 | 0o1000), ALLOW),
        ("openat", (-100, 0, 0o2 | 0o1000), ALLOW),
        ("openat", (-100, 0, 0o1000), EPERM),
        ("openat", (-100, 0, 0o3 | 0o1000), EPERM),
        ("mknodat", (-100, 0, 0o010644), ALLOW),
        ("mknodat", (-100, 0, 0o060644), EPERM),
        ("mknodat", (-100, 0, 0o020644), EPERM),
        ("prctl", (15,), ALLOW),
        ("prctl", (1,), EPERM),
        ("kill", (-1, 9), EPERM),
        ("kill", (0, 9), ALLOW),
        ("kill", (4712, 9), ALLOW),
        ("kill", (4711, 9), EPERM),
        ("kill", (-4711, 9), EPERM),
        ("tgkill", (4711, 4711, 9), EPERM),
        ("tgkill", (4712, 4712, 9), ALLOW),
        ("tkill", (4711, 9), EPERM),
        ("rt_sigqueueinfo", (4711, 9), EPERM),
        ("rt_tgsigqueueinfo", (4711, 4711, 9), EPERM),
        ("pidfd_open", (4711,), EPERM),
        ("pidfd_open", (4712,), ALLOW),
    ],
)
def test_filter_judges_arguments(machine: str, call: str, arguments: tuple[int, ...], expected: int) -> None:
    program = seccomp.filter_program(protected_pids=[4711], machine=machine)
    assert answer(program, ARCHITECTURES[machine], numbers_of(machine)[call], arguments) == expected


def test_unsupported_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.filter_program(machine="riscv64")


PRELUDE = """
import ctypes, errno, json, os, sys
sys.path.insert(0, {root!r})
from zbgrpo.rewards.sandbox import landlock, seccomp
given = json.loads({given!r})
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *codes):
    "Name of the error that the call failed with, or 'done'."
    try:
        result = call()
    except OSError as error:
        return errno.errorcode[error.errno]
    if isinstance(result, int) and result == -1:
        return errno.errorcode[ctypes.get_errno()]
    return "done"
def tell(**found):
    print(json.dumps(found))
seccomp.no_new_privileges()
"""
FILTERED = "seccomp.install(seccomp.filter_program(given.get('protected', ())))\n"
RESTRICTED = "landlock.restrict(given['read_only'], given['writable'])\n"


def run_script(code: str, given: Mapping[str, object] | None = None, folder: Path | None = None) -> str:
    """Standard output of a script behind `PRELUDE`; fails with what it said if it did not end well."""
    ended = run_process(code, given, folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_process(
    code: str, given: Mapping[str, object] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    prelude = PRELUDE.format(root=str(Path(zbgrpo.__file__).parents[1]), given=json.dumps(given or {}))
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=folder,
        check=False,
    )


@needs_filter
def test_kernel_refuses_every_listed_call() -> None:
    """All arguments are -1: none of the calls could do anything if it were let through."""
    numbers = {name: number for name, number in numbers_of(platform.machine()).items() if name in seccomp._REFUSED}
    code = """
    arguments = [ctypes.c_long(-1)] * 6
    tell(**{name: refused(lambda: libc.syscall(number, *arguments)) for name, number in given["numbers"].items()})
    """
    found = json.loads(run_script(FILTERED + textwrap.dedent(code), {"numbers": numbers}))
    assert set(found) == set(numbers)
    assert {name: code for name, code in found.items() if code != "EPERM"} == {}


@needs_filter
def test_filtered_process_reaches_nobody(tmp_path: Path) -> None:
    """Independent of our table of numbers: through libc and Python."""
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        abstract.bind("\0" + tmp_path.name + str(os.getpid()))
        abstract.listen()
        given = {"parent": os.getpid(), "protected": [os.getpid()], "file": str(tmp_path / "file")}
        given["mq_unlink"] = {"x86_64": 241, "aarch64": 181}[platform.machine()]
        (tmp_path / "file").write_text("kept")
        code = """
        import fcntl, resource, signal, socket
        pair = socket.socketpair()
        parent, file = given["parent"], given["file"]
        readable = os.open(file, os.O_RDONLY)
        place = ctypes.create_string_buffer(16)
        tell(
            tcp=refused(lambda: socket.socket()),
            udp=refused(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)),
            netlink=refused(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
            packet=refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
            vsock=refused(lambda: socket.socket(socket.AF_VSOCK)),
            unix=refused(lambda: socket.socket(socket.AF_UNIX)),
            datagrams=refused(lambda: socket.socketpair(type=socket.SOCK_DGRAM)),
            reconnect=refused(lambda: pair[0].connect(file)),
            rebind=refused(lambda: pair[0].bind(file + ".socket")),
            attach=refused(lambda: libc.ptrace(16, parent, 0, 0)),
            trace_me=refused(lambda: libc.ptrace(0, 0, 0, 0)),
            read=refused(lambda: libc.process_vm_readv(parent, place, 1, place, 1, 0)),
            limit=refused(lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE)),
            affinity=refused(lambda: os.sched_setaffinity(parent, {0})),
            realtime=refused(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
            priority=refused(lambda: os.setpriority(os.PRIO_PROCESS, parent, 19)),
            kill=refused(lambda: os.kill(parent, 0)),
            group=refused(lambda: os.killpg(parent, 0)),
            everyone=refused(lambda: os.kill(-1, 0)),
            pidfd=refused(lambda: os.pidfd_open(parent)),
            mount=refused(lambda: libc.mount(b"none", file.encode(), b"tmpfs", 0, None)),
            unshare=refused(lambda: libc.unshare(0x10000000)),
            root=refused(lambda: os.chroot(".")),
            personality=refused(lambda: libc.personality(0x0040000)),
            orphan=refused(lambda: libc.prctl(1, 0, 0, 0, 0)),
            shared=refused(lambda: libc.shmget(0, 4096, 0o1600)),
            attach_shared=refused(lambda: libc.shmat(0, None, 0o10000)),
            queue=refused(lambda: libc.syscall(given["mq_unlink"], b"zbgrpo-no-such-queue")),
            watch=refused(lambda: libc.inotify_init1(0)),
            hidden=refused(lambda: os.memfd_create("hidden")),
            type_in=refused(lambda: fcntl.ioctl(0, 0x5412, b"x")),
            device=refused(lambda: os.mknod(file + ".device", 0o020600, os.makedev(1, 5))),
            mode=refused(lambda: os.chmod(file, 0)),
            mode_of_open=refused(lambda: os.fchmod(readable, 0)),
            owner=refused(lambda: os.chown(file, -1, -1)),
            times=refused(lambda: os.utime(file, (0, 0))),
            attribute=refused(lambda: os.setxattr(file, "user.name", b"")),
            cut=refused(lambda: os.truncate(file, 0)),
            emptied=refused(lambda: os.open(file, os.O_RDONLY | os.O_TRUNC)),
        )
        """
        found = json.loads(run_script(FILTERED + textwrap.dedent(code), given))
        assert {name: code for name, code in found.items() if code != "EPERM"} == {}
        for listener in (tcp, unix, abstract):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert (tmp_path / "file").read_text() == "kept"


@needs_filter
@pytest.mark.skipif(platform.machine() != "x86_64", reason="about calls of other architectures on x86_64")
@pytest.mark.parametrize("way", ["x32", "i386"])
def test_calls_of_other_architectures_kill(way: str) -> None:
    code = {
        "x32": "libc.syscall(0x40000000 | 39)\n",
        # mov eax, 20 (getpid); int 0x80; ret
        "i386": """
            import mmap
            memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            memory.write(bytes.fromhex("b814000000cd80c3"))
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            ctypes.CFUNCTYPE(ctypes.c_int)(address)()
            """,
    }[way]
    ended = run_process(FILTERED + textwrap.dedent(code) + "\nprint('survived')")
    assert (ended.returncode, ended.stdout) == (-signal.SIGSYS, "")


HONEST = {
    "threads": """
        import concurrent.futures
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            print(sum(pool.map(abs, range(-3, 3))))
        """,
    "subprocess": """
        import subprocess
        print(subprocess.run([sys.executable, "-c", "print(input()[::-1])"], input="olleh", capture_output=True,
                             text=True, start_new_session=True).stdout.strip())
        """,
    "killing a child": """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        child.kill()
        print(child.wait())
        """,
    "multiprocessing": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        """,
    "asyncio": """
        import asyncio
        async def main():
            child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE,
                                                         stdout=asyncio.subprocess.PIPE)
            out, _ = await child.communicate(b"through")
            print(out.decode(), await asyncio.to_thread(abs, -1))
        asyncio.run(main())
        """,
    "numpy": """
        numpy = __import__("numpy")
        print(int((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum()))
        """,
    "files": """
        import pathlib, shutil, tempfile
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = pathlib.Path(folder, "a")
            path.touch()
            path.touch()
            path.write_text("some text")
            path.open("r+").truncate(4)
            shutil.copyfile(path, path.with_name("b"))
            os.rename(path.with_name("b"), path.with_name("c"))
            os.mkfifo(path.with_name("fifo"))
            print(path.with_name("c").read_text(), len(os.listdir(folder)))
        """,
    "own limits": """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print(resource.getrlimit(resource.RLIMIT_CORE)[0], os.nice(1))
        """,
}
HONEST_OUTPUT = {
    "threads": "9",
    "subprocess": "hello",
    "killing a child": "-9",
    "multiprocessing": "[1, 2]",
    "asyncio": "through 1",
    "numpy": str(64**3),
    "files": "some 3",
    "own limits": "0 1",
}


@needs_filter
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_do_not_notice_the_filter(name: str, tmp_path: Path) -> None:
    base = os.nice(0)
    expected = HONEST_OUTPUT[name] if name != "own limits" else f"0 {base + 1}"
    assert run_script(FILTERED + textwrap.dedent(HONEST[name]), folder=tmp_path).strip() == expected


def library_folders() -> list[str]:
    """What an interpreter needs to start."""
    system = [path for path in ("/usr", "/lib", "/lib64", "/bin", "/etc", "/dev/urandom") if os.path.exists(path)]
    return [*system, sys.prefix, sys.base_prefix, str(Path(zbgrpo.__file__).parents[1])]


@needs_landlock
@pytest.mark.parametrize("version", [None, 1, 2, 3, 4, 5, 6])
def test_landlock_confines_to_what_is_listed(version: int | None, tmp_path: Path) -> None:
    """With the kernel's own version, and with what the code does for older ones."""
    if version is not None and version > landlock.abi():
        pytest.skip("the kernel has an older Landlock")
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "secret").write_text("secret")
    (other / "public").write_text("public")
    given = {
        "read_only": [*library_folders(), str(other / "public"), "/no/such/folder"],
        "writable": [str(own), "/dev/null"],
        "version": version,
        "other": str(other),
    }
    code = """
    import pathlib, subprocess
    own, other = pathlib.Path("."), pathlib.Path(given["other"])
    os.symlink(other / "secret", "way")
    if given["version"] is not None:
        landlock.abi = lambda: given["version"]
    """
    attempts = """
    open("/dev/null", "w").write("x")
    pathlib.Path("inside").write_text("written")
    os.mkdir("sub")
    os.truncate("inside", 2)
    deeper = refused(lambda: os.rename("inside", "sub/inside"))
    tell(
        deeper=deeper,
        public=(other / "public").read_text(),
        child=subprocess.run([sys.executable, "-c", "import json"], capture_output=True).returncode,
        read=refused(lambda: (other / "secret").read_text()),
        through_link=refused(lambda: pathlib.Path("way").read_text()),
        listing=refused(lambda: os.listdir(other)),
        write_public=refused(lambda: (other / "public").write_text("")),
        create=refused(lambda: (other / "new").write_text("")),
        remove=refused(lambda: (other / "public").unlink()),
        folder=refused(lambda: (other / "new").mkdir()),
        take=refused(lambda: os.rename(other / "public", "taken")),
        give=refused(lambda: os.rename("way", other / "way")),
        hardlink=refused(lambda: os.link(other / "secret", "linked")),
        execute=refused(lambda: os.execv(other / "secret", ["x"])),
        device=refused(lambda: os.mknod("device", 0o020600, os.makedev(1, 5))),
        by_proc=refused(lambda: open(f"/proc/{os.getppid()}/environ").read()),
    )
    """
    found = json.loads(run_script(textwrap.dedent(code) + RESTRICTED + textwrap.dedent(attempts), given, folder=own))
    assert (found.pop("public"), found.pop("child")) == ("public", 0)
    assert found.pop("deeper") == ("EXDEV" if version == 1 else "done")
    assert {name: code for name, code in found.items() if code not in {"EACCES", "EXDEV", "EPERM"}} == {}
    assert sorted(path.name for path in other.iterdir()) == ["public", "secret"]
    assert (other / "public").read_text() == "public"


@needs_landlock
def test_landlock_truncation_and_ports(tmp_path: Path) -> None:
    if landlock.abi() < 4:
        pytest.skip("needs Landlock ABI 4")
    (tmp_path / "file").write_text("kept")
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        given = {"read_only": ["/"], "writable": [], "port": tcp.getsockname()[1]}
        code = """
        import socket
        tell(
            cut=refused(lambda: os.truncate("file", 0)),
            emptied=refused(lambda: os.open("file", os.O_RDONLY | os.O_TRUNC)),
            connect=refused(lambda: socket.create_connection(("127.0.0.1", given["port"]), 5)),
            bind=refused(lambda: socket.socket().bind(("127.0.0.1", 0))),
        )
        """
        found = json.loads(run_script(RESTRICTED + textwrap.dedent(code), given, folder=tmp_path))
    assert set(found.values()) == {"EACCES"}
    assert (tmp_path / "file").read_text() == "kept"


@needs_landlock
def test_landlock_signals_and_abstract_sockets_stay_inside(tmp_path: Path) -> None:
    if landlock.abi() < 6:
        pytest.skip("needs Landlock ABI 6")
    name = f"\0zbgrpo-test-{os.getpid()}-{tmp_path.name}"
    with (
        socket.socket(socket.AF_UNIX) as listener,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bait,
    ):
        listener.bind(name)
        listener.listen()
        given = {"read_only": ["/"], "writable": [], "name": name, "bait": bait.pid}
        code = """
        import signal, socket, subprocess
        child = subprocess.Popen(["sleep", "600"])
        tell(
            signal=refused(lambda: os.kill(given["bait"], signal.SIGKILL)),
            pidfd=refused(lambda: signal.pidfd_send_signal(os.pidfd_open(given["bait"]), signal.SIGKILL)),
            parent=refused(lambda: os.kill(os.getppid(), 0)),
            connect=refused(lambda: socket.socket(socket.AF_UNIX).connect(given["name"])),
            own_child=refused(lambda: child.kill()),
            ended=child.wait(),
        )
        """
        found = json.loads(run_script(RESTRICTED + textwrap.dedent(code), given))
        assert bait.poll() is None
        bait.communicate(b"\n", timeout=PATIENCE_SECONDS)
    assert found == {
        **dict.fromkeys(("signal", "pidfd", "parent", "connect"), "EPERM"),
        "own_child": "done",
        "ended": -signal.SIGKILL,
    }


@needs_landlock
def test_landlock_writable_path_must_exist(tmp_path: Path) -> None:
    code = "tell(result=refused(lambda: landlock.restrict([], ['/no/such/folder'])), still=os.listdir('/') != [])"
    assert json.loads(run_script(code, folder=tmp_path)) == {"result": "ENOENT", "still": True}


@needs_filter
@needs_landlock
@pytest.mark.parametrize("name", [name for name in HONEST if name != "multiprocessing"])
def test_honest_programs_do_not_notice_both(name: str, tmp_path: Path) -> None:
    """But for what needs /dev/shm, where glibc keeps the semaphores behind `multiprocessing.Lock`."""
    expected = HONEST_OUTPUT[name] if name != "own limits" else f"0 {os.nice(0) + 1}"
    given = {"read_only": library_folders(), "writable": [str(tmp_path), "/dev/null"]}
    assert run_script(FILTERED + RESTRICTED + textwrap.dedent(HONEST[name]), given, folder=tmp_path).strip() == expected


def test_importing_them_is_cheap() -> None:
    """Between fork and exec nothing may be imported that takes long, so nothing of ours and no `typing`."""
    root = str(Path(zbgrpo.__file__).parents[1])
    code = f"""
    import sys
    sys.path.insert(0, {root!r})
    import zbgrpo.rewards.sandbox.landlock, zbgrpo.rewards.sandbox.seccomp
    print([name for name in sys.modules if name in ("typing", "collections", "re", "msgspec", "zbgrpo.errors")])
    """
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert ended.stdout.strip() == "[]"


def test_prctl_failure_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        seccomp._control(-1 & 0x7FFFFFFF, 0)
    assert caught.value.errno == errno.EINVAL
    assert ctypes.get_errno() in {errno.EINVAL, 0}
