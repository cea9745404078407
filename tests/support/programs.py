"""Programs for a sandbox: hostile ones, each an attack that says `ESCAPED` if it worked, and honest ones with output.

Attacks that would harm the machine if they worked are aimed at stand-ins, whose whereabouts a hostile program is told
on standard input, and are bounded: bombs run out of tokens, leaks end, survivors give up after some seconds.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

from zbgrpo.rewards.sandbox.base import End, Limits

ESCAPED = b"ESCAPED"
ANY_END = frozenset(End) - {End.INFRASTRUCTURE}
MIB = 1024**2
SHORT = 0.7
"""Seconds: enough for an interpreter to start, for programs that do not end."""


@dataclass(frozen=True)
class Hostile:
    """An attack. At no level may it outlast its time, leave a process, or be no fault of its own (INFRASTRUCTURE)."""

    name: str
    source: str
    limits: Limits
    ends: frozenset[End]
    """How it may end."""
    from_level: int
    """The lowest level that promises that it neither says ESCAPED nor prints or changes what is not its own."""
    runs_from: int
    """The lowest level at which it may be run at all: below, it would harm the test."""
    stdout: bytes | None
    """Exactly what it prints, if that is the point."""
    exit_status: int | None
    """Of `EXITED`, or the negative signal, if that is the point."""
    signals: bool
    """It needs the kernel to keep signals inside (Landlock ABI 6, or namespaces)."""


@dataclass(frozen=True)
class Honest:
    """A program that must run at every level."""

    name: str
    source: str
    stdout: bytes
    stdin: bytes
    exit_status: int
    shared_memory: bool
    """It needs a /dev/shm of its own, which level 1 can give only where the machine lets it mount."""


PRELUDE = """\
import ctypes, json, os, signal, subprocess, sys, time
T = json.loads(sys.stdin.readline())
ctypes.CDLL(None).prctl(15, T["mark"].encode(), 0, 0, 0)
def escaped(*how):
    print("ESC" + "APED", *how, flush=True)
def attempt(*calls):
    for number, call in enumerate(calls):
        try:
            call()
        except BaseException as error:
            continue
        escaped(number)
