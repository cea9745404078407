"""Every single fault: each process of a run is killed, and stopped, in each phase of the run.

    python -m tests.support.faults [--folder FOLDER] [--only TEXT ...] [--again | --failed]

A cell is a role, a phase and a signal. The run (2 consumers, 2 producers, a tiny model) is held at a failpoint of the
phase, the victim gets the signal, the hold is lifted. What must hold then:

    a reward worker     is replaced, and the run finishes
    anything else       ends the whole run within the peer timeout, by name; nothing of it is left, in no process, in
                        /dev/shm or in the folder for temporary files
    afterwards          the same command goes on from the newest complete state, or starts anew, and finishes; over the
                        joined logs no group is lost and none is consumed twice

Outcomes are appended to `results.jsonl` in the folder, and cells that are in it are not run again; the table is written
to `table.md` beside it. The exit status is 1 if a cell that was asked for has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.launching import REPOSITORY, make_workplace
from zbgrpo.engine.check_ledger import check_logs

PEER_SECONDS = 6.0
LIMIT_SECONDS = 2 * PEER_SECONDS + 10.0
"""Within which everything but the victim has to be gone."""
VICTIM_LIMIT_SECONDS = 60.0
FINISH_SECONDS = 180.0
STATE_SECONDS = 15.0
STEPS, GROUPS_PER_STEP = 8, 8
MANY_STEPS = 200
"""For a run that nothing hinders: it must not have finished before it notices that its launcher is stopped."""

FLAGS = (
    "-m model -d train.jsonl -rt reward.py:distinct -t 2 -i 2 -g 4 -ibs 4 -imbs 4 -tbs 4 -tMbs 4 -tmbs 4 -mnt 12 "
    f"-mpt 64 --precision fp32 -lr 1e-3 -sd model_out -e 10 -si 2 transport.heartbeat_seconds=0.5 "
    f"transport.peer_timeout_seconds={PEER_SECONDS} cluster.exit_timeout_seconds=3 cluster.timeout_seconds=120 "
    "weights.timeout_seconds=120 reward.time_limit_seconds=3 observe.tensorboard=false"
)
"""Collectives wait for two minutes, so that it is never their timeout that ends a run."""
EVALUATION = ["-ed", '{"heldout": "heldout.jsonl"}', "-ei", "2"]

ROLES = ("producer", "consumer 0", "consumer 1", "hub", "reward worker", "agent")
SIGNALS = ("SIGKILL", "SIGSTOP")
PLACES: dict[str, dict[str, str]] = {
    "init": {
        "consumer 0": "init.model@consumer:0",
        "consumer 1": "init.model@consumer:1",
        "producer": "init.model@producer:0",
        "": "init.ready@producer:0",
    },
    "generate": {"": "generate.step#30@producer:0"},
    "send": {"": "send.groups#5@producer:0"},
    "ring": {"consumer 1": "ring.read#4@consumer:1", "": "ring.read#4@consumer:0"},
    "step": {"consumer 1": "step.commit#4@consumer:1", "": "step.commit#4@consumer:0"},
    "broadcast": {"producer": "weights.receive#3@producer:0", "": "weights.broadcast#3@consumer:0"},
    "checkpoint": {"consumer 1": "checkpoint.state#2@consumer:1", "": "checkpoint.state#2@consumer:0"},
    "evaluation": {"": "evaluation.row#25@producer:0"},
    "shutdown": {
        "consumer 0": "shutdown.consumer@consumer:0",
        "consumer 1": "shutdown.consumer@consumer:1",
        "hub": "shutdown.hub@hub",
        "agent": "shutdown.consumer@consumer:0",
        "": "shutdown.producer@producer:0",
    },
}
"""Where a run is held, by phase and victim ("": every other one): in the victim, if it comes to such a place."""

_EARLY = ("generate", "send")
"""Phases that may come before there is a state to go on from."""
RANKS = {"consumer 0": 0, "consumer 1": 1, "producer": 2}
TITLES = {"consumer 0": "rank 0 (consumer 0)", "consumer 1": "rank 1 (consumer 1)", "producer": "rank 2 (producer 0)"}


@dataclass(frozen=True)
class Cell:
    """One fault."""

    role: str
    phase: str
    signal: str

    @property
    def name(self) -> str:
        return f"{self.role}-{self.phase}-{self.signal}".replace(" ", "-")

    @property
    def place(self) -> str:
        places = PLACES[self.phase]
        return places.get(self.role, places[""])

    @property
    def may_finish(self) -> bool:
        """A run that is ending needs its launcher no more."""
        return self.role == "agent" and self.phase == "shutdown"


CELLS = [Cell(role, phase, name) for name in SIGNALS for role in ROLES for phase in PLACES]


@dataclass
class Outcome:
    """What came of it; the cell holds if there are no problems."""

    cell: str
    problems: list[str] = field(default_factory=list)
    others_gone_seconds: float | None = None
    """From the signal until nothing of the run was left but the victim."""
    all_gone_seconds: float | None = None
    status: int | None = None
    said: str = ""
    """The line on the screen that names what was lost."""
    went_on_from: str = ""
    """The state that the second run started from; empty if there was none."""

    def expect(self, holds: bool, problem: str) -> bool:
        if not holds:
            self.problems.append(problem)
        return holds


class Launch:
    """A run whose processes can be told from all others by their folder for temporary files."""

    def __init__(
        self,
        workplace: Path,
        project: str,
        num_steps: int,
        flags: Sequence[str],
        failpoints: str = "",
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher`: further flags of torchrun."""
        self.workplace = workplace
        self.temporary = Path(tempfile.mkdtemp(prefix="zf-"))  # short: sockets are in it
        self._marker = f"TMPDIR={self.temporary}".encode()
        self._screen = self.temporary / "screen.txt"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "ZBGRPO", "TMPDIR"))}
        environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"TMPDIR": str(self.temporary), "ZBGRPO_FAILPOINTS": failpoints}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", *launcher, "-m", "zbgrpo.launch", *FLAGS.split(), "-p", project,
            "--max-steps", str(num_steps), *flags,
        ]  # fmt: skip
        with self._screen.open("wb") as screen:
            self.agent = subprocess.Popen(
                command, cwd=workplace, env=environment, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True
            )

    def screen(self) -> str:
        return self._screen.read_text(errors="replace")

    def processes(self) -> dict[int, list[bytes]]:
        """Ids and command lines of all processes of this launch that have not ended."""
        self.agent.poll()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._marker in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
        return found

    def victims(self, role: str) -> list[int]:
        """Process ids of a role; of reward workers, those of the first producer."""
        if role == "agent":
            return [self.agent.pid]
        processes = self.processes()
        ranks = {_rank(pid): pid for pid, command in processes.items() if _runs(command, b"zbgrpo.launch", not_by=True)}
        if role in RANKS:
            return [ranks[RANKS[role]]] if RANKS[role] in ranks else []
        module, rank = (b"zbgrpo.engine.hub", 0) if role == "hub" else (b"zbgrpo.rewards.worker", 2)
        return sorted(p for p, command in processes.items() if _runs(command, module) and _parent(p) == ranks.get(rank))

    def end(self) -> None:
        """Kill what is left, and remove the folder."""
        for pid in self.processes():
            _kill(pid, signal.SIGKILL)
        self.agent.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def run_cell(cell: Cell, workplace: Path) -> Outcome:
    """Run a cell, in a workplace of `launching.make_workplace` that may be shared by cells."""
    outcome, project = Outcome(cell.name), f"{cell.name}-{secrets.token_hex(2)}"
    flags = EVALUATION if cell.phase == "evaluation" else []
    shared_memory = set(os.listdir("/dev/shm"))
    held, latest = workplace / f"held-{project}", workplace / "model_out" / project / "latest"
    goes_on = cell.role == "agent" and cell.signal == "SIGSTOP" and not cell.may_finish
    num_steps = MANY_STEPS if goes_on else STEPS
    launch = Launch(workplace, project, num_steps, flags, f"{cell.place}=hold:{held}")
    try:
        _fault(cell, launch, held, latest, outcome)
        screen = launch.screen()
        _check_leftovers(launch, workplace, project, shared_memory, outcome)
    finally:
        launch.end()
    if outcome.problems:
        (workplace / f"{project}.first.txt").write_text(screen)
    outcome.went_on_from = latest.read_text().strip() if latest.exists() else ""
    if goes_on:
        num_steps = int(outcome.went_on_from.partition("-")[2] or 0) + 2
    if cell.role != "reward worker":
        _go_on(workplace, project, num_steps, flags, shared_memory, outcome)
    _check_books(workplace, project, num_steps, outcome)
    if not outcome.problems:
        shutil.rmtree(workplace / "model_out" / project, ignore_errors=True)
    return outcome


