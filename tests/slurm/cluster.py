"""A Slurm cluster of two nodes that are both this machine, with everything of its own: folder, key, sockets, ports.

Nothing of the system's own Slurm or MUNGE is read or changed. It needs root, because slurmd starts jobs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.launching import REPOSITORY

NODES = ("node1", "node2")
CPUS_PER_NODE = 4
PATIENCE_SECONDS = 60.0
GRACE_SECONDS = 60
"""What a job of the partition `main` has to stop when one of the partition `urgent` wants its nodes. One of
the partition `sudden` has nothing."""

CONFIGURATION = """\
ClusterName=zbgrpo-tests
SlurmctldHost={hostname}({address})
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# How long a job waits that was put back into the queue; 120 seconds is usual.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
{nodes}
PartitionName=main Nodes={names} Default=YES PriorityTier=1 GraceTime={grace} MaxTime=10
PartitionName=sudden Nodes={names} PriorityTier=1 MaxTime=10
PartitionName=urgent Nodes={names} PriorityTier=2 PreemptMode=OFF MaxTime=10
"""


class CommandError(Exception):
    """A command of Slurm's has failed; the message has what it said, and the daemons' logs."""


class Cluster:
    """Daemons that run until `stop`. `folder` has their logs."""

    def __init__(self) -> None:
        # Not below pytest's folder, which only its owner may enter: munged refuses a socket there. The path is short
        # because the name of a socket may not be longer than about 100 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="zbgrpo-slurm-"))
        self.folder.chmod(0o711)
        self.address = _own_address()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_VARIABLES)} | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        """Start the daemons and wait until both nodes take jobs."""
        self._write_configuration()
        munge = self.folder / "munge.socket"
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        own = {name: self.folder / f"munge.{name}" for name in ("log", "pid", "seed")}
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=2", f"--socket={munge}", f"--key-file={key}",
            f"--log-file={own['log']}", f"--pid-file={own['pid']}", f"--seed-file={own['seed']}",
        )  # fmt: skip
        self.until(munge.exists)
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self.command("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle") >= 2)

    def cancel_all(self) -> None:
        """End every job, at once."""
        for job in self.command("squeue", "--noheader", "--format=%A").split():
            with contextlib.suppress(CommandError):  # it may have ended just now
                self.command("scancel", job)
                self.command("scancel", "--signal=KILL", "--full", job)
        self.until(lambda: not self.command("squeue", "--noheader").strip())

    def stop(self) -> list[int]:
        """End every job and every daemon, once. Returns the processes that they left behind, which are killed."""
        if not self._daemons:
            return []
        with contextlib.suppress(AssertionError, CommandError, subprocess.TimeoutExpired):
            self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        left = self._processes()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def _processes(self) -> list[int]:
        """Process ids of everything that has been started with this cluster's configuration and lives."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def command(self, *words: str, folder: Path | None = None, variables: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands; what it prints. Raises `CommandError`."""
        ended = subprocess.run(
            words, cwd=folder, env=self.environment | (variables or {}), capture_output=True, text=True, timeout=30.0,
            check=False,
        )  # fmt: skip
        if ended.returncode != 0:
            raise CommandError(f"{words}: {ended.stderr}{self.logs()}")
        return ended.stdout

    def until(self, condition: Callable[[], bool], timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for it; a daemon that ends, or the end of the time, fails the test with the logs."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with contextlib.suppress(CommandError):  # slurmctld may not answer yet
                if condition():
                    return
            for daemon in self._daemons:
                assert daemon.poll() is None, f"{daemon.args!r} has ended with {daemon.returncode}{self.logs()}"
            assert time.monotonic() < deadline, f"it never happened{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(
            f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def _write_configuration(self) -> None:
        (self.folder / "state").mkdir()
        hostname = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={hostname} NodeAddr={self.address} Port={port} CPUs={CPUS_PER_NODE} "
            "RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        text = CONFIGURATION.format(
            hostname=hostname, address=self.address, ports=ports, folder=self.folder, nodes=nodes,
            names=",".join(NODES), grace=GRACE_SECONDS,
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)

    def _daemon(self, program: str, *arguments: str) -> None:
        # Its messages are in its own log as well; this file has what it says before it has one.
        with (self.folder / f"{program}-{len(self._daemons)}.screen.log").open("wb") as screen:
            self._daemons.append(
                subprocess.Popen([program, *arguments], env=self.environment, stdout=screen, stderr=screen)
            )


_FOREIGN_VARIABLES = ("SLURM", "SBATCH", "SRUN", "TORCHELASTIC", "ZBGRPO", "PET_", "RDZV_", "GLOO_", "NCCL_")


def _own_address() -> str:
    """The address of this machine's way out; loopback for a machine without one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
