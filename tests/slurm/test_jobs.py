"""The batch scripts of launch/slurm/, in a real Slurm of two nodes that are this machine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.support.launching import FLAGS, REPOSITORY, events, make_workplace, metrics, summary
from zbgrpo.engine.check_ledger import check_logs

SCRIPTS = REPOSITORY / "launch" / "slurm"
JOB_SECONDS = 120.0
TWO_NODES = "-t 2 -i 2 -si 3 -e 10"
ONE_NODE = "-t 1 -i 1 -si 3 -e 10"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    try:
        started.start()
        yield started
        assert not started.stop(), "a job has left processes behind"
    finally:
        started.stop()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(autouse=True)
def empty_queue(cluster: Cluster) -> Iterator[None]:
    """A test that fails leaves no job to the next one."""
    yield
    cluster.cancel_all()


@dataclass
class Job:
    """A job of ours. `name` is its number, or NUMBER_TASK."""

    cluster: Cluster
    name: str
    folder: Path

    def field(self, key: str) -> str:
        """What Slurm knows of the job."""
        found = re.search(rf"\b{key}=(\S+)", self.cluster.command("scontrol", "show", "job", self.name))
        assert found is not None, key
        return found[1]

    @property
    def output(self) -> str:
        return (self.folder / f"zbgrpo-{self.name}.out").read_text(errors="replace")

    def signal(self) -> None:
        """As Slurm does shortly before the time limit, because of `--signal=B:USR1`."""
        self.cluster.command("scancel", "--signal=USR1", "--batch", self.name)

    def wait(self, state: str) -> None:
        """Until it has ended, which must be in this state."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
        try:
            self.cluster.until(lambda: self.field("JobState") in ends, JOB_SECONDS)
        finally:
            print(self.output)  # pytest shows it when the test fails
        assert self.field("JobState") == state

    def wait_for(self, path: Path) -> None:
        """Until the file is there; the job must not end before."""
        states = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        self.cluster.until(lambda: path.exists() or self.field("JobState") not in states, JOB_SECONDS)
        assert path.exists(), self.output

    def wait_for_start(self, number: int) -> None:
        """Until it runs and has been put back `number` times."""
        self.cluster.until(
            lambda: self.field("Restarts") == str(number) and self.field("JobState") == "RUNNING", JOB_SECONDS
        )


