"""Who is lost, who is stuck, and how a rank ends that does not end by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.server import Server
from zbgrpo.transport.sockets import Dealer
from zbgrpo.transport.wire import Sender, encode

ROOT = Path(__file__).resolve().parents[2]
RUN, MAX_BYTES, GIVE_UP_SECONDS = "run-1", 1 << 20, 60.0
TIMING = Timing(heartbeat_seconds=0.05, peer_timeout_seconds=600.0, resend_seconds=0.2)


@pytest.fixture
def open_server() -> Iterator[Callable[[Timing], Server]]:
    servers: list[Server] = []

    def make(timing: Timing) -> Server:
        servers.append(Server(RUN, None, timing, MAX_BYTES))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def serve(server: Server, until: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Run the hub's side until the condition holds for what `tick` says; what it said then."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not until(lost := server.tick()):
        assert time.monotonic() < deadline, "it never happened"
        server.poll(0.01)
    return lost


def connected(server: Server, name: str) -> Dealer:
    """A peer that has sent a heartbeat and nothing else."""
    dealer = Dealer(server.address, name.encode(), MAX_BYTES)
    while not dealer.send(encode(Sender(RUN, name), 0, 0, [])):
        dealer.wait(0.05, or_writable=True)
    serve(server, lambda lost: name in server.peers)
    return dealer


@pytest.mark.parametrize("suspicious", [False, True])
def test_a_peer_without_a_connection_is_gone(open_server: Callable[[Timing], Server], suspicious: bool) -> None:
    """After the peer timeout, or soon when a rank has said that somebody is gone."""
    server = open_server(TIMING if suspicious else TIMING._replace(peer_timeout_seconds=0.3))
    stays, goes = connected(server, "producer:0"), connected(server, "producer:1")
    server.suspicious = suspicious
    goes.close()
    lost = serve(server, bool)
    stays.close()
    assert list(lost) == ["producer:1"] and "is gone or stopped" in lost["producer:1"]


def test_a_peer_may_be_silent_until_it_has_said_hello(open_server: Callable[[Timing], Server]) -> None:
    """It loads its model, which may keep every thread of it waiting; its connection is answered by the library."""
    server = open_server(TIMING)
    dealer = connected(server, "producer:0")
    peer = server.peers["producer:0"]
    peer.heard -= 10_000.0
    assert not server.tick()
    assert dealer.send(encode(Sender(RUN, "producer:0"), 1, 0, [m.Hello(2)]))
    serve(server, lambda lost: peer.introduced)
    peer.heard -= 10_000.0
    assert server.tick() == {"producer:0": "has been silent for 600 s"}
    dealer.close()


def test_of_those_that_do_not_go_on_the_one_that_waits_for_nobody_is_named(
    open_server: Callable[[Timing], Server],
) -> None:
    server = open_server(TIMING._replace(progress_timeout_seconds=1.0))
    doing = {"consumer:0": ("adding up gradients", True), "consumer:1": ("busy", False), "producer:0": ("busy", False)}
    channels = {}
    for name, what in doing.items():
        channels[name] = Channel(server.address, Sender(RUN, name), TIMING, MAX_BYTES)
        channels[name].doing = lambda what=what: what
        channels[name].start().alive()

    def stuck(lost: dict[str, str]) -> bool:
        channels["producer:0"].alive()
        return bool(lost)

    lost = serve(server, stuck)
    assert list(lost) == ["consumer:1"]
    assert lost["consumer:1"].startswith("has not gone on for ") and lost["consumer:1"].endswith("(in busy)")
    for channel in channels.values():
        channel.close(0.0)


def test_a_loop_that_has_not_begun_is_not_stuck(open_server: Callable[[Timing], Server]) -> None:
    server = open_server(TIMING._replace(progress_timeout_seconds=0.001))
    channel = Channel(server.address, Sender(RUN, "consumer:0"), TIMING, MAX_BYTES).start()
    serve(server, lambda lost: "consumer:0" in server.peers)
    heard = server.peers["consumer:0"].heard
    serve(server, lambda lost: server.peers["consumer:0"].heard > heard)
    assert not server.tick()
    channel.close(0.0)


# ------------------------------------------------------------------------------------------------------ the watchdog

WATCHED = """
import sys, time
from types import SimpleNamespace
from zbgrpo.config.schema import ClusterConfig, RunConfig
from zbgrpo.engine.rank import Rank
from zbgrpo.engine.watchdog import Watchdog
from zbgrpo.errors import PeerLostError
from zbgrpo.topology.env import TorchrunEnv

config = RunConfig(cluster=ClusterConfig(num_trainers=1, num_inferencer=1, exit_timeout_seconds=0.2))
rank = Rank(config, TorchrunEnv(0, 2, 0, 2, 0, "localhost", 1, "run", 0))
reported = sys.argv[1] == "reported"
rank.channel = SimpleNamespace(failure=PeerLostError("rank 1 (producer 0) is gone", reported))
Watchdog(rank).start()
time.sleep(100)
"""


@pytest.mark.parametrize("reported", [False, True])
def test_a_main_thread_that_is_stuck_is_ended_with_a_line(reported: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED, "reported" if reported else "new"], cwd=ROOT, capture_output=True, text=True,
        timeout=GIVE_UP_SECONDS, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    line = (
        "zbgrpo: rank 0 (consumer 0) failed: PeerLostError: rank 1 (producer 0) is gone; this rank was stuck (startup) "
        "and is ended\n"
    )
    assert ended.stderr == ("" if reported else line)


LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.DEVNULL).wait()
"""
STARTED = """
import os, time
from zbgrpo.engine.watchdog import Launcher
launcher = Launcher(os.getppid())
print("watches", flush=True)
while (loss := launcher.loss(0.2)) is None:
    time.sleep(0.02)
print(loss, flush=True)
"""


@pytest.mark.parametrize(
    ("number", "loss"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "has been stopped for 0 s")]
)
def test_a_launcher_that_is_killed_or_stopped_is_missed(number: signal.Signals, loss: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "torchrun", STARTED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "watches\n"
        launcher.send_signal(number)
        assert launcher.stdout.readline() == f"the launcher (process {launcher.pid}) {loss}\n"
        launcher.send_signal(signal.SIGCONT)


def test_a_parent_that_is_no_launcher_may_leave() -> None:
    from zbgrpo.engine.watchdog import Launcher

    assert Launcher(os.getpid() + 1).loss(0.0) is None


def test_ranks_of_this_node_that_are_stopped_are_killed_and_nobody_else() -> None:
    waits = "import sys; sys.stdin.read()"
    commands = {"stopped": ["zbgrpo.launch"], "running": ["zbgrpo.launch"], "another program": ["something"]}
    processes = {
        name: subprocess.Popen([sys.executable, "-c", waits, *arguments], stdin=subprocess.PIPE)
        for name, arguments in commands.items()
    }
    for name in ("stopped", "another program"):
        processes[name].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, processes[name].pid, os.WSTOPPED | os.WNOWAIT)
    subprocess.run(
        [sys.executable, "-c", "from zbgrpo.engine.watchdog import *; end_stopped_siblings()"], cwd=ROOT, check=True
    )
    processes["another program"].send_signal(signal.SIGCONT)
    for process in processes.values():
        process.communicate()
    ends = {name: process.returncode for name, process in processes.items()}
    assert ends == {"stopped": -signal.SIGKILL, "running": 0, "another program": 0}
