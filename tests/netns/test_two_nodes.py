"""Runs on two nodes: network namespaces of this machine, connected by one link, with a file system in common."""

from __future__ import annotations

import json
import re
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.netns.stranger import DECIDED, NAME
from tests.support.launching import FLAGS, Finished, Run, events, make_workplace, metrics, summary
from tests.support.namespaces import Network, two_namespaces
from zbgrpo.engine.check_ledger import check_logs

PORT = "29500"  # nothing else listens in a namespace that has just been made


class Launcher(NamedTuple):
    """One torchrun: the namespace that it is in, and its number of ranks. Ranks count through the launchers."""

    node: int
    num_ranks: int


CONSUMERS_ON_BOTH = (Launcher(0, 2), Launcher(1, 2))
"""With -t 3 -i 1: consumers 0, 1 | consumer 2, producer 0. Consumers take the lower ranks, so that with one launcher on
each node there cannot be producers on the first one as well."""
BOTH_ON_BOTH = (Launcher(0, 1), Launcher(1, 2), Launcher(0, 1))
"""With -t 2 -i 2: consumer 0 | consumer 1, producer 0 | producer 1, the first and the last on the same node."""


class NodeRun(Run):
    """One launcher of a run."""

    def __init__(
        self,
        network: Network,
        workplace: Path,
        layout: Sequence[Launcher],
        number: int,
        flags: list[str],
        master: str | None,
        hosts: Path | None,
        environment: dict[str, str],
    ) -> None:
        self.workplace = workplace
        node, num_ranks = layout[number]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(layout)), "--node-rank", str(number),
            "--nproc-per-node", str(num_ranks), "--master-addr", master or network.nodes[0].address,
            "--master-port", PORT, "-m", "zbgrpo.launch", *FLAGS, *flags,
        ]  # fmt: skip
        self.process = network.nodes[node].start(command, workplace, hosts, **environment)


def launch(
    network: Network,
    workplace: Path,
    layout: Sequence[Launcher],
    flags: str,
    master: str | None = None,
    hosts: Sequence[Path | None] = (None, None),
    **environment: str,
) -> list[NodeRun]:
    """Start all launchers. `master`: MASTER_ADDR, the first node's address if left out; `hosts`: /etc/hosts by node."""
    return [
        NodeRun(network, workplace, layout, number, flags.split(), master, hosts[layout[number].node], environment)
        for number in range(len(layout))
    ]


def finish(runs: list[NodeRun], timeout_seconds: float = 150.0) -> list[Finished]:
    """Wait for all launchers; none of them may have failed."""
    finished = [run.wait(timeout_seconds) for run in runs]
    said = "\n".join(f"--- launcher {n}: {each.output[-3000:]}" for n, each in enumerate(finished))
    assert [each.status for each in finished] == [0] * len(runs), said
    return finished


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file system that the nodes share; runs use projects of their own in it."""
    return make_workplace(tmp_path_factory.mktemp("nodes"))


def nodes_of_peers(workplace: Path, project: str) -> dict[str, int]:
    """Number of the launcher of every peer, by the hub's log."""
    return {line["peer"]: line["node"] for line in events(workplace, project, "hub") if line["kind"] == "hello"}


def told(workplace: Path, project: str, rank: int, kind: str) -> list[dict[str, Any]]:
    return [line for line in events(workplace, project, f"rank-{rank}") if line["kind"] == kind]


def check_logs_of(workplace: Path, project: str, num_steps: int) -> None:
    """The run has made these steps, and its logs keep all invariants."""
    assert [line["step"] for line in metrics(workplace, project)] == list(range(1, num_steps + 1))
    report = check_logs(workplace / "logs" / project)
    assert report.ok and report.state == "end" and report.version == num_steps, str(report)
    assert summary(workplace, project)["ledger"]["live"] == 0


# ------------------------------------------------------------------------------------------------- a run that finishes


def test_slow_and_lossy_link_costs_nothing_but_time(workplace: Path) -> None:
    """50 ms each way and one packet in a hundred lost, with consumers and producers on both nodes."""
    num_steps, project = 3, "lossy"
    size = sum(path.stat().st_size for path in (workplace / "model").glob("*.safetensors"))
    assert 0 < size <= 1_000_000
    with two_namespaces(delay_seconds=0.05, loss=0.01) as network:
        flags = f"-t 2 -i 2 --max-steps {num_steps} --max-staleness 0 -p {project}"
        finish(launch(network, workplace, BOTH_ON_BOTH, flags))
        assert network.carrier is not None and network.carrier.num_lost > 0, "the link has lost nothing"
    check_logs_of(workplace, project, num_steps)
    peers = nodes_of_peers(workplace, project)
    assert peers == {
        "consumer:0": 0, "reader:0": 0, "consumer:1": 1, "relay:1": 1, "producer:0": 1, "producer:1": 2
    }  # fmt: skip
    published = {line["version"]: line["digest"] for line in told(workplace, project, 0, "published")}
    for producer in (2, 3):
        live = {line["version"]: line["digest"] for line in told(workplace, project, producer, "live_digest")}
        assert live.items() <= published.items() and set(live) >= set(range(num_steps))
    for consumer in (0, 1):
        commits = told(workplace, project, consumer, "commit")
        assert [line["version"] for line in commits] == list(range(1, num_steps + 1))
        assert len(told(workplace, project, consumer, "trained")) == 4 * num_steps
    # In this mode all tokens are sampled with the version that is trained. A consumer whose weights were not those of
    # the others would find other log-probs than the producers have.
    assert all(line["rollout/logprob_gap"] < 1e-5 for line in metrics(workplace, project))