def _fault(cell: Cell, launch: Launch, held: Path, latest: Path, outcome: Outcome) -> None:
    """From the start of a run to its end."""
    reached = _until(lambda: held.exists() or launch.agent.poll() is not None, FINISH_SECONDS)
    if cell.phase in _EARLY:
        _until(latest.exists, STATE_SECONDS)  # the others go on while a producer is held
    victims = launch.victims(cell.role) if held.exists() else []
    if not outcome.expect(bool(reached and victims), f"the run never came to {cell.place} with a {cell.role}"):
        return
    known = set(victims)
    _kill(victims[0], signal.Signals[cell.signal])
    begun = time.monotonic()
    held.with_name(held.name + ".go").touch()
    if cell.role == "reward worker":
        _finishes(cell, launch, known, outcome)
        return
    victim = victims[0] if cell.signal == "SIGSTOP" else -1
    gone = _until(lambda: not launch.processes().keys() - {victim}, VICTIM_LIMIT_SECONDS)
    outcome.others_gone_seconds = round(time.monotonic() - begun, 1)
    left = [_describe(command) for pid, command in launch.processes().items() if pid != victim]
    outcome.expect(gone, f"still there after {VICTIM_LIMIT_SECONDS:.0f} s: {left}")
    late = f"gone only after {outcome.others_gone_seconds} s, the limit is {LIMIT_SECONDS:.0f} s"
    outcome.expect(outcome.others_gone_seconds <= LIMIT_SECONDS, late)
    if cell.role == "agent" and cell.signal == "SIGSTOP":
        _kill(victim, signal.SIGCONT)
    gone = _until(lambda: not launch.processes() and launch.agent.poll() is not None, VICTIM_LIMIT_SECONDS)
    outcome.all_gone_seconds = round(time.monotonic() - begun, 1)
    outcome.expect(gone, f"the {cell.role} itself is still there")
    outcome.status, outcome.said = launch.agent.poll(), _naming_line(cell, launch.screen())
    if cell.may_finish:
        return
    outcome.expect(outcome.status not in (None, 0), f"exit status {outcome.status} of a failed run")
    outcome.expect(bool(outcome.said), f"nothing on the screen names the {cell.role}:\n{launch.screen()[-2000:]}")