def until(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
"""

HOSTILE: list[Hostile] = []
HONEST: list[Honest] = []


def hostile(
    name: str,
    source: str,
    *,
    ends: frozenset[End] | set[End] = ANY_END,
    level: int = 0,
    runs_from: int = 0,
    stdout: bytes | None = None,
    exit_status: int | None = None,
    signals: bool = False,
    raw: bool = False,
    **limits: float,
) -> None:
    whole = source if raw else PRELUDE + textwrap.dedent(source)
    allowed = Limits(**{"wall_seconds": 6.0, "memory_bytes": 512 * MIB, "output_bytes": MIB, **limits})  # type: ignore[arg-type]
    HOSTILE.append(Hostile(name, whole, allowed, frozenset(ends), level, runs_from, stdout, exit_status, signals))


def honest(
    name: str,
    source: str,
    stdout: str | bytes,
    *,
    stdin: bytes = b"",
    exit_status: int = 0,
    shared_memory: bool = False,
) -> None:
    expected = stdout.encode() if isinstance(stdout, str) else stdout
    HONEST.append(Honest(name, textwrap.dedent(source), expected, stdin, exit_status, shared_memory))


# fmt: off

TIME, ENDED, CRASH, OUTPUT = {End.TIME}, {End.EXITED}, {End.SIGNALLED}, {End.OUTPUT}

# Time.

hostile("busy loop", "while True: pass", ends=TIME, wall_seconds=SHORT)
hostile("sleep", "time.sleep(3600)", ends=TIME, wall_seconds=SHORT)
hostile("ignored signals", """
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(1)
    """, ends=TIME, wall_seconds=SHORT)
hostile("everything caught", """
    while True:
        try:
            while True: pass
        except BaseException: pass
    """, ends=TIME, wall_seconds=SHORT)
hostile("interpreter held in C", "print(pow(3, 10**9) % 10)", wall_seconds=SHORT)
hostile("huge decimal", "sys.set_int_max_str_digits(0); print(len(str(10 ** 10**8)))", wall_seconds=SHORT)
hostile("tower of powers", "print(10 ** 10 ** 10 ** 8)", wall_seconds=SHORT)
hostile("backtracking", "import re; re.match(r'(a|a)*$', 'a' * 64 + 'b')", ends=TIME, wall_seconds=SHORT)
hostile("changed clocks", """
    attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
    time.time = time.monotonic = time.perf_counter = lambda: 0.0
    time.sleep = lambda seconds: None
    while True: time.sleep(1)
    """, ends=TIME, level=1, wall_seconds=SHORT)
hostile("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", ends=TIME, wall_seconds=SHORT)
hostile("closes its output", """
    for descriptor in range(3): os.close(descriptor)
    while True: time.sleep(1)
    """, ends=TIME, wall_seconds=SHORT)
hostile("work in threads at the end", """
    import threading
    def work():
        while True: pass
    threading.Thread(target=work).start()
    """, ends=TIME, wall_seconds=SHORT)
hostile("timers reset", """
    import resource
    signal.setitimer(signal.ITIMER_REAL, 0); signal.setitimer(signal.ITIMER_PROF, 0); signal.alarm(0)
    for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE"):
        limit = getattr(resource, name)
        soft, hard = resource.getrlimit(limit)
        if hard != resource.RLIM_INFINITY:
            attempt(lambda: resource.setrlimit(limit, (hard + 1, hard + 1)))
    while True: pass
    """, ends=TIME, wall_seconds=SHORT)

# Processes and threads.

hostile("fork bomb", """
    tokens, more = os.pipe()
    os.write(more, b"x" * 400)
    os.set_blocking(tokens, False)
    for _ in until(8):
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)
            continue
        try:
            os.read(tokens, 1)
        except BlockingIOError:
            escaped()
            break
    """, wall_seconds=1.5, num_processes=32)
hostile("daemon", """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for _ in until(20): time.sleep(0.1)
        os._exit(0)
    os.wait()
    print("main is done")
    """, ends=ENDED, stdout=b"main is done\n")
hostile("daemon without output", """
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
                os.closerange(0, 1024)
                for _ in until(20): time.sleep(0.1)
            os._exit(0)
    print("main is done")
    """, ends=ENDED, stdout=b"main is done\n")
hostile("runs from process to process", """
    if os.fork() == 0:
        for _ in until(8):
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
    """)
hostile("several run from process to process", """
    for _ in range(3):
        if os.fork() == 0:
            for _ in until(8):
                if os.fork() != 0:
                    os._exit(0)
                os.setsid()
            os._exit(0)
    for _ in until(8): pass
    """, ends=TIME, wall_seconds=SHORT)
hostile("stopped children", """
    for _ in range(3):
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
    print("main is done")
    """, ends=ENDED, stdout=b"main is done\n")
hostile("child keeps the output open", """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)", T["mark"]], start_new_session=True)
    print("main is done")
    """, ends=ENDED, stdout=b"main is done\n")
hostile("adopts its own orphans", """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    if os.fork() == 0:
        if os.fork() == 0:
            for _ in until(20): time.sleep(0.1)
        os._exit(0)
    os.wait()
    os._exit(0)
    """, ends=ENDED)
hostile("zombies", """
    for _ in range(40):
        if os.fork() == 0:
            os._exit(0)
    print("main is done")
    """, num_processes=64)
hostile("ten thousand threads", """
    import threading
    done = threading.Event()
    def wait(): done.wait(10)
    for _ in range(10_000):
        threading.Thread(target=wait, daemon=True).start()
    escaped()
    """, wall_seconds=3.0)
hostile("many open files", """
    attempt(lambda: [os.open("/dev/null", os.O_RDONLY) for _ in range(1000)])
    """, ends=ENDED, num_files=64)
hostile("kills the one that started it", """
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5)
    """, level=1, runs_from=1, signals=True)
hostile("kills a process by number", """
    attempt(
        lambda: os.kill(T["bait_pid"], signal.SIGKILL),
        lambda: os.killpg(T["bait_pid"], signal.SIGKILL),
        lambda: os.kill(T["parent_pid"], 0),
        lambda: signal.pidfd_send_signal(os.pidfd_open(T["bait_pid"]), signal.SIGKILL),
    )
    """, ends=ENDED, level=1, signals=True)
# With signal 0: the permission is the same, and the machine survives a mistake here.
hostile("signals everybody", "attempt(lambda: os.kill(-1, 0))", ends=ENDED, level=1)
hostile("kills its group", "os.killpg(0, signal.SIGKILL)", ends=CRASH, exit_status=-9)
hostile("limits of another process", """
    import resource
    attempt(
        lambda: resource.prlimit(T["bait_pid"], resource.RLIMIT_NOFILE, (5, 5)),
        lambda: resource.prlimit(T["parent_pid"], resource.RLIMIT_NOFILE),
        lambda: os.setpriority(os.PRIO_PROCESS, T["bait_pid"], 19),
        lambda: os.sched_setaffinity(T["bait_pid"], os.sched_getaffinity(0)),
    )
    """, ends=ENDED, level=1)
hostile("real-time priority", """
    attempt(
        lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    )
    """, ends=ENDED, level=1)
hostile("looks into another process", """
    libc = ctypes.CDLL(None, use_errno=True)
    def trace(pid):
        if libc.ptrace(0x4206, pid, 0, 0) != 0: raise OSError
    def read(name): return open(f"/proc/{T['bait_pid']}/{name}", "rb").read(1)
    here = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
    def copy():
        if libc.process_vm_readv(T["bait_pid"], vector, 1, vector, 1, 0) < 0 and ctypes.get_errno() != 14:
            raise OSError
    attempt(
        lambda: trace(T["bait_pid"]),
        lambda: read("mem"),
        lambda: read("environ"),
        lambda: read("maps"),
        lambda: os.listdir(f"/proc/{T['bait_pid']}/fd"),
        lambda: os.readlink(f"/proc/{T['bait_pid']}/cwd"),
        copy,
    )
    """, ends=ENDED, level=1)

# Memory.

hostile("all memory at once", "text = 'x' * 10**11; escaped(len(text))")
hostile("slow leak", """
    kept = []
    for _ in range(100):
        kept.append(b"x" * (20 << 20))
        time.sleep(0.01)
    escaped()
    """, memory_bytes=256 * MIB)
hostile("children that are too many together", """
    count, one = os.pipe()
    for _ in range(6):
        if os.fork() == 0:
            kept = b"x" * (100 << 20)
            os.write(one, b"1")
            time.sleep(2)
            os._exit(0)
    size = 0
    while size < 6: size += len(os.read(count, 6))
    time.sleep(1)
    escaped()
    """, memory_bytes=300 * MIB, ends={End.MEMORY})
hostile("memory without a file", """
    import mmap
    kept = [mmap.mmap(-1, 64 << 20) for _ in range(16)]
    for block in kept:
        block.write(b"x" * (64 << 20))
    time.sleep(1)
    escaped()
    """, memory_bytes=256 * MIB)
hostile("memory in no address space", """
    kept = []
    for _ in range(24):
        kept.append(os.memfd_create("kept"))
        os.write(kept[-1], b"x" * (16 << 20))
    time.sleep(1)
    escaped()
    """, level=1, memory_bytes=256 * MIB)
hostile("compressed bomb", """
    import gzip
    member = gzip.compress(bytes(32 << 20), 1)
    escaped(len(gzip.decompress(member * 64)))
    """, memory_bytes=256 * MIB)
hostile("endless recursion", "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", wall_seconds=3.0)
hostile("endless recursion in C", """
    sys.setrecursionlimit(10**9)
    value = []
    for _ in range(10**6): value = [value]
    repr(value)
    """, wall_seconds=SHORT)

# Output and crashes.

hostile("endless output", "while True: print('y' * 1000)", ends=OUTPUT)
hostile("endless errors", "while True: sys.stderr.write('y' * 1000)", ends=OUTPUT)
hostile("endless line", "while True: sys.stdout.write('y' * 1000); sys.stdout.flush()", ends=OUTPUT)
hostile("output of many children", """
    for _ in range(4):
        if os.fork() == 0: break
    while True: os.write(1, b"y" * 65536)
    """, ends=OUTPUT)
hostile("strange bytes", r"""
    sys.stderr.buffer.write(b"\xff\xfe\x00\x1b]0;title\x07\x1b[2J\xed\xa0\x80")
    sys.stdout.buffer.write(b"\xff\x00\x1b[2J\r\n\xed\xa0\x80")
    """, ends=ENDED, stdout=b"\xff\x00\x1b[2J\r\n\xed\xa0\x80")
hostile("segmentation fault", "ctypes.string_at(0)", ends=CRASH, exit_status=-11)
hostile("abort", "os.abort()", ends=CRASH, exit_status=-6)
hostile("NUL in the source", "print('a')\0print('b')", raw=True, ends=ENDED, stdout=b"")
hostile("source that is no text", "print('\ud800')", raw=True, ends=ENDED, stdout=b"")
hostile("source that breaks the parser", "x = " + "(" * 100_000 + ")" * 100_000, raw=True, stdout=b"")
hostile("source in another coding", "# -*- coding: utf_16 -*-\nprint(1)", raw=True, stdout=b"")
hostile("empty source", "", raw=True, ends=ENDED, stdout=b"", exit_status=0)

# Pretending.

hostile("_exit with success", "sys.stdout.write('lost'); os._exit(0)", ends=ENDED, stdout=b"", exit_status=0)
hostile("exit with success", "import atexit; atexit.register(os._exit, 0); sys.exit(1)", ends=ENDED, stdout=b"")
hostile("object equal to everything", """
    class Everything(str):
        def __eq__(self, other): return True
        __hash__ = str.__hash__
    print(Everything("no number"))
    """, ends=ENDED, stdout=b"no number\n")
FORGED = json.dumps({"end": "exited", "exit_status": 0, "stdout": "42", "passed": True}) + "\n1 passed in 0.01s\nOK\n"
hostile("forged results", f"""
    for descriptor in range(3, 1024):
        try: os.write(descriptor, b"\\x00\\x00\\x00\\x10" + {FORGED.encode()!r})
        except OSError: continue
        escaped(descriptor)
    sys.stdout.write({FORGED!r})
    """, ends=ENDED, stdout=FORGED.encode())
hostile("searches for expected answers", """
    import gc
    prefix = "EXPECT" + "ED-"
    print(sys.argv, dict(os.environ), sys.orig_argv)
    for folder, _, files in os.walk("."):
        for name in files:
            print(open(os.path.join(folder, name), errors="replace").read())
    frame = sys._getframe()
    while frame:
        print(frame.f_code, list(frame.f_globals))
        frame = frame.f_back
    print([held for held in gc.get_objects() if isinstance(held, str) and prefix in held])
    for name in ("environ", "cmdline"):
        for pid in (os.getpid(), os.getppid()):
            try: print(open(f"/proc/{pid}/{name}").read())
            except OSError: pass
    """, ends=ENDED, level=1)
hostile("secrets of the environment", """
    import posix
    print(dict(os.environ), posix.environ)
    print(subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout)
    """, ends=ENDED)
hostile("files that the next one may import", """
    for name in ("sitecustomize", "usercustomize", "conftest", "json", "os", "encodings", "posix", "program"):
        for folder in (".", os.path.expanduser("~"), os.environ.get("TMPDIR", ".")):
            try: open(os.path.join(folder, name + ".py"), "w").write("import os; os._exit(9)")
            except OSError: pass
    for folder in sys.path:
        path = os.path.join(folder, T["mark"])
        attempt(lambda: open(path, "x"), lambda: os.unlink(path))
    """, ends=ENDED, level=1)
hostile("changed interpreter", """
    import builtins
    json.loads = json.dumps = builtins.len = builtins.open = builtins.__import__ = lambda *_, **__: True
    sys.exit = os._exit = lambda *_: None
    print("changed")
    """, ends=ENDED, stdout=b"changed\n")
hostile("inherited descriptors", """
    def use(descriptor):
        for call in (lambda: os.write(descriptor, b"x"), lambda: os.read(descriptor, 1)):
            try: call()
            except OSError: continue
            escaped(descriptor)
    for descriptor in range(3, 1024): use(descriptor)
    """, ends=ENDED)

# Files.

hostile("reads what is not its own", """
    attempt(
        lambda: print(open(T["canary"]).read()),
        lambda: print(os.listdir(T["folder"])),
        lambda: open("/etc/shadow").read(),
        lambda: os.listdir(os.path.join("/proc", str(T["parent_pid"]), "cwd")),
    )
    """, ends=ENDED, level=1)
hostile("writes what is not its own", """
    canary, folder = T["canary"], T["folder"]
    attempt(
        lambda: open(canary, "a").write("changed"),
        lambda: open(canary, "w").write("changed"),
        lambda: os.truncate(canary, 0),
        lambda: os.open(canary, os.O_RDONLY | os.O_TRUNC),
        lambda: os.rename(canary, canary + ".moved"),
        lambda: os.link(canary, "linked"),
        lambda: os.unlink(canary),
        lambda: open(os.path.join(folder, "new"), "w"),
        lambda: os.mkdir(os.path.join(folder, "new")),
        lambda: os.symlink("/", os.path.join(folder, "new")),
        lambda: __import__("shutil").rmtree(folder),
    )
    """, ends=ENDED, level=1)
hostile("attributes of what is not its own", """
    canary, folder = T["canary"], T["folder"]
    attempt(
        lambda: os.chmod(canary, 0o777),
        lambda: os.chmod(folder, 0),
        lambda: os.utime(canary, (0, 0)),
        lambda: os.chown(canary, os.getuid(), os.getgid()),
        lambda: os.setxattr(canary, "user.changed", b"x"),
        lambda: os.fchmod(os.open(canary, os.O_RDONLY), 0),
    )
    """, ends=ENDED, level=1)
hostile("links in its folder", """
    os.symlink(T["canary"], "stdout"), os.symlink(T["folder"], "folder"), os.symlink(T["canary"], "result.json")
    os.symlink("/", "root"), os.symlink("loop", "loop")
    print("made")
    """, ends=ENDED, stdout=b"made\n")
hostile("own folder replaced by a link", """
    here = os.getcwd()
    try:
        os.rename(here, here + ".moved")
        os.symlink(T["folder"], here)
    except OSError: pass
    """, ends=ENDED)
hostile("one big file", """
    with open("big", "wb", buffering=0) as file:
        for _ in range(200):
            if file.write(b"x" * (1 << 20)) < 1 << 20: break
        else:
            escaped()
    """, file_bytes=16 * MIB)
hostile("many middling files", """
    for number in range(200):
        open(f"file{number}", "wb").write(b"x" * (1 << 20))
        time.sleep(0.005)
    time.sleep(1)
    escaped()
    """, file_bytes=16 * MIB)
hostile("deleted files that take space", """
    kept = []
    for number in range(60):
        kept.append(open("file", "wb", buffering=0))
        kept[-1].write(b"x" * (2 << 20))
        os.unlink("file")
        time.sleep(0.005)
    time.sleep(1)
    escaped()
    """, file_bytes=16 * MIB)
hostile("sparse file", "attempt(lambda: os.truncate(os.open('sparse', os.O_RDWR | os.O_CREAT), 1 << 40))", ends=ENDED)
hostile("many empty files", """
    for number in range(20_000):
        os.close(os.open(f"file{number}", os.O_WRONLY | os.O_CREAT))
    """)
hostile("deep folders", """
    for _ in range(2000):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    open("file", "w").close()
    """)
hostile("folders that cannot be listed", """
    for name in ("a", "b"):
        os.mkdir(name)
        open(f"{name}/file", "w").close()
        try: os.chmod(name, 0)
        except OSError: pass
    os.umask(0)
    os.mkdir("c", 0o300)
    os.mkdir("c/d", 0o300)
    open("c/d/file", "w").close()
    os.mkdir("e", 0)
    """)
hostile("files that cannot be deleted", """
    import fcntl
    file = os.open("kept", os.O_RDWR | os.O_CREAT)
    flags = lambda value: fcntl.ioctl(file, 0x40086602, value.to_bytes(8, "little"))
    attempt(lambda: flags(0x10), lambda: flags(0x20))
    """, ends=ENDED)
hostile("devices", """
    import glob
    names = ["/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/dev/tty"]
    names += glob.glob("/dev/nvidia*") + glob.glob("/dev/[sv]d*")
    attempt(*[lambda name=name: os.open(name, os.O_RDONLY) for name in names])
    attempt(lambda: os.mknod("zero", 0o020600, os.makedev(1, 5)))
    """, ends=ENDED, level=1)
hostile("shared memory of others", """
    attempt(
        lambda: open(T["shared"], "rb").read(),
        lambda: open(T["shared"], "r+b").write(b"changed"),
        lambda: os.unlink(T["shared"]),
    )
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run/lock"):
        try: open(os.path.join(folder, T["mark"] + "-left"), "w").write("left for the next one")
        except OSError: pass
    """, ends=ENDED, level=1)
hostile("shared memory that stays", """
    libc = ctypes.CDLL(None)
    if libc.shmget(T["key"], 4096, 0o1600) >= 0: escaped("shm")
    if libc.semget(T["key"], 1, 0o1600) >= 0: escaped("sem")
    if libc.msgget(T["key"], 0o1600) >= 0: escaped("msg")
    """, ends=ENDED, level=1)

hostile("shared memory by its number", """
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    if libc.shmat(T["shm"], None, 0o10000) not in (None, 2**64 - 1): escaped("attached")
    if libc.shmctl(T["shm"], 0, None) == 0: escaped("removed")
    """, ends=ENDED, level=1)
hostile("watches what others do", """
    libc = ctypes.CDLL(None)
    watcher = libc.inotify_init1(0)
    if libc.inotify_add_watch(watcher, T["folder"].encode(), 0xfff) >= 0: escaped()
    """, ends=ENDED, level=1)

# Network and kernel.

hostile("connects by TCP", """
    import socket, urllib.request
    attempt(
        lambda: socket.create_connection(("127.0.0.1", T["tcp_port"]), 2),
        lambda: urllib.request.urlopen(f"http://127.0.0.1:{T['tcp_port']}/", timeout=2),
        lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM).connect(("::1", T["tcp_port"])),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).connect(("127.0.0.1", T["tcp_port"])),
    )
    """, ends=ENDED, level=1)
hostile("sends by UDP", """
    import socket
    attempt(
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", T["udp_port"])),
        lambda: socket.getaddrinfo("localhost.invalid", 80),
    )
    """, ends=ENDED, level=1)
hostile("sends to Unix sockets", """
    import socket
    unix = lambda kind: socket.socket(socket.AF_UNIX, kind)
    attempt(
        lambda: unix(socket.SOCK_STREAM).connect(T["unix"]),
        lambda: unix(socket.SOCK_STREAM).connect("\\0" + T["abstract"]),
        lambda: unix(socket.SOCK_DGRAM).sendto(b"secret", "\\0" + T["datagrams"]),
        lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"secret", "\\0" + T["datagrams"]),
        lambda: socket.socketpair(type=socket.SOCK_RAW)[0].sendto(b"secret", "\\0" + T["datagrams"]),
    )
    """, ends=ENDED, level=1)
hostile("listens", """
    import socket
    attempt(
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(("", 0)),
        lambda: socket.socket(socket.AF_UNIX).bind("\\0" + T["mark"]),
        lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).bind((0, 0)),
    )
    """, ends=ENDED, level=1)
hostile("installs a package", """
    address = f"http://127.0.0.1:{T['tcp_port']}/simple"
    command = [sys.executable, "-m", "pip", "install", "--retries=0", "--timeout=1", f"--index-url={address}", "x"]
    if subprocess.run(command, capture_output=True).returncode == 0: escaped()
    """, level=1, runs_from=2)
hostile("other rights", """
    libc = ctypes.CDLL(None)
    if libc.unshare(0x10000000) == 0: escaped("user namespace")
    if libc.unshare(0x40000000) == 0: escaped("network namespace")
    if libc.mount(b"none", os.getcwd().encode(), b"tmpfs", 0, None) == 0: escaped("mount")
    for command in (["unshare", "-r", "true"], ["sudo", "-n", "true"], ["su", "-c", "true"]):
        try: status = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode
        except OSError: continue
        if status == 0: escaped(command)
    attempt(lambda: os.setuid(0) if os.getuid() else 1 / 0, lambda: os.chroot("."))
    """, ends=ENDED, level=1)
hostile("rare system calls", """
    import platform
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.create_string_buffer(256)
    if libc.syscall(425, 8, place) >= 0: escaped("io_uring")
    if platform.machine() == "x86_64":
        if libc.syscall(323, 1) >= 0: escaped("userfaultfd")
        if libc.syscall(250, 0, -3, 1) >= 0: escaped("keyctl")
        if libc.syscall(298, place, 0, -1, -1, 0) >= 0: escaped("perf_event_open")
        if libc.syscall(321, 0, place, 128) >= 0: escaped("bpf")
        if libc.syscall(103, 10, place, 0) >= 0: escaped("syslog")
    """, ends=ENDED, level=1)
hostile("calls of another architecture", """
    import mmap, platform
    if platform.machine() != "x86_64": os.kill(os.getpid(), signal.SIGSYS)
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    escaped()
    """, level=1, ends={End.SIGNALLED, End.EXITED})

# Honest programs.

honest("numpy", """
    import numpy as np
    matrix = np.arange(90_000, dtype=np.float64).reshape(300, 300) % 7
    print(int((matrix @ matrix).trace()), np.linalg.matrix_rank(np.eye(50)))
    """, f"{sum((300 * i + j) % 7 * ((300 * j + i) % 7) for i in range(300) for j in range(300))} 50\n")
honest("ten megabytes in", """
    import sys
    print(sum(map(int, sys.stdin.read().split())))
    """, f"{12345 * (10 * MIB // 6)}\n", stdin=b"12345\n" * (10 * MIB // 6))
honest("one megabyte out", """
    for number in range(16_384): print(f"{number:063d}")
    """, "".join(f"{number:063d}\n" for number in range(16_384)))
honest("recursion", """
    import sys
    sys.setrecursionlimit(20_000)
    def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
    print(depth(5000))
    """, "5000\n")
honest("threads", """
    import threading
    from concurrent.futures import ThreadPoolExecutor
    lock, seen = threading.Lock(), []
    def work(n):
        with lock: seen.append(n)
        return n * n
    with ThreadPoolExecutor(8) as pool: print(sum(pool.map(work, range(100))), len(seen))
    """, f"{sum(n * n for n in range(100))} 100\n")
honest("subprocess", """
    import subprocess, sys
    command = [sys.executable, "-c", "import json, sys; print(json.load(sys.stdin)['a'] + 1)"]
    print(subprocess.run(command, input='{"a": 41}', capture_output=True, text=True, check=True).stdout.strip())
    """, "42\n")
honest("multiprocessing", """
    import multiprocessing
    def work(pipe, n): pipe.send([n, n ** 2])
    if __name__ == "__main__":
        mine, other = multiprocessing.Pipe()
        processes = [multiprocessing.Process(target=work, args=(other, n)) for n in range(3)]
        for process in processes: process.start()
        for process in processes: process.join()
        print(sorted(mine.recv() for _ in processes))
    """, "[[0, 0], [1, 1], [2, 4]]\n")
# glibc keeps the semaphores behind these in /dev/shm.
honest("multiprocessing with locks", """
    from concurrent.futures import ProcessPoolExecutor
    import multiprocessing
    def work(n): return n * n
    if __name__ == "__main__":
        with ProcessPoolExecutor(2) as pool: print(list(pool.map(work, range(4))))
        with multiprocessing.Pool(2) as pool: print(pool.map(work, range(4)))
    """, "[0, 1, 4, 9]\n[0, 1, 4, 9]\n", shared_memory=True)
honest("asyncio", """
    import asyncio
    async def work(n):
        await asyncio.sleep(0.01 * (3 - n))
        return n
    async def main():
        print(await asyncio.gather(*map(work, range(3))), await asyncio.to_thread(pow, 2, 10))
    asyncio.run(main())
    """, "[0, 1, 2] 1024\n")
honest("decimals and fractions", """
    from decimal import Decimal, getcontext
    from fractions import Fraction
    getcontext().prec = 30
    print(Decimal(1) / Decimal(7), sum((Fraction(1, n) for n in range(1, 11)), Fraction()))
    """, "0.142857142857142857142857142857 7381/2520\n")
honest("sqlite", """
    import sqlite3
    with sqlite3.connect(":memory:") as base:
        base.execute("create table t (n integer)")
        base.executemany("insert into t values (?)", [(n,) for n in range(1000)])
        print(*base.execute("select sum(n), count(*) from t where n % 2 = 0").fetchone())
    """, f"{sum(range(0, 1000, 2))} 500\n")
honest("files", """
    import os, pathlib, tempfile
    with tempfile.TemporaryDirectory(dir=".") as folder, tempfile.TemporaryFile() as scratch:
        path = pathlib.Path(folder, "a", "b.txt")
        path.parent.mkdir()
        path.touch()
        path.write_text("written\\n" * 3)
        path.rename(path.with_suffix(".bak"))
        scratch.write(b"x" * 100)
        print(len(path.with_suffix(".bak").read_text()), os.listdir(path.parent), scratch.tell())
    print(open("left behind", "w").write("abc"))
    """, "24 ['b.bak'] 100\n3\n")
honest("json", """
    import json, sys
    data = json.load(sys.stdin)
    print(json.dumps({k: data[k] for k in sorted(data)}, separators=(",", ":"), ensure_ascii=False))
    """, '{"a":[1,2.5,null],"b":"\u00e9"}\n', stdin=b'{"b": "\\u00e9", "a": [1, 2.5, null]}')
honest("regular expressions", r"""
    import re
    print(re.sub(r"(\w+)@(\w+)\.com", r"\2 at \1", "mail ann@site.com, bob@home.com"), re.findall(r"\d+", "a1b22"))
    """.replace("\\\\", "\\"), "mail site at ann, home at bob ['1', '22']\n")
honest("unicode", """
    text = input()
    print(text[::-1], len(text), text.upper(), "\N{SNOWMAN}")
    """, "\u00df\U0001f600\u4e2d\u00e9 4 \u00c9\u4e2d\U0001f600SS \u2603\n",
    stdin="\u00e9\u4e2d\U0001f600\u00df\n".encode())
honest("algorithms", """
    import bisect, collections, functools, heapq, itertools, math, random, statistics
    heap = [5, 1, 4]
    heapq.heapify(heap)
    @functools.lru_cache(None)
    def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
    print(heapq.heappop(heap), bisect.bisect([1, 3, 5], 4), *itertools.accumulate(range(5)), fib(90), math.comb(50, 25))
    print(collections.Counter("abracadabra").most_common(1), statistics.median([3, 1, 2]))
    print(random.Random(1).randrange(9) < 9)
    """, "1 2 0 1 3 6 10 2880067194370816120 126410606437752\n[('a', 5)] 2\nTrue\n")
honest("big integers", """
    import math, sys
    sys.set_int_max_str_digits(0)
    print(str(math.factorial(3000))[:20], pow(3, 10**18, 10**9 + 7), len(str(2 ** 100_000)))
    """, f"41493596034378540855 {pow(3, 10**18, 10**9 + 7)} 30103\n")
honest("exit status", """
    import sys
    print("right")
    sys.exit(3)
    """, "right\n", exit_status=3)
honest("error at the end", """
    print("right")
    raise ValueError("and wrong")
    """, "right\n", exit_status=1)
honest("input until the end", """
    total = 0
    try:
        while True: total += sum(map(int, input().split()))
    except EOFError:
        print(total)
    """, "21\n", stdin=b"1 2 3\n4 5\n6")
honest("standard input by its name", """
    with open("/dev/stdin") as numbers: print(sum(map(int, numbers)))
    """, "6\n", stdin=b"1\n2\n3\n")
honest("bytes of standard input", """
    import sys
    data = sys.stdin.buffer.read()
    sys.stdout.buffer.write(bytes(reversed(data)))
    """, bytes(reversed(range(256))), stdin=bytes(range(256)))
honest("classes", """
    from __future__ import annotations
    import dataclasses, enum, typing
    class Color(enum.Enum): RED = 1
    @dataclasses.dataclass(order=True)
    class Point:
        x: int
        y: int = 2
        color: typing.Optional[Color] = None
    print(sorted([Point(3), Point(1)])[0], dataclasses.asdict(Point(1, color=Color.RED))["color"].name)
    """, "Point(x=1, y=2, color=None) RED\n")
honest("dates", """
    import datetime, zoneinfo
    moment = datetime.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    print(moment.astimezone(datetime.timezone.utc).isoformat(), (moment.date() - datetime.date(2000, 2, 29)).days)
    """, "2024-07-01T10:00:00+00:00 8889\n")
honest("source of the system", """
    import inspect, os, pathlib, sys
    class Solution:
        def twice(self, n): return 2 * n
    print(Solution().twice(4), __name__, len(sys.argv), pathlib.Path(__file__).name == os.path.basename(sys.argv[0]))
    assert inspect.getsource(Solution).startswith("class")
    """, "8 __main__ 1 True\n")
