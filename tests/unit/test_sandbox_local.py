"""The local sandbox: each limit, what is left afterwards, who it depends on, and what the machine is found to offer."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import pytest

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.sandbox import bubblewrap, confinement, mounts, probe, processes, runner, supervisor
from zbgrpo.rewards.sandbox.base import End, Execution, Limits
from zbgrpo.rewards.sandbox.folder import PREFIX, PrivateFolder, remove_tree
from zbgrpo.rewards.sandbox.interpreter import outermost, this_interpreter
from zbgrpo.rewards.sandbox.local import LocalSandbox
from zbgrpo.rewards.sandbox.users import become_user, program_user

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

MIB = 1024**2
GENEROUS_SECONDS = 30.0
"""For whatever must happen, on a machine with other things to do."""
LIMITS = Limits(wall_seconds=20.0, memory_bytes=256 * MIB, output_bytes=MIB, file_bytes=8 * MIB, num_processes=32)
SHORT = Limits(wall_seconds=1.0, memory_bytes=256 * MIB)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def private_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A base for the programs' folders that only this test uses, so that its leavings can be told from others'."""
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="zbgrpo-test-", dir="/tmp") as base:
        os.chmod(base, 0o755)
        tempfile.tempdir = base
        try:
            yield base
            assert glob.glob(os.path.join(base, PREFIX + "*")) == []
        finally:
            tempfile.tempdir = before
        assert until(lambda: processes_of(base) == []), processes_of(base)


@pytest.fixture(params=[0, 1, 2])
def sandbox(request: pytest.FixtureRequest) -> LocalSandbox:
    """At each level. Only the last may be missing, where bubblewrap is not installed or may not work."""
    if request.param == 2 and 2 not in probe.examine().levels:
        pytest.skip(probe.examine().shortfalls[2])
    return LocalSandbox(request.param)