def submit(
    cluster: Cluster,
    folder: Path,
    script: str,
    flags: str,
    variables: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Job:
    own = {"ZBGRPO_VENV": sys.prefix, "NPROC": "2"} | (variables or {})
    words = ["sbatch", "--parsable", *options, str(SCRIPTS / script), *FLAGS, *flags.split()]
    name = cluster.command(*words, folder=folder, variables=own).strip()
    return Job(cluster, name, folder)


def assert_trained_once(folder: Path, project: str, num_steps: int, num_consumers: int) -> None:
    """Every step once and in order, and every group of them used up once, in the ledger's books and by a count."""
    assert [line["step"] for line in metrics(folder, project)] == list(range(1, num_steps + 1))
    report = check_logs(folder / "logs" / project)
    assert report.ok, str(report)
    logs = [events(folder, project, f"rank-{rank}") for rank in range(num_consumers)]
    uids = Counter(tuple(line["uid"]) for log in logs for line in log if line["kind"] == "trained")
    assert set(uids.values()) == {1}, "a group was trained twice"
    assert len(uids) == num_steps * num_consumers * 4 == summary(folder, project)["ledger"]["consumed"]


def hold(folder: Path, name: str, place: str) -> tuple[Path, dict[str, str]]:
    """(the file that says that the run waits at the place, the environment that makes it wait)."""
    held = folder / f"{name}.held"
    return held, {"ZBGRPO_FAILPOINTS": f"{place}=hold:{held}"}


def let_go(held: Path) -> None:
    held.with_name(f"{held.name}.go").touch()


def test_two_nodes(cluster: Cluster, workplace: Path) -> None:
    job = submit(cluster, workplace, "several_nodes.sbatch", f"{TWO_NODES} --max-steps 6 -p two")
    job.wait("COMPLETED")
    assert_trained_once(workplace, "two", 6, 2)
    own = re.escape(cluster.address)
    used = re.findall(rf"^\d: zbgrpo: (node\d) reaches {own} from {own} on (\S+)$", job.output, re.MULTILINE)
    assert sorted(node for node, _ in used) == ["node1", "node2"]
    assert {interface == "lo" for _, interface in used} == {cluster.address.startswith("127.")}
    assert job.field("Restarts") == "0" and job.field("NumNodes") == "2"
    assert not list(workplace.glob(".zbgrpo-job-*"))


def test_a_signal_before_the_time_limit(cluster: Cluster, workplace: Path) -> None:
    """The state is saved, the job goes back into the queue, and its next start ends as if nothing had happened."""
    held, variables = hold(workplace, "limit", "step.commit#4@consumer:0")
    flags = f"{TWO_NODES} --max-steps 8 -p limit"
    job = submit(cluster, workplace, "several_nodes.sbatch", flags, variables)
    job.wait_for(held)
    job.signal()
    let_go(held)
    job.wait("COMPLETED")
    assert job.field("Restarts") == "1"
    assert "stopped by SIGUSR1; job" in job.output and "zbgrpo: stopped and saved" in job.output
    found = re.search(r"going on from model_out/limit/state-(\d+)", job.output)
    assert found is not None and 3 < int(found[1]) < 8
    assert_trained_once(workplace, "limit", 8, 2)
    assert not list(workplace.glob(".zbgrpo-job-*"))


@pytest.mark.parametrize(
    ("partition", "message"),
    [("main", "stopped by a signal to its ranks; job"), ("sudden", "stopped by SIGTERM; Slurm has job")],
)
def test_a_preferred_job(cluster: Cluster, workplace: Path, partition: str, message: str) -> None:
    """With a grace time, Slurm tells only the ranks, and the script puts the job back; without one, Slurm does. In both
    cases --resume never holds for the first start only."""
    submit(cluster, workplace, "one_node.sbatch", f"{ONE_NODE} --max-steps 2 -p {partition}").wait("COMPLETED")
    held, variables = hold(workplace, partition, "step.commit#4@consumer:0")
    flags = f"{ONE_NODE} --max-steps 8 -p {partition} --resume never"
    job = submit(cluster, workplace, "one_node.sbatch", flags, variables, (f"--partition={partition}",))
    job.wait_for(held)
    (workplace / "urgent.sh").write_text("#!/bin/bash\ntrue\n")
    options = ("--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--output=/dev/null")
    urgent = cluster.command("sbatch", "--parsable", *options, "urgent.sh", folder=workplace).strip()
    cluster.until(lambda: "death signal" in job.output)  # torchrun says so
    let_go(held)
    job.wait("COMPLETED")
    assert job.field("Restarts") == "1" and Job(cluster, urgent, workplace).field("JobState") == "COMPLETED"
    assert message in job.output and "zbgrpo: stopped and saved" in job.output
    assert job.output.count("--resume never: logs") == job.output.count("going on from") == 1
    assert_trained_once(workplace, partition, 8, 1)


def test_seeds(cluster: Cluster, workplace: Path) -> None:
    """Two runs beside each other. One of them is put back into the queue, and the other one is not."""
    held, variables = hold(workplace, "seed", "step.commit#4@consumer:0")
    flags = f"{ONE_NODE} --max-steps 6"
    both = submit(cluster, workplace, "seeds.sbatch", flags, variables | {"PROJECT": "many"}, ("--array=1-2",))
    tasks = [Job(cluster, f"{both.name}_{number}", workplace) for number in (1, 2)]
    projects = ["many-seed-1", "many-seed-2"]
    cluster.until(lambda: all(len(metrics(workplace, project)) == 3 for project in projects), JOB_SECONDS)
    tasks[1].signal()
    let_go(held)
    for task in tasks:
        task.wait("COMPLETED")
    assert [task.field("Restarts") for task in tasks] == ["0", "1"]
    for number, project in enumerate(projects, start=1):
        assert_trained_once(workplace, project, 6, 1)
        assert f"seed: {number}" in (workplace / "logs" / project / "config.yaml").read_text()


def test_a_run_that_fails_is_not_started_again(cluster: Cluster, workplace: Path) -> None:
    variables = {"ZBGRPO_FAILPOINTS": "step.commit#2@consumer:0=raise:DataError"}
    job = submit(cluster, workplace, "one_node.sbatch", f"{ONE_NODE} --max-steps 6 -si 1 -p broken", variables)
    job.wait("FAILED")
    assert job.field("Restarts") == "0" and "the run has failed" in job.output
    assert (workplace / "model_out" / "broken" / "latest").exists(), "there was something to go on from"


def test_a_mistake_in_the_flags_starts_nothing(cluster: Cluster, workplace: Path) -> None:
    job = submit(cluster, workplace, "one_node.sbatch", f"{ONE_NODE} --no-such-flag")
    job.wait("FAILED")
    assert job.field("ExitCode") == "2:0" and "no-such-flag" in job.output and "srun" not in job.output


def test_a_job_that_gets_nowhere_is_given_up(cluster: Cluster, workplace: Path) -> None:
    """Cut off during start-up, when there is nothing to save: it goes back, but not for ever."""
    held, variables = hold(workplace, "nowhere", "init.world@consumer:0")
    flags = f"{ONE_NODE} --max-steps 6 -p nowhere"
    job = submit(cluster, workplace, "one_node.sbatch", flags, variables | {"MAX_IDLE_STARTS": "2"})
    for number in range(2):
        job.wait_for_start(number)
        job.wait_for(held)
        held.unlink()
        job.signal()
    job.wait("FAILED")
    assert job.field("Restarts") == "1" and "the start number 2 without a new state" in job.output


def test_a_cancelled_job_stays_away(cluster: Cluster, workplace: Path) -> None:
    held, variables = hold(workplace, "cancelled", "step.commit#2@consumer:0")
    job = submit(cluster, workplace, "one_node.sbatch", f"{ONE_NODE} --max-steps 6 -p cancelled", variables)
    job.wait_for(held)
    cluster.command("scancel", job.name)
    let_go(held)
    job.wait("CANCELLED")
    assert job.field("Restarts") == "0" and "goes back into the queue" not in job.output
