"""Who has no business with the hub: what strangers send is never delivered, and the run beside them goes on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.support.run_beside import GIVE_UP_SECONDS, MAX_MESSAGE_BYTES, RUN_ID, RunBeside, resident_bytes, run_beside
from tests.support.wire_fuzz import KINDS
from tests.support.wire_messages import EVERY_MESSAGE, groups_of
from zbgrpo.transport import messages as m
from zbgrpo.transport.sockets import Address, Dealer, Keys, Router
from zbgrpo.transport.wire import Buffer, Sender, encode

SEED = 23
ROOT = Path(__file__).parents[2]
HARMFUL: list[m.Message] = [
    m.Failed("of a stranger"), m.Goodbye(), m.StopRequest("of a stranger"), m.Committed(1), m.Dropped(0, "end", ""),
]  # fmt: skip
"""Each of these would be seen in the run if it were delivered under the name of one of its peers."""


class Network(NamedTuple):
    """How the hub listens."""

    host: str | None
    curve: bool


NETWORKS = [
    pytest.param(Network(None, False), id="ipc"),
    pytest.param(Network("127.0.0.1", False), id="tcp"),
    pytest.param(Network("127.0.0.1", True), id="tcp-curve"),
]
networks = pytest.mark.parametrize("network", NETWORKS)


class Strangers:
    """Their connections, which stay open until the run has ended, so that nothing that they sent is lost."""

    def __init__(self, run: RunBeside) -> None:
        self.run = run
        self.num_sent = 0
        """Messages that the hub must have refused in the end."""
        self._dealers: dict[str, Dealer] = {}

    def dealer(self, name: str, address: Address | None = None) -> Dealer:
        """A connection under this name; with the run's own key where there is one."""
        if name not in self._dealers:
            self._dealers[name] = Dealer(address or self.run.address, name.encode(), 1 << 30)
        return self._dealers[name]

    def send(self, name: str, parts: Sequence[Buffer], counted: bool = True) -> None:
        dealer = self.dealer(name)

        self.run.wait_until(lambda: dealer.send(list(parts)), f"{name} cannot send")
        self.num_sent += counted

    def leave(self, name: str) -> None:
        self._dealers.pop(name).close()

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()


def replaying(run: RunBeside) -> deque[list[bytes]]:
    """What a producer has sent of late, some of which is sent again on its own connection all the time."""
    recorded: deque[list[bytes]] = deque(maxlen=500)
    dealer = run.channels["producer:0"]._dealer
    assert dealer is not None
    send, rng = dealer.send, random.Random(SEED)

    def send_and_replay(parts: list[Buffer]) -> bool:
        sent = send(parts)
        if sent:
            recorded.append([bytes(part) for part in parts])
            for _ in range(rng.randrange(3)):
                send(list(rng.choice(recorded)))
        return sent

    dealer.send = send_and_replay  # type: ignore[method-assign]
    return recorded


# ------------------------------------------------------------------------------------------------ what they send


def foreign_messages(strangers: Strangers) -> None:
    """Of another run, of every kind."""
    for message in EVERY_MESSAGE:
        strangers.send("producer:9", encode(Sender("another-run", "producer:9"), 1, 0, [message]))


def borrowed_names(strangers: Strangers) -> None:
    """With a peer's name in the header, on a connection that has another one."""
    for name in ("producer:0", "consumer:0", "reader:0", "hub"):
        for message in HARMFUL:
            strangers.send("producer:9", encode(Sender(RUN_ID, name, 1), 1, 10**6, [message]))


def malformed_messages(strangers: Strangers) -> None:
    """Random ones, and valid ones with changed bytes, types, sizes and depths."""
    for number in range(600):
        parts = KINDS[number % len(KINDS)](random.Random(f"{SEED} {number}"))
        if parts:
            strangers.send("producer:9", parts)
    for header in (b"\x91" * 500_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b""):
        strangers.send("producer:9", [header])


def oversize_messages(strangers: Strangers) -> None:
    """Above what the socket takes; it is the connection that ends."""
    frame = bytes(MAX_MESSAGE_BYTES + 1)
    for number in range(3):
        parts = encode(Sender(RUN_ID, f"producer:{7 + number}"), 1, 0, [*HARMFUL, groups_of(frame)], [frame])
        strangers.send(f"producer:{7 + number}", parts, counted=False)


