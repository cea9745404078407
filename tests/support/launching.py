"""Real runs: torchrun, real processes, a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.support.models import tiny_model, tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}= {% endif %}"
)

REWARDS = '''
"""Rewards of the tests: they vary between the responses of a group."""


def distinct(response, **_):
    """Share of distinct characters."""
    return len(set(response)) / max(1, len(response))


def picky(response, row, **_):
    """Raises for some rows and gives groups without variance for others."""
    if row.get("bad"):
        raise RuntimeError("this row is bad on purpose")
    return 1.0 if row.get("easy") else distinct(response)


def never(response, **_):
    """No response is ever right."""
    return 0.0
'''

FLAGS: list[str] = (  # noqa: SIM905
    "-m model -d train.jsonl -rt reward.py:distinct -g 4 -ibs 4 -imbs 4 -tbs 4 -tMbs 4 -tmbs 4 -mnt 12 -mpt 64 "
    "--precision fp32 -lr 1e-3 -sd model_out transport.heartbeat_seconds=0.5 transport.peer_timeout_seconds=30 "
    "cluster.timeout_seconds=60"
).split()


def make_workplace(folder: Path, num_rows: int = 200) -> Path:
    """A folder with a tiny model, data and reward functions in it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, count in (("train.jsonl", num_rows), ("heldout.jsonl", 10)):
        write_rows(folder / name, [{"content": f"{n}+{n % 7}", "extra": {}} for n in range(count)])
    (folder / "reward.py").write_text(REWARDS)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON Lines; `extra` holds further fields of a row."""
    lines = [
        json.dumps({"messages": {"role": "user", "content": row["content"]}, "gt_answer": "1", **row.get("extra", {})})
        for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")


@dataclass
class Finished:
    """What a run printed and how it ended."""

    status: int
    output: str

    @property
    def first_line(self) -> str:
        """The first line of ours, without what was said before the run started."""
        lines = [line for line in self.output.splitlines() if line.startswith("zbgrpo: ")]
        own = [line for line in lines if "CPU thread" not in line and "--max-staleness: with" not in line]
        return own[0] if own else ""


class Run:
    """One launch. `flags` come after the common ones, so they win."""

    def __init__(
        self,
        workplace: Path,
        num_ranks: int,
        flags: str | list[str],
        common: list[str] | None = None,
        rendezvous: list[str] | None = None,
        python: str = sys.executable,
        failpoints: str = "",
        first_on_path: Path | None = None,
    ) -> None:
        """`first_on_path`: a folder with modules that come before all others."""
        self.workplace = workplace
        extra = flags.split() if isinstance(flags, str) else flags
        command = [
            python, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
            *(rendezvous or own_rendezvous()), "-m", "zbgrpo.launch", *(FLAGS if common is None else common), *extra,
        ]  # fmt: skip
        self.process = start(
            command, workplace, failpoints, [REPOSITORY] if first_on_path is None else [first_on_path, REPOSITORY]
        )

    def wait(self, timeout_seconds: float = 150.0) -> Finished:
        """Wait for its end; a run that does not end is killed and fails the test."""
        try:
            output, _ = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            output, _ = self.process.communicate()
            raise AssertionError(f"the run did not end within {timeout_seconds} s:\n{output[-4000:]}") from None
        return Finished(self.process.returncode, output)

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that live now, by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if os.getpgid(int(entry.name)) != self.process.pid and not _descends(int(entry.name), self.process.pid):
                    continue
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes()
            except (OSError, ProcessLookupError):
                continue
            rank = re.search(rb"(?:^|\0)RANK=(\d+)", environment)
            if rank and b"zbgrpo.launch" in command and b"torch.distributed.run" not in command:
                found[int(rank[1])] = int(entry.name)
        return found

    def kill_all(self) -> None:
        """SIGKILL for the launcher and every rank at once, as when a machine is lost."""
        for pid in self.ranks().values():
            os.kill(pid, signal.SIGKILL)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def wait_for_step(self, project: str, step: int, timeout_seconds: float = 120.0) -> None:
        """Until the metrics have a line for this step."""
        self.wait_until(lambda: any(m["step"] >= step for m in metrics(self.workplace, project)), timeout_seconds)

    def wait_until(self, condition: Any, timeout_seconds: float = 120.0) -> None:
        """Until the condition holds; the run must not end before."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended early:\n{self.process.communicate()[0][-4000:]}"
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.02)


def start(
    command: list[str], folder: Path, failpoints: str = "", path: Sequence[Path] = (REPOSITORY,)
) -> subprocess.Popen[str]:
    """A process in a session of its own, with the project importable; `failpoints`: see `zbgrpo.failpoints`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "ZBGRPO"))}
    environment |= {"PYTHONPATH": ":".join(map(str, path)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["ZBGRPO_FAILPOINTS"] = failpoints
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip


def run(workplace: Path, num_ranks: int, flags: str | list[str], timeout_seconds: float = 150.0) -> Finished:
    """Launch and wait."""
    return Run(workplace, num_ranks, flags).wait(timeout_seconds)


def metrics(workplace: Path, project: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; none while there is no file."""
    path = workplace / "logs" / project / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(workplace: Path, project: str) -> dict[str, Any]:
    """summary.json."""
    result: dict[str, Any] = json.loads((workplace / "logs" / project / "summary.json").read_text())
    return result


def events(workplace: Path, project: str, name: str) -> list[dict[str, Any]]:
    """Lines of an event log (`hub`, `rank-0`, ...)."""
    path = workplace / "logs" / project / "events" / f"{name}.jsonl"
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def own_rendezvous() -> list[str]:
    """Launcher flags of a run on this machine alone."""
    # A free port chosen by the agent itself, so that runs on one machine never collide.
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def two_nodes() -> list[list[str]]:
    """Launcher flags of two nodes that meet on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    return [[*common, "--node-rank", str(node)] for node in range(2)]


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False