def test_hub_of_several_nodes_lets_nobody_in_without_its_keys(workplace: Path) -> None:
    """A run in its usual time; while it is held, another process of the second node tries to speak to its hub."""
    project, held = "plain", workplace / "held"
    keys = workplace / "logs" / project / ".hub-address.json"
    with two_namespaces() as network:
        runs = launch(
            network, workplace, CONSUMERS_ON_BOTH, f"-t 3 -i 1 --max-steps 3 -p {project}",
            ZBGRPO_FAILPOINTS=f"step.commit#2@consumer:0=hold:{held}",
        )  # fmt: skip
        runs[0].wait_until(held.exists)
        hub = json.loads(keys.read_text())
        assert re.fullmatch(rf"tcp://{re.escape(network.nodes[0].address)}:\d+", hub["endpoint"])
        assert hub["server_public"] and hub["client_secret"], "CURVE is not on"
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
        run_id = next(line["run"] for line in events(workplace, project, "hub") if line["kind"] == "started")
        without = _stranger(network, workplace, hub["endpoint"], run_id)
        assert "CONNECTED" in without["events"], "the port was not reached"
        assert "HANDSHAKE_SUCCEEDED" not in without["events"] and without["num_received"] == 0, without
        # With the keys the same program gets through, which shows that it would be noticed: its run is a foreign one.
        allowed = _stranger(network, workplace, hub["endpoint"], "f" * len(run_id), str(keys))
        assert set(allowed["events"]) & set(DECIDED) == {"HANDSHAKE_SUCCEEDED"}, allowed
        held.with_name("held.go").touch()
        finish(runs)
        assert not any(node.processes() for node in network.nodes)
    check_logs_of(workplace, project, 3)
    peers = nodes_of_peers(workplace, project)
    assert peers["relay:1"] == 1 and peers["consumer:2"] == 1 and NAME not in peers
    (refused,) = (line for line in events(workplace, project, "hub") if line["kind"] == "refused")
    assert refused["count"] == 1, refused
    assert not keys.exists(), "the keys were left behind"


def _stranger(network: Network, workplace: Path, *arguments: str) -> dict[str, Any]:
    process = network.nodes[1].start([sys.executable, "-m", "tests.netns.stranger", *arguments], workplace)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def test_first_node_whose_own_name_is_loopback(workplace: Path, tmp_path: Path) -> None:
    """As /etc/hosts often has it. Neither the hub nor gloo may take that address, which is another one elsewhere."""
    with two_namespaces() as network:
        files = []
        for number, address in enumerate(("127.0.1.1", network.nodes[0].address)):
            files.append(tmp_path / f"hosts-{number}")
            files[-1].write_text(f"127.0.0.1 localhost\n{address} head\n")
        flags = "-t 3 -i 1 --max-steps 2 -p named"
        finish(launch(network, workplace, CONSUMERS_ON_BOTH, flags, "head", files))
    check_logs_of(workplace, "named", 2)


# ---------------------------------------------------------------------------------------------------- a link that dies

TIMEOUT_SECONDS, PEER_TIMEOUT_SECONDS = 30.0, 10.0
SLACK_SECONDS = 45.0  # torchrun gives its ranks 30 seconds to leave, and the machine may be busy
OF_SECOND_NODE = r"(relay of node 1|consumer 2|producer 0|rank [23])\b"


@pytest.mark.parametrize(
    "place",
    ["step.commit#3@consumer:0", "weights.broadcast#3@consumer:0", "generate.step#20@producer:0"],
)
def test_link_that_goes_down_ends_every_process_of_both_sides(workplace: Path, place: str) -> None:
    """For good, and in the middle: in a collective of consumers, in a broadcast of weights, while generating."""
    project = place.partition("#")[0].replace(".", "-")
    held = workplace / f"{project}-held"
    flags = (
        f"-t 3 -i 1 --max-steps 16 -p {project} transport.peer_timeout_seconds={PEER_TIMEOUT_SECONDS} "
        f"cluster.timeout_seconds={TIMEOUT_SECONDS} weights.timeout_seconds={TIMEOUT_SECONDS}"
    )
    with two_namespaces() as network:
        runs = launch(network, workplace, CONSUMERS_ON_BOTH, flags, ZBGRPO_FAILPOINTS=f"{place}=hold:{held}")
        runs[0].wait_until(held.exists)
        ranks = sorted(rank for run in runs for rank in run.ranks())
        assert ranks == [0, 1, 2, 3]
        network.cut()
        held.with_name(held.name + ".go").touch()
        deadline = time.monotonic() + TIMEOUT_SECONDS + PEER_TIMEOUT_SECONDS + SLACK_SECONDS
        finished = [run.wait(max(0.0, deadline - time.monotonic())) for run in runs]
        said = "\n".join(f"--- launcher {n}: {each.output[-5000:]}" for n, each in enumerate(finished))
        assert not any(node.processes() for node in network.nodes), "hub, relay or reward workers live on"
    assert all(each.status != 0 for each in finished), said
    statuses = {rank: status for each in finished for rank, status in _statuses(each.output).items()}
    assert sorted(statuses) == [0, 1, 2, 3] and 0 not in statuses.values(), (statuses, said)
    # Each side names what it has lost: the hub its peers of the other node, and they the hub.
    failures = [line["error"] for line in events(workplace, project, "hub") if line["kind"] == "failed"]
    assert failures and re.search(OF_SECOND_NODE, failures[0]), failures
    assert re.search(rf"zbgrpo: rank [01] .*failed: PeerLostError: .*{OF_SECOND_NODE}", finished[0].output), said
    assert re.search(r"zbgrpo: .* failed: PeerLostError: .*the hub (has been silent|is gone)", finished[1].output), said


def _statuses(output: str) -> dict[int, int]:
    """Exit status of every rank that has failed, from the report of torchrun."""
    found = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)", output)
    return {int(rank): int(status) for rank, status in found}