def _finishes(cell: Cell, launch: Launch, known: set[int], outcome: Outcome) -> None:
    """With a reward worker less for a while."""
    replaced = False

    def ended() -> bool:
        nonlocal replaced
        if not replaced:
            replaced = bool(set(launch.victims("reward worker")) - known)
        return launch.agent.poll() is not None

    begun = time.monotonic()
    outcome.expect(_until(ended, FINISH_SECONDS), f"the run has not finished after {FINISH_SECONDS:.0f} s")
    outcome.all_gone_seconds = round(time.monotonic() - begun, 1)
    outcome.status = launch.agent.poll()
    outcome.expect(outcome.status == 0, f"exit status {outcome.status}:\n{launch.screen()[-2000:]}")
    outcome.expect(not launch.processes(), "processes are left")
    # In the end there is nothing left to score; and a worker that is stopped is noticed when it does not answer.
    expected = cell.phase != "shutdown" and not (cell.phase == "init" and cell.signal == "SIGSTOP")
    outcome.expect(replaced or not expected, "the worker was not replaced")
    outcome.said = "replaced" if replaced else "not replaced"


def _go_on(
    workplace: Path,
    project: str,
    num_steps: int,
    flags: Sequence[str],
    shared_memory: set[str],
    outcome: Outcome,
) -> None:
    """The same command again."""
    again = Launch(workplace, project, num_steps, flags)
    try:
        ended = _until(lambda: again.agent.poll() is not None, FINISH_SECONDS)
        status, screen = again.agent.poll(), again.screen()
        outcome.expect(ended and status == 0, f"the second run: exit status {status}:\n{screen[-2000:]}")
        if outcome.went_on_from:
            resumed = f"{outcome.went_on_from}\n" in screen or "has finished with step" in screen
            outcome.expect(resumed, f"the second run did not go on from {outcome.went_on_from}:\n{screen[-2000:]}")
        _check_leftovers(again, workplace, project, shared_memory, outcome)
    finally:
        again.end()


def _check_books(workplace: Path, project: str, num_steps: int, outcome: Outcome) -> None:
    """Nothing lost, nothing twice, over both runs."""
    report = check_logs(workplace / "logs" / project)
    broken = [str(invariant) for invariant in report.invariants if invariant.num_violations]
    outcome.expect(report.ok, f"the ledger is not clean: {broken}")
    outcome.expect(report.state == "end", f"by its logs the run is in the state {report.state!r}")
    consumed = report.totals["consumed"]
    outcome.expect(consumed == num_steps * GROUPS_PER_STEP, f"{consumed} groups consumed in {num_steps} steps")


def _check_leftovers(launch: Launch, workplace: Path, project: str, shared_memory: set[str], outcome: Outcome) -> None:
    folders = [path.name for path in launch.temporary.glob("zbgrpo-*")]
    outcome.expect(not folders, f"left in the folder for temporary files: {folders}")
    rings = set()
    for log in (workplace / "logs" / project / "events").glob("hub*.jsonl*"):
        rings |= set(re.findall(r'"ring":"([^"]+)"', log.read_text()))
    left = [ring for ring in rings if Path(ring).exists()]
    # Others on this machine use /dev/shm too; what they use is mapped.
    new = set(os.listdir("/dev/shm")) - shared_memory - {Path(ring).name for ring in left}
    outcome.expect(not left, f"left in /dev/shm: {left}")
    unused = [name for name in new if name.startswith("zbgrpo") and not _is_mapped(name)]
    outcome.expect(not unused, f"left in /dev/shm, mapped by nobody: {unused}")