def bytes_of_other_programs(strangers: Strangers) -> None:
    """What is not even ZeroMQ, or only at first; sizes of 2**62; connections that end in the middle."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    curve = greeting.replace(b"NULL\0", b"CURVE")
    rng = random.Random(SEED)
    texts = [
        b"", b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", rng.randbytes(64), rng.randbytes(100_000), greeting[:11], greeting,
        greeting + rng.randbytes(300), greeting + ready + b"\x02" + struct.pack(">Q", 2**62),
        greeting + ready + b"\x06" + struct.pack(">Q", 2**62), greeting + ready + b"\x01\xff" + bytes(10),
        curve + b"\x04\xc8\x05HELLO" + rng.randbytes(194), curve + b"\x04\xc8\x08INITIATE" + bytes(191),
    ]  # fmt: skip
    for text in texts:
        # It may be thrown out before it has said all of it.
        with connection(strangers.run.address) as raw, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(text)


def connection(address: Address) -> socket.socket:
    """A plain connection to the hub's socket."""
    if address.endpoint.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(address.endpoint.removeprefix("ipc://"))
        return raw
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


@networks
def test_nothing_of_strangers_is_delivered_and_the_run_goes_on(network: Network, tmp_path: Path) -> None:
    with run_beside(tmp_path, *network) as run:
        strangers = Strangers(run)
        recorded = replaying(run)
        try:
            for attack in (
                foreign_messages, borrowed_names, malformed_messages, oversize_messages, bytes_of_other_programs,
            ):  # fmt: skip
                attack(strangers)
                run.goes_on()
            for parts in list(recorded):  # a copy of what a peer has sent, from somebody else
                strangers.send("producer:9", parts)
            run.goes_on()
            run.finish()
        finally:
            strangers.close()
        assert len(recorded) > 50
        count, last = run.refused()
        # Some of the random bytes make whole messages too.
        assert strangers.num_sent <= count <= strangers.num_sent + 20, (count, strangers.num_sent, last)


@networks
def test_who_takes_the_name_of_a_peer_delivers_nothing_and_the_peer_comes_back(
    network: Network, tmp_path: Path
) -> None:
    """The socket gives a name to whoever came last, as it must for a peer whose old connection hangs."""
    with run_beside(tmp_path, *network) as run:
        strangers = Strangers(run)
        recorded = replaying(run)
        run.goes_on()
        try:
            for parts in list(recorded)[-50:]:  # replayed under the right name
                strangers.send("producer:0", parts, counted=False)
            for sequence, message in enumerate(HARMFUL, start=1):  # of another run, as if it had been started again
                parts = encode(Sender("another-run", "producer:0", 1), sequence, 0, [message])
                strangers.send("producer:0", parts, counted=False)
            strangers.leave("producer:0")
            run.goes_on()
        finally:
            strangers.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["ipc", "tcp"])
def test_wrong_keys_deliver_nothing_and_the_run_goes_on(host: str | None, tmp_path: Path) -> None:
    with run_beside(tmp_path, host, curve=True) as run:
        right, other = run.address, Keys.generate()
        addresses = {
            "no key": Address(right.endpoint),
            "own key": Address(right.endpoint, right.server_public, other.client_public, other.client_secret),
            "wrong key of the hub": Address(
                right.endpoint, other.server_public, right.client_public, right.client_secret
            ),
        }  # fmt: skip
        num_files = run.num_files()
        dealers = [
            Dealer(address, name.encode(), 1 << 30)
            for address in addresses.values()
            for name in ("producer:0", "consumer:0", "producer:9")
        ]
        try:
            for _ in range(10):
                for dealer in dealers:
                    dealer.send(encode(Sender(RUN_ID, "producer:0", 1), 1, 0, HARMFUL))
                run.goes_on(50)
        finally:
            for dealer in dealers:
                dealer.close()
        run.wait_until(lambda: run.num_files() <= num_files, "their connections stay")
        run.finish()
        assert run.refused() == (0, ""), "they did not even get to the point of being refused"


# ------------------------------------------------------------------------------------------------ who says nothing

NUM_IDLE = 1_000
BYTES_PER_CONNECTION = 128 << 10
"""Most memory that a connection may cost the hub while it lasts."""

