"""The one place that reads and writes environment variables.

Everything that a launcher says about a process comes in here and goes on as a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zbgrpo.errors import ConfigError


@dataclass(frozen=True)
class TorchrunEnv:
    """What the launcher tells one process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str
    """The same for all processes of one launch."""
    restart_count: int
    """How often the launcher has started this group of processes again."""


def read_torchrun_env() -> TorchrunEnv | None:
    """The launcher's variables; None for a process that no launcher started.

    torchrun's are taken if RANK is set, else Slurm's (srun) if MASTER_ADDR and MASTER_PORT are set beside them. Raises
    ConfigError, naming the variable, when one is missing or not a number, and when the numbers contradict each other.
    """
    if "RANK" in os.environ:
        env = _from_torchrun()
    elif "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        env = _from_slurm()
    else:
        return None
    if not 0 <= env.rank < env.world_size:
        raise ConfigError(f"RANK: rank {env.rank} is outside a world of {env.world_size}")
    if not 0 <= env.local_rank < env.local_world_size <= env.world_size:
        raise ConfigError(
            f"LOCAL_RANK: rank {env.local_rank} of {env.local_world_size} is outside a world of {env.world_size}"
        )
    return env


def _from_torchrun() -> TorchrunEnv:
    return TorchrunEnv(
        rank=_integer("RANK"),
        world_size=_integer("WORLD_SIZE"),
        local_rank=_integer("LOCAL_RANK"),
        local_world_size=_integer("LOCAL_WORLD_SIZE"),
        node_rank=_integer("GROUP_RANK", default=0),
        master_addr=_text("MASTER_ADDR"),
        master_port=_integer("MASTER_PORT"),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        restart_count=_integer("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _from_slurm() -> TorchrunEnv:
    node_rank = _integer("SLURM_NODEID", default=0)
    return TorchrunEnv(
        rank=_integer("SLURM_PROCID"),
        world_size=_integer("SLURM_NTASKS"),
        local_rank=_integer("SLURM_LOCALID"),
        local_world_size=_tasks_of_node(_text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), node_rank),
        node_rank=node_rank,
        master_addr=_text("MASTER_ADDR"),
        master_port=_integer("MASTER_PORT"),
        run_id=os.environ.get("SLURM_JOB_ID", "none"),
        restart_count=_integer("SLURM_RESTART_COUNT", default=0),
    )


def _tasks_of_node(counts: str, node_rank: int) -> int:
    """Slurm writes the tasks of each node as `4(x2),3`: four on each of the first two nodes, three on the third."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE: expected the form 4(x2),3, got {counts!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(tasks):
        raise ConfigError(f"SLURM_TASKS_PER_NODE: {counts!r} has no node {node_rank} (SLURM_NODEID)")
    return tasks[node_rank]


def _text(*names: str) -> str:
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    raise ConfigError(f"{names[-1]}: not set, though the process was started by a launcher; start it with torchrun")


def _integer(name: str, default: int | None = None) -> int:
    if default is not None and not os.environ.get(name):
        return default
    text = _text(name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: expected an integer in the environment, got {text!r}") from None


def set_thread_env(num_threads: int) -> None:
    """Limits this process and its children to `num_threads` CPU threads each. Has an effect only before torch is
    imported. Tokenizers' own threads are switched off: they do not survive a fork."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ["MKL_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler says on the terminal when it starts and stops


def prefer_interface(name: str) -> None:
    """Process groups that are made from now on connect over this network interface, unless the user has said which one
    gloo or NCCL is to take."""
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    if not os.environ.get("NCCL_SOCKET_IFNAME"):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # this very name: NCCL takes others that begin with it else


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables inside. Afterwards the environment is what it was before, whatever ran inside has set."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


ENGINE_OWNER = "ZBGRPO_ENGINE_OWNER"
"""Set for the processes of a generation engine, to `EngineOwner.text`."""


@dataclass(frozen=True)
class EngineOwner:
    """Whom the processes of a generation engine work for."""

    process: int
    """Process id of the rank."""
    folder: str
    """Where the processes have their sockets; to be removed with them."""

    @property
    def text(self) -> str:
        return f"{self.process} {self.folder}"


def engine_owner() -> EngineOwner | None:
    """The owner of this process; None for a process that belongs to no engine."""
    process, _, folder = os.environ.get(ENGINE_OWNER, "").partition(" ")
    return EngineOwner(int(process), folder) if process else None


def failpoints_text() -> str:
    """What is to fail in this process (ZBGRPO_FAILPOINTS, see `zbgrpo.failpoints`); empty outside of tests."""
    return os.environ.get("ZBGRPO_FAILPOINTS", "")


def usable_cores() -> list[int]:
    """Numbers of the CPU cores that this process may run on; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_to_cores(cores: Iterable[int]) -> None:
    """The calling thread, and the threads and processes that it starts from now on, run on these cores only; nothing
    where the system cannot do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def available_cores() -> int:
    """CPU cores that this process may run on (its affinity, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def test_data_dir() -> Path | None:
    """Folder of the larger real data that some tests use (ZBGRPO_TEST_DATA); None when unset."""
    folder = os.environ.get("ZBGRPO_TEST_DATA")
    return Path(folder) if folder else None