def _naming_line(cell: Cell, screen: str) -> str:
    """The line that says what was lost; not one of a victim about itself."""
    what = {
        "hub": r"the hub (?:is gone|ended with status|has been silent)",
        "agent": r"the launcher \(process \d+\) (?:is gone|has been stopped)",
    }.get(cell.role) or re.escape(TITLES[cell.role])
    found = re.search(rf"^.*zbgrpo: (?:rank \d+ \([a-z]+ \d+\)|the hub) failed: .*{what}.*$", screen, re.M)
    if found is None and cell.signal == "SIGKILL" and cell.phase == "init":
        # Before ranks know each other it is the launcher that ends them, and says why.
        rank = RANKS.get(cell.role, -1)
        found = re.search(rf"^  rank      : {rank} \(local_rank: {rank}\)\n  exitcode  : -9 .*$", screen, re.M)
    return " ".join(found[0].split()) if found else ""


# ------------------------------------------------------------------------------------------------------- processes


def _until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _runs(command: list[bytes], module: bytes, not_by: bool = False) -> bool:
    """Whether this is `python -m module`; `not_by`: and not the launcher, whose own command line has that too."""
    return module in command and not (not_by and b"torch.distributed.run" in command)


def _rank(pid: int) -> int:
    try:
        found = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return -1
    return int(found[1]) if found else -1


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _is_mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return False


def _describe(command: list[bytes]) -> str:
    return b" ".join(command[:6]).decode(errors="replace")


# ------------------------------------------------------------------------------------------------------ the matrix


def table(outcomes: dict[str, Outcome]) -> str:
    """Markdown, role x phase: the seconds until the run was gone when killed / stopped, or that it goes on."""
    lines = ["| killed / stopped | " + " | ".join(PLACES) + " |", "|---|" + "---|" * len(PLACES)]
    for role in ROLES:
        cells = [" / ".join(_verdict(outcomes.get(Cell(role, p, s).name), role) for s in SIGNALS) for p in PLACES]
        lines.append(f"| {role} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdict(outcome: Outcome | None, role: str) -> str:
    if outcome is None:
        return "-"
    if outcome.problems:
        return "FAILED"
    return "goes on" if role == "reward worker" else f"{outcome.others_gone_seconds:.0f} s"


def read_results(path: Path) -> dict[str, Outcome]:
    """The last outcome of every cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {outcome.cell: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}


def run_matrix(folder: Path, cells: Iterable[Cell], skip: Callable[[Outcome], bool]) -> dict[str, Outcome]:
    """Run the cells that have no outcome to skip; outcomes of all cells that there are."""
    folder.mkdir(parents=True, exist_ok=True)
    results, workplace = folder / "results.jsonl", folder / "workplace"
    outcomes = read_results(results)
    if not workplace.exists():
        unfinished = Path(tempfile.mkdtemp(dir=folder))
        make_workplace(unfinished).rename(workplace)
    due = [cell for cell in cells if cell.name not in outcomes or not skip(outcomes[cell.name])]
    for number, cell in enumerate(due, 1):
        begun = time.monotonic()
        outcome = outcomes[cell.name] = run_cell(cell, workplace)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        verdict = "; ".join(outcome.problems) or outcome.said
        seconds = time.monotonic() - begun
        print(
            f"[{number}/{len(due)}] {cell.name} {_verdict(outcome, cell.role)} ({seconds:.0f} s): {verdict}", flush=True
        )
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop every process of a run in every phase.")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / ".bench" / "faults", help="for results and runs (.bench/faults)"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cells with one of these in their name")
    parser.add_argument("--again", action="store_true", help="cells that have been run too")
    parser.add_argument("--failed", action="store_true", help="cells that have failed too")
    arguments = parser.parse_args()
    cells = [cell for cell in CELLS if any(text in cell.name for text in arguments.only)]
    skip: Callable[[Outcome], bool] = lambda outcome: (
        not (arguments.again or (arguments.failed and bool(outcome.problems)))
    )
    outcomes = run_matrix(arguments.folder.resolve(), cells, skip)
    text = table(outcomes)
    (arguments.folder / "table.md").write_text(text + "\n")
    print(text)
    failed = [cell.name for cell in cells if outcomes[cell.name].problems]
    print(f"{len(cells) - len(failed)} of {len(cells)} cells hold" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