def processes_of(base: str) -> list[int]:
    """Processes of which an environment variable (HOME) or an argument names the base."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            known = Path("/proc", name, "environ").read_bytes() + Path("/proc", name, "cmdline").read_bytes()
            if base.encode() in known and int(name) != os.getpid():
                found.append(int(name))
    return found


def until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true."""
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def run(sandbox: LocalSandbox, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Execution:
    began = time.monotonic()
    execution = sandbox.run(source, stdin, limits)
    assert time.monotonic() - began < limits.wall_seconds + GENEROUS_SECONDS
    return execution


def answer(sandbox: LocalSandbox, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> str:
    """Output of a program that must run well."""
    execution = run(sandbox, source, stdin, limits)
    assert (execution.end, execution.exit_status) == (End.EXITED, 0), execution
    return execution.stdout.decode().strip()


# -------------------------------------------------------------------------------------------------- what a program is


def test_a_program_reads_and_writes(sandbox: LocalSandbox) -> None:
    execution = run(sandbox, "import sys\nprint(input()[::-1])\nprint('aside', file=sys.stderr)\nsys.exit(3)", b"abc\n")
    assert execution == Execution(
        end=End.EXITED,
        exit_status=3,
        stdout=b"cba\n",
        stderr="aside\n",
        wall_seconds=execution.wall_seconds,
    )
    assert 0 < execution.wall_seconds < LIMITS.wall_seconds


def test_large_input_and_output(sandbox: LocalSandbox) -> None:
    big = Limits(wall_seconds=20.0, output_bytes=11 * 10**6)
    content = os.urandom(10**6) * 10
    execution = run(sandbox, "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", content, big)
    assert (execution.end, execution.stdout == content) == (End.EXITED, True)


def test_packages_can_be_imported_and_ours_is_the_version(sandbox: LocalSandbox) -> None:
    said = answer(sandbox, "import sys, numpy\nprint(sys.version_info[:3], numpy.arange(4).sum(), sys.flags.isolated)")
    assert said == f"{sys.version_info[:3]} 6 1"


def test_no_pth_file_and_no_customization_is_run(sandbox: LocalSandbox) -> None:
    assert answer(sandbox, "import sys\nprint({'site', 'sitecustomize', 'zbgrpo'} & set(sys.modules))") == "set()"


def test_the_bootstrap_leaves_no_names(sandbox: LocalSandbox) -> None:
    said = answer(sandbox, "print(sorted(n for n in globals() if not n.startswith('__')), __name__)")
    assert said == "[] __main__"
    assert run(sandbox, "print(sys)").exit_status == 1


def test_environment_and_descriptors_are_fixed(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    source = """
import os, json
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print(json.dumps([sorted(os.environ), [fd for fd in range(200) if is_open(fd)], os.getcwd() == os.environ["HOME"]]))
"""
    try:
        names, descriptors, is_home = json.loads(answer(sandbox, source))
    finally:
        os.close(reader)
        os.close(writer)
    assert "SECRET_TOKEN" not in names
    assert set(names) - {"PWD", "LC_CTYPE", "LD_LIBRARY_PATH"} == {
        "PATH", "HOME", "TMPDIR", "LANG", "MALLOC_ARENA_MAX",
        "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    }  # fmt: skip
    assert (descriptors, is_home) == ([0, 1, 2], True)


@pytest.mark.parametrize("source", ["def (", "print(1)\0", "print('\ud800')", ""])
def test_whatever_the_source_is_it_is_run(sandbox: LocalSandbox, source: str) -> None:
    execution = run(sandbox, source)
    assert (execution.end, execution.exit_status) == (End.EXITED, 1 if source else 0)


def test_children_and_threads_work(sandbox: LocalSandbox) -> None:
    source = """
import subprocess, sys, threading
out = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True).stdout
threads = [threading.Thread(target=print, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(out)
"""
    assert sorted(answer(sandbox, source).split()) == ["0", "1", "2", "3", "4", "5", "5", "6", "7"]


def test_deep_recursion_works(sandbox: LocalSandbox) -> None:
    source = "import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))"
    assert answer(sandbox, source) == "20000"


# ------------------------------------------------------------------------------------------------------------- limits


STUBBORN = """
import os, signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
os.closerange(0, 200)
while True:
    try: pow(3, 10**7)
    except BaseException: pass
"""


@pytest.mark.parametrize("source", [STUBBORN, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"])
def test_time_ends_it(sandbox: LocalSandbox, source: str) -> None:
    execution = run(sandbox, source, limits=SHORT)
    assert (execution.end, execution.exit_status) == (End.TIME, None)
    assert execution.detail


def test_cpu_time_ends_it() -> None:
    """Its limit is the wall clock's, which comes first; so the program lowers it here."""
    source = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass"
    execution = run(LocalSandbox(), source)
    assert (execution.end, execution.exit_status, "CPU" in execution.detail) == (End.TIME, None, True)


@pytest.mark.parametrize(
    "source",
    [
        "x = 'x' * 10**11",
        "x = []\nwhile True: x.append(bytearray(10**6))",
        # each under the limit, together over it
        "import os, time\nfor n in range(6):\n if os.fork() == 0:\n  x = b'1' * (70 * 2**20)\n  time.sleep(1000)\n"
        "time.sleep(1000)",
    ],
)
def test_memory_ends_it(sandbox: LocalSandbox, source: str) -> None:
    execution = run(sandbox, source)
    assert (execution.end, execution.exit_status) == (End.MEMORY, None)


def test_memory_that_is_shared_counts_once(sandbox: LocalSandbox) -> None:
    source = "import os, time\nx = bytearray(b'1' * (100 * 2**20))\npids = []\nfor n in range(5):\n pid = os.fork()\n"
    source += " if pid == 0:\n  time.sleep(0.5)\n  os._exit(0)\n pids.append(pid)\nfor pid in pids: os.waitpid(pid, 0)"
    assert run(sandbox, source).end is End.EXITED


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_ends_it(sandbox: LocalSandbox, stream: str) -> None:
    execution = run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 50_000)")
    assert execution.end is End.OUTPUT
    assert len(execution.stdout) == (LIMITS.output_bytes if stream == "stdout" else 0)
    assert len(execution.stderr) <= 4096


def test_output_up_to_the_limit_is_complete(sandbox: LocalSandbox) -> None:
    source = f"import sys\nsys.stdout.write('x' * {LIMITS.output_bytes})"
    assert len(answer(sandbox, source)) == LIMITS.output_bytes
    assert run(sandbox, source + "\nsys.stdout.write('x')").end is End.OUTPUT


def test_standard_error_cannot_command_a_terminal(sandbox: LocalSandbox) -> None:
    execution = run(sandbox, "import sys\nsys.stderr.buffer.write(b'a\\x1b[2Jb\\xff\\nc')")
    assert execution.stderr == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}\nc"


FILES = {
    "one big": "f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)",
    "many": "n = 0\nwhile True:\n n += 1\n with open(f'f{n}', 'wb') as f: f.write(b'x' * 10**6)",
    "empty": "n = 0\nwhile True:\n n += 1\n open(f'f{n}', 'wb').close()",
    "nameless": "import os\nkept = []\nwhile True:\n kept.append(open('a', 'wb'))\n os.unlink('a')\n"
    " kept[-1].write(b'x' * 10**6)",
}


@pytest.mark.parametrize("source", FILES.values(), ids=FILES)
def test_files_are_refused_or_end_it(sandbox: LocalSandbox, source: str) -> None:
    execution = run(sandbox, source)
    assert execution.end is End.OUTPUT or (execution.end, execution.exit_status) == (End.EXITED, 1), execution


def test_files_are_watched_where_nothing_can_be_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the folder is one on the disk, for which only a look at it sets a limit."""

    def on_disk(source: bytes, stdin: bytes, owner: Optional[int], _: Optional[int]) -> PrivateFolder:
        return PrivateFolder(source, stdin, owner, None)

    sandbox = LocalSandbox()
    monkeypatch.setattr(supervisor, "PrivateFolder", on_disk)
    for name in ("many", "empty"):
        execution = run(sandbox, FILES[name])
        assert execution.end is End.OUTPUT, (name, execution)
    execution = run(sandbox, FILES["nameless"])  # on a busy machine the limit of open files may come first
    assert execution.end is End.OUTPUT or (execution.end, execution.exit_status) == (End.EXITED, 1), execution


@pytest.mark.parametrize("how", ["fork", "thread"])
def test_processes_and_threads_are_refused_or_end_it(sandbox: LocalSandbox, how: str) -> None:
    start = {
        "fork": "if os.fork() == 0: time.sleep(1000)",
        "thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    }[how]
    source = f"import os, threading, time\nn = 0\ntry:\n while True:\n  {start}\n  n += 1\n"
    source += "except (OSError, RuntimeError): print(n, flush=True)\nos._exit(0)"
    execution = run(sandbox, source)
    if execution.end is End.EXITED:
        assert int(execution.stdout) <= LIMITS.num_processes
    else:
        assert (execution.end, "processes" in execution.detail) == (End.MEMORY, True), execution


def test_descriptors_are_limited(sandbox: LocalSandbox) -> None:
    source = "import os\nn = 0\ntry:\n while True:\n  os.dup(0)\n  n += 1\nexcept OSError: print(n)"
    assert int(answer(sandbox, source)) < LIMITS.num_files


def test_a_crash_is_a_signal(sandbox: LocalSandbox) -> None:
    execution = run(sandbox, "import ctypes\nctypes.string_at(0)")
    assert (execution.end, execution.exit_status) == (End.SIGNALLED, -signal.SIGSEGV)
    assert run(sandbox, "import os\nos.abort()").exit_status == -signal.SIGABRT


# -------------------------------------------------------------------------------------------------- nothing is left


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(flush=True)
        time.sleep(1000)
    os._exit(0)
"""
BOMB = "import os\nwhile True:\n try:\n  os.fork()\n  os.setsid()\n except OSError: pass"
MUTUAL_KILLERS = """
import os, signal
if os.fork() == 0:
    os.setsid()
    while True:
        try: os.kill(-1, signal.SIGSTOP)
        except OSError: pass
while True: pass
"""


def test_a_daemon_ends_with_its_program(sandbox: LocalSandbox, private_base: str) -> None:
    assert run(sandbox, DAEMON + "\nelse: print('left')").end is End.EXITED
    assert processes_of(private_base) == []


def test_a_fork_bomb_ends_and_the_next_program_runs(sandbox: LocalSandbox, private_base: str) -> None:
    assert run(sandbox, BOMB, limits=SHORT).end in (End.TIME, End.MEMORY)
    assert processes_of(private_base) == []
    assert answer(sandbox, "print(1)") == "1"


def test_signals_to_everybody_hit_nobody_else(sandbox: LocalSandbox) -> None:
    if sandbox.isolation().level == 0 and os.geteuid() != 0:
        pytest.skip("at level 0 nothing but another user keeps a program from this")
    assert run(sandbox, MUTUAL_KILLERS, limits=SHORT).end is End.TIME
    source = "import os, signal\nfor target in (os.getppid(), -1):\n try: os.kill(target, signal.SIGKILL)\n"
    source += " except OSError: pass\nprint('done')"
    assert answer(sandbox, source) == "done"


def test_odd_files_are_removed(sandbox: LocalSandbox, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    source = f"""
import os
os.symlink({str(tmp_path)!r}, "link")
os.mkfifo("pipe")
os.makedirs("a/b")
open("a/b/file\\n\\udcff", "w").close()
for path in ("a/b/file\\n\\udcff", "a/b", "a"):
    try: os.chmod(path, 0)
    except PermissionError: pass
for n in range(300):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
print("made")
"""
    assert answer(sandbox, source) == "made"
    assert kept.read_text() == "x"


@pytest.mark.parametrize("source", ["import time\nprint(flush=True)\ntime.sleep(1000)", DAEMON + "time.sleep(1000)"])
def test_nothing_outlives_a_worker_that_is_killed(sandbox: LocalSandbox, private_base: str, source: str) -> None:
    level = sandbox.isolation().level
    worker = os.fork()
    if worker == 0:
        try:
            LocalSandbox(level).run(source, b"", Limits(wall_seconds=600.0))
        finally:
            os._exit(0)
    try:
        assert until(lambda: len(processes_of(private_base)) > 0)
        assert glob.glob(os.path.join(private_base, PREFIX + "*")) != []
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert until(lambda: processes_of(private_base) == [] and glob.glob(os.path.join(private_base, PREFIX + "*")) == [])


def test_an_interrupted_run_leaves_nothing(sandbox: LocalSandbox, private_base: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            sandbox.run("while True: pass", b"", Limits(wall_seconds=600.0))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert processes_of(private_base) == []


def test_children_of_the_caller_are_left_alone(sandbox: LocalSandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as mine:
        assert answer(sandbox, "print(1)") == "1"
        assert mine.poll() is None
        mine.communicate(b"\n", timeout=GENEROUS_SECONDS)
        assert mine.returncode == 0


def test_sandboxes_run_side_by_side(private_base: str) -> None:
    """A kill of everything that belongs to one must not reach another's program."""
    sandbox = LocalSandbox()
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        status = 1
        try:
            os.write(writer, b"x")
            status = int(sandbox.run("import time\ntime.sleep(1)\nprint(7)", b"", LIMITS).stdout != b"7\n")
        finally:
            os._exit(status)
    assert os.read(reader, 1) == b"x"
    while os.waitid(os.P_PID, other, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert run(sandbox, DAEMON + "\nelse: print('left')").end is End.EXITED
    assert os.waitpid(other, 0)[1] == 0
    os.close(reader)
    os.close(writer)


# ------------------------------------------------------------------------------------------------- infrastructure


def test_what_is_no_fault_of_the_program_is_infrastructure(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = sandbox._confinement
    broken = here._replace(interpreter=here.interpreter._replace(executable="/nowhere/python"))
    execution = runner.run_confined(broken, "print(1)", b"", LIMITS)
    assert (execution.end, "/nowhere/python" in execution.detail) == (End.INFRASTRUCTURE, True), execution

    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    execution = sandbox.run("print(1)", b"", LIMITS)
    assert (execution.end, "/nowhere" in execution.detail) == (End.INFRASTRUCTURE, True), execution


def test_an_interpreter_that_has_no_time_to_start_is_infrastructure(sandbox: LocalSandbox) -> None:
    execution = run(sandbox, "print(1)", limits=Limits(wall_seconds=0.0))
    assert (execution.end, "more than 0 seconds" in execution.detail) == (End.INFRASTRUCTURE, True), execution


def test_a_memory_limit_that_nothing_fits_into_is_infrastructure() -> None:
    tiny = Limits(memory_bytes=1)
    execution = LocalSandbox(0).run("print(1)", b"", tiny)
    assert execution.end in (End.INFRASTRUCTURE, End.MEMORY, End.EXITED), "whatever it is, it does not raise"


def test_a_lost_supervisor_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    sandbox = LocalSandbox(1)
    monkeypatch.setattr(runner, "supervise", die)
    execution = sandbox.run("print(1)", b"", LIMITS)
    assert (execution.end, execution.exit_status) == (End.INFRASTRUCTURE, None)


def test_a_supervisor_that_hangs_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = LocalSandbox(1)
    monkeypatch.setattr(runner, "supervise", lambda *_: signal.pause())
    monkeypatch.setattr(runner, "_SUPERVISOR_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(runner, "_SUPERVISOR_CLEANUP_SECONDS", 0.0)
    execution = sandbox.run("print(1)", b"", Limits(wall_seconds=0.1))
    assert (execution.end, "in time" in execution.detail) == (End.INFRASTRUCTURE, True)


def test_an_error_in_the_supervisor_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more")

    sandbox = LocalSandbox(1)
    monkeypatch.setattr(supervisor.Watch, "until_end", fail)
    execution = sandbox.run("while True: pass", b"", LIMITS)
    assert (execution.end, "no more" in execution.detail) == (End.INFRASTRUCTURE, True)


# --------------------------------------------------------------------------------------------------- levels, the probe


def test_levels_0_and_1_are_offered_here() -> None:
    assert {0, 1} <= set(probe.examine().levels), probe.examine().shortfalls


def test_the_highest_level_is_the_default_and_all_is_named() -> None:
    found = LocalSandbox().isolation()
    assert found == probe.probe()
    assert found.level == max(probe.examine().levels)
    named = " ".join(found.mechanisms)
    for name in ("limits", "user", "filter", "landlock", "network namespace", "bubblewrap"):
        assert name in named
    assert all(found.mechanisms.values())


def test_what_a_level_does_not_use_is_not_called_active() -> None:
    states = LocalSandbox(0).isolation().mechanisms
    assert states["limits"] == probe.ACTIVE
    assert probe.ACTIVE not in {states["system call filter"], states["network namespace"]}
    assert LocalSandbox(1).isolation().mechanisms["system call filter"] == probe.ACTIVE


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    probe.examine.cache_clear()
    yield
    probe.examine.cache_clear()


def test_without_bubblewrap_level_1_is_the_highest(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> None:
    monkeypatch.setattr(bubblewrap, "find", lambda: None)
    sandbox = LocalSandbox()
    assert sandbox.isolation().level == 1
    assert sandbox.isolation().mechanisms["bubblewrap"] == "not installed"
    assert answer(sandbox, "print(1)") == "1"
    with pytest.raises(ConfigError, match="bubblewrap is not installed"):
        LocalSandbox(2)


def test_a_mechanism_that_does_not_hold_is_found_out(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> None:
    """The probe believes what a program could do, not what was set up."""
    monkeypatch.setattr(confinement.Confinement, "is_filtered", False)
    machine = probe.examine()
    assert 1 not in machine.levels
    assert "make a socket" in machine.shortfalls[1]


def test_a_level_that_is_not_offered_is_an_error() -> None:
    with pytest.raises(ConfigError, match="level 3"):
        LocalSandbox(3)


def test_more_can_be_made_readable(sandbox: LocalSandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").write_text("something")
    (tmp_path / "data").chmod(0o644)
    source = f"print(open({str(tmp_path / 'data')!r}).read())"
    level = sandbox.isolation().level
    assert answer(LocalSandbox(level, read_only=[str(tmp_path)]), source) == "something"
    if level >= 1:
        assert run(sandbox, source).exit_status == 1


def test_programs_have_a_user_of_their_own(sandbox: LocalSandbox) -> None:
    if program_user(os.getpid()) is None:
        pytest.skip("only root can be somebody else")
    source = "import os\nprint(os.getresuid(), os.getgroups())\n"
    source += (
        "for line in open('/proc/self/status'):\n if line.startswith(('CapEff', 'CapPrm')): print(int(line[7:], 16))"
    )
    if sandbox.isolation().level == 1:  # /proc is closed there
        source = source.partition("\n")[0] + "\nprint(os.getresuid(), os.getgroups())"
    said = answer(sandbox, source).splitlines()
    real, effective, saved = json.loads(said[0].partition(")")[0].replace("(", "[") + "]")
    assert real == effective == saved > 60_000
    assert said[0].endswith("[]") or sandbox.isolation().level == 2
    assert set(said[1:]) <= {"0", said[0]}


def test_an_ordinary_user_can_run_programs(private_base: str) -> None:
    """As on a cluster: nobody to become, the same promises."""
    if os.geteuid() != 0:
        pytest.skip("these tests run as an ordinary user anyhow")
    os.chmod(private_base, 0o777)
    script = f"""
import sys, tempfile
sys.path[:0] = {[str(ROOT), *sys.path]!r}
tempfile.tempdir = {private_base!r}
from zbgrpo.rewards.sandbox import probe
from zbgrpo.rewards.sandbox.base import Limits
from zbgrpo.rewards.sandbox.local import LocalSandbox
for level in probe.examine().levels:
    for source in ({BOMB!r}, {DAEMON!r} + "\\nelse: print('left')", "print(input())"):
        execution = LocalSandbox(level).run(source, b"hello", Limits(wall_seconds=1.0))
        print(level, execution.end.value, execution.stdout.split())
"""
    uid = 1_500_000_123
    interpreter = this_interpreter()
    needed = outermost([*interpreter.paths, str(ROOT), *filter(os.path.isdir, sys.path), sys.prefix])
    closed = mounts.obstacles(needed, uid)

    def become_ordinary() -> None:
        mounts.enter_namespace(with_user=False)
        mounts.open_way(closed)
        become_user(uid)

    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=become_ordinary, capture_output=True, text=True, timeout=120, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 6, done.stdout
    for bomb, daemon, honest in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert bomb.split()[1] in ("time", "memory")
        assert "exited" in daemon
        assert honest.endswith("exited [b'hello']")


# ---------------------------------------------------------------------------------------------------------- its parts


def test_folders_of_any_shape_are_removed(private_base: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    folder = PrivateFolder(b"", b"", None, None)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder.home)
        os.symlink(tmp_path, "link")
        Path("file").write_text("x")
        for n in range(1200):
            os.mkdir("d")
            os.symlink("/", f"l{n % 2}")
            os.chdir("d")
            if n % 100 == 99:
                os.chmod(".", 0o300)
    finally:
        os.fchdir(here)
        os.close(here)
    folder.remove()
    assert (tmp_path / "kept").exists()
    assert not os.path.exists(folder.path)


def test_a_folder_whose_names_clash_with_those_used_for_removal(tmp_path: Path) -> None:
    for name in ("a/x/y", "b/x/y", "x/x/y"):
        (tmp_path / "top" / name).mkdir(parents=True)
    remove_tree(str(tmp_path / "top"))
    assert os.listdir(tmp_path) == []


def test_the_size_of_a_folder_counts_every_entry(private_base: str) -> None:
    folder = PrivateFolder(b"", b"", None, None)
    try:
        assert not folder.holds_more_than(100_000)
        for n in range(30):
            Path(folder.home, str(n)).touch()
        assert folder.holds_more_than(100_000)
    finally:
        folder.remove()


@pytest.mark.parametrize("by_kernel", [True, False])
def test_descendants_are_found(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_kernel and not processes._kernel_lists_children():
        pytest.skip("this kernel keeps no lists of children (CONFIG_PROC_CHILDREN)")
    monkeypatch.setattr(processes, "_kernel_lists_children", lambda: by_kernel)
    command = "import os; os.fork(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == child.stdout.readline() == b"\n"
        found = processes.descendants()
        assert child.pid in found
        assert len(found) >= 2
        usage = processes.measure(found)
        assert usage.num_tasks >= 2
        assert 0 < processes.memory_shared_fairly(found) <= usage.memory_bytes * 1.5
        child.communicate(b"\n\n", timeout=GENEROUS_SECONDS)


def test_outermost_paths(tmp_path: Path) -> None:
    for name in ("a/b", "ab"):
        (tmp_path / name).mkdir(parents=True)
    paths = [str(tmp_path / name) for name in ("a/b", "ab", "a", "missing", "a")]
    assert outermost(paths) == (str(tmp_path / "ab"), str(tmp_path / "a"))
