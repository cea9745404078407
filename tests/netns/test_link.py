"""What the tests of several nodes stand on: the link does what it is asked for, and nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import REPOSITORY
from tests.support.namespaces import Network, two_namespaces
from tests.support.processes import wait_until_ended

ANSWER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"here")
    connection.close()
"""
ASK = """
import socket, sys, time
begun = time.monotonic()
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as connection:
    assert connection.recv(4) == b"here"
print(time.monotonic() - begun)
"""


OWNER = """
import sys
from pathlib import Path
from tests.support.namespaces import two_namespaces

with two_namespaces() as network:
    child = network.nodes[1].start(["sleep", "600"], Path(sys.argv[1]))
    while not network.nodes[1].processes():
        pass
    print(*[node.name for node in network.nodes], child.pid, flush=True)
    child.wait()
"""


def _ask(network: Network, folder: Path, timeout_seconds: float) -> tuple[int, str]:
    """Status and output of a client on the second node."""
    address = network.nodes[0].address
    client = network.nodes[1].start([sys.executable, "-c", ASK, address, str(timeout_seconds)], folder)
    output, _ = client.communicate(timeout=60)
    return client.returncode, output


def _serve(network: Network, folder: Path) -> None:
    server = network.nodes[0].start([sys.executable, "-c", ANSWER, network.nodes[0].address], folder)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"


def test_a_link_that_is_cut_loses_what_is_sent(tmp_path: Path) -> None:
    with two_namespaces() as network:
        _serve(network, tmp_path)
        status, output = _ask(network, tmp_path, 20.0)
        assert status == 0, output
        network.cut()
        status, output = _ask(network, tmp_path, 2.0)
        assert status != 0 and ("timed out" in output or "unreachable" in output or "No route" in output), output


def test_a_delay_is_there_in_both_directions(tmp_path: Path) -> None:
    with two_namespaces(delay_seconds=0.1) as network:
        _serve(network, tmp_path)
        status, output = _ask(network, tmp_path, 20.0)
        assert status == 0, output
        assert float(output) >= 0.4, "two round trips: connecting, and the answer"
        assert network.carrier is not None and network.carrier.num_carried > 4 and network.carrier.num_lost == 0


def test_packets_are_lost(tmp_path: Path) -> None:
    with two_namespaces(loss=1.0) as network:
        _serve(network, tmp_path)
        status, _ = _ask(network, tmp_path, 2.0)
        assert status != 0
        assert network.carrier is not None and network.carrier.num_carried == 0 and network.carrier.num_lost > 0


@pytest.mark.parametrize("delay_seconds", [0.0, 0.01])
def test_nothing_is_left_after_a_failure(tmp_path: Path, delay_seconds: float) -> None:
    with pytest.raises(ZeroDivisionError), two_namespaces(delay_seconds) as network:
        started = network.nodes[0].start([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path)
        child = network.nodes[1].start(["bash", "-c", "setsid sleep 600 & wait"], tmp_path)
        deadline = time.monotonic() + 20
        while len(network.nodes[1].processes()) < 2:  # one that has left the process group of what was started
            assert time.monotonic() < deadline
        raise ZeroDivisionError
    assert started.returncode == child.returncode == -9
    assert not _left([node.name for node in network.nodes])


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        first, second, child = owner.stdout.readline().split()
        assert _left([first, second]) == [first, second]
        owner.kill()
    deadline = time.monotonic() + 20
    assert wait_until_ended([int(child)], 20.0) == []
    while _left([first, second]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _left(names: list[str]) -> list[str]:
    """Those of these namespaces, or ends of links with their names, that are there."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    found += subprocess.run(["ip", "link", "show"], capture_output=True, text=True, check=True).stdout
    return [name for name in names if name in found]