CROWD = """
import json, socket, sys
import zmq
kind, number, address = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
endpoint = address["endpoint"]
kept = []
if kind == "silent":
    for _ in range(number):
        if endpoint.startswith("ipc://"):
            one = socket.socket(socket.AF_UNIX)
            one.connect(endpoint[6:])
        else:
            host, _, port = endpoint[6:].rpartition(":")
            one = socket.create_connection((host, int(port)))
        kept.append(one)
else:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * number)
    for index in range(number):
        one = context.socket(zmq.DEALER)
        one.linger = 0
        one.setsockopt(zmq.IDENTITY, f"idle:{index}".encode())
        if address["server_public"]:
            one.curve_serverkey = address["server_public"].encode()
            one.curve_publickey = address["client_public"].encode()
            one.curve_secretkey = address["client_secret"].encode()
        one.connect(endpoint)
        kept.append(one)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process, and those that it starts, open some thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * NUM_IDLE
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed) if soft != resource.RLIM_INFINITY else soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_crowd(kind: str, number: int, address: Address) -> subprocess.Popen[bytes]:
    """A process that opens this many connections and then says nothing."""
    arguments = [kind, str(number), msgspec.json.encode(asdict(address)).decode()]
    return subprocess.Popen([sys.executable, "-c", CROWD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def end_crowd(crowd: subprocess.Popen[bytes]) -> None:
    crowd.kill()
    crowd.communicate()


@networks
@pytest.mark.parametrize("kind", ["silent", "dealers"])
@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_a_thousand_idle_connections_change_nothing(network: Network, kind: str, tmp_path: Path) -> None:
    """Those that never say what they are are closed after ten seconds; the others are kept, and cost little."""
    with run_beside(tmp_path, *network) as run:
        num_files, num_bytes = run.num_files(), run.resident_bytes()
        crowd = start_crowd(kind, NUM_IDLE, run.address)
        try:
            run.wait_until(lambda: run.num_files() >= num_files + NUM_IDLE, "they are not let in")
            run.goes_on()
            assert run.num_files() <= num_files + NUM_IDLE + 8
            assert run.resident_bytes() - num_bytes < NUM_IDLE * BYTES_PER_CONNECTION
            if kind == "silent":
                run.wait_until(lambda: run.num_files() <= num_files, "they are never thrown out")
        finally:
            end_crowd(crowd)
        run.wait_until(lambda: run.num_files() <= num_files, "their descriptors are not given back")


def test_crowds_that_come_and_go_do_not_add_up() -> None:
    """The memory of those who have left serves those who come: the bound is for how many there are at once."""
    number, num_crowds = 300, 6
    router = Router("127.0.0.1", MAX_MESSAGE_BYTES)
    try:
        num_files, num_bytes = len(os.listdir("/proc/self/fd")), resident_bytes()
        for _ in range(num_crowds):
            crowd = start_crowd("dealers", number, router.address)
            try:
                serve(router, lambda: len(os.listdir("/proc/self/fd")) >= num_files + 2 + number)  # two pipes to it
            finally:
                end_crowd(crowd)
            serve(router, lambda: len(os.listdir("/proc/self/fd")) <= num_files)
        # Half of what it would be if each connection left behind what it takes, some 30 KB.
        assert resident_bytes() - num_bytes < number * num_crowds * 30_000 / 2
    finally:
        router.close()


def serve(router: Router, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not until():
        assert time.monotonic() < deadline
        router.wait(0.02)
        assert router.receive() is None, "they say something"


def test_a_hub_that_may_open_no_more_files_goes_on(tmp_path: Path) -> None:
    """Those who are in stay in, and when the crowd has gone others get in again."""
    with run_beside(tmp_path, "127.0.0.1") as run:
        num_files = run.num_files()
        limit = num_files + 20
        resource.prlimit(run.hub_pid, resource.RLIMIT_NOFILE, (limit, limit))
        crowd = start_crowd("silent", 100, run.address)
        try:
            run.wait_until(lambda: run.num_files() >= limit - 1, "they are not let in")
            run.goes_on(1_000)
        finally:
            end_crowd(crowd)
        run.wait_until(lambda: run.num_files() <= num_files, "their descriptors are not given back")
        strangers = Strangers(run)
        try:
            strangers.send("producer:9", encode(Sender("another-run", "producer:9"), 1, 0, []))
            run.goes_on()
        finally:
            strangers.close()
