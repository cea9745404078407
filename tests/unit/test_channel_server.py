"""Channels and the hub's server over real sockets: delivery, restarts, strangers, failures, and what is left behind."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from zbgrpo.errors import PeerLostError, ProtocolError, ResourceError
from zbgrpo.transport import messages as m
from zbgrpo.transport import wire
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.server import Server
from zbgrpo.transport.sockets import Address, Dealer, Keys, Router
from zbgrpo.transport.wire import Buffer, Sender, decode, encode

RUN = "run-1"
MAX_BYTES = 1 << 22
FAST = Timing(heartbeat_seconds=0.05, peer_timeout_seconds=60.0, resend_seconds=0.2)
PATIENT = FAST._replace(resend_seconds=3_600.0)
"""For what must arrive without being sent again."""
IMPATIENT = Timing(heartbeat_seconds=0.05, peer_timeout_seconds=0.6, resend_seconds=0.2)
GIVE_UP_SECONDS = 60.0
"""Far above what anything here takes; only a test that would hang meets it."""

Arrived = list[tuple[str, m.Message, list[memoryview]]]


Opened = TypeVar("Opened", Server, Channel, Router, Dealer)
_opened: list[Server | Channel | Router | Dealer] = []


def opened(thing: Opened) -> Opened:
    """Remember to close it: a socket that is only forgotten keeps a failed test from ending."""
    _opened.append(thing)
    return thing


@pytest.fixture(autouse=True)
def close_what_was_opened() -> Iterator[None]:
    yield
    for thing in reversed(_opened):
        if isinstance(thing, Channel):
            thing.close(0.0)
        else:
            thing.close()
    _opened.clear()


class Network(NamedTuple):
    """How the two sides of a test are connected."""

    host: str | None
    curve: bool

    def server(self, timing: Timing = FAST, keys: Keys | None = None) -> Server:
        return opened(Server(RUN, self.host, timing, MAX_BYTES, keys or (Keys.generate() if self.curve else None)))


networks = pytest.mark.parametrize(
    "network",
    [Network(None, False), Network(None, True), Network("127.0.0.1", False), Network("127.0.0.1", True)],
    ids=["ipc", "ipc-curve", "tcp", "tcp-curve"],
)


def serve(server: Server, until: Callable[[], bool]) -> Arrived:
    """Run the hub's side until the condition holds; everything that arrived meanwhile."""
    arrived: Arrived = []
    serve_into(server, arrived, until)
    return arrived


def serve_into(server: Server, arrived: Arrived, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not until():
        assert time.monotonic() < deadline, f"gave up; {server.refused} refused, the last: {server.last_refusal}"
        arrived.extend(server.poll(0.01))
        server.tick()


def await_messages(server: Server, count: int) -> Arrived:
    arrived: Arrived = []
    serve_into(server, arrived, lambda: len(arrived) >= count)
    return arrived


def new_channel(address: Address, sender: Sender, timing: Timing) -> Channel:
    return opened(Channel(address, sender, timing, MAX_BYTES))


def channel_to(
    server: Server, name: str = "producer:0", timing: Timing = FAST, incarnation: int = 0, run_id: str = RUN
) -> Channel:
    return new_channel(server.address, Sender(run_id, name, incarnation), timing).start()


def close(channel: Channel, server: Server, drain_seconds: float = GIVE_UP_SECONDS) -> bool:
    """Close a channel while the server runs; whether everything arrived."""
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(channel.close(drain_seconds)))
    thread.start()
    serve(server, lambda: not thread.is_alive())
    thread.join()
    return results[0]


def ends_in_time(action: Callable[[], Any]) -> Any:
    """The result of something that must not hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(GIVE_UP_SECONDS)
    assert results, "it hangs"
    return results[0]


class RawPeer:
    """A peer without a link: sends exactly what a test says."""

    def __init__(self, address: Address, name: str = "producer:0", incarnation: int = 0, run_id: str = RUN) -> None:
        self.sender = Sender(run_id, name, incarnation)
        self.dealer = opened(Dealer(address, name.encode(), 1 << 30))

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not self.dealer.send(list(parts)):
            assert time.monotonic() < deadline, "no connection"
            self.dealer.wait(0.05, or_writable=True)

    def send(self, sequence: int, *messages: m.Message, acknowledged: int = 0, frames: Sequence[Buffer] = ()) -> None:
        self.send_parts(encode(self.sender, sequence, acknowledged, messages, frames))

    def receive(self) -> m.Header | None:
        parts = self.dealer.receive()
        return None if parts is None else decode(parts, RUN)[0]


class RawHub:
    """A hub without links."""

    def __init__(self) -> None:
        self.router = opened(Router(None, MAX_BYTES))
        self.address = self.router.address

    def await_header(self, until: Callable[[m.Header], bool] = lambda header: bool(header.sequence)) -> m.Header:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline:
            self.router.wait(0.05)
            while (received := self.router.receive()) is not None:
                header, _ = decode(received[1], RUN)
                if until(header):
                    return header
        raise AssertionError("no such message came")

    def send(self, sequence: int, *messages: m.Message, acknowledged: int = 0, incarnation: int = 0) -> None:
        parts = encode(Sender(RUN, "hub", incarnation), sequence, acknowledged, messages)
        assert self.router.send(b"producer:0", parts)


@pytest.fixture
def server() -> Server:
    return Network(None, False).server()


@pytest.fixture
def hub() -> RawHub:
    return RawHub()


# -------------------------------------------------------------------------------------------------------- delivery


def frames_of(seed: int, number: int) -> list[bytes]:
    """Frames that both sides can compute. Every 50th message has one that is handed over without a copy."""
    rng = random.Random(seed * 1_000_003 + number)
    sizes = [rng.randrange(300) for _ in range(number % 4)]
    if number % 50 == 0:
        sizes.append(65_536 + rng.randrange(50_000))
    return [rng.randbytes(size) for size in sizes]


def exchange(server: Server, names: list[str], count: int, timing: Timing = FAST) -> None:
    """Every channel sends `count` messages and gets as many; all are compared, with their frames and their order."""
    channels = {name: channel_to(server, name, timing) for name in names}
    down: dict[str, list[Any]] = {name: [] for name in names}
    up: dict[str, list[Any]] = {name: [] for name in names}

    def client(seed: int, name: str) -> None:
        for number in range(count):
            channels[name].send(m.Trained(number), frames=frames_of(seed, number))
        while len(down[name]) < count:
            received = channels[name].receive(1.0)
            if received is not None:
                assert isinstance(received.message, m.Committed)
                down[name].append((received.message.version, [bytes(f) for f in received.frames]))

    threads = [threading.Thread(target=client, args=item, daemon=True) for item in enumerate(names)]
    for thread in threads:
        thread.start()
    answered = dict.fromkeys(names, 0)
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while any(len(up[n]) < count or len(down[n]) < count for n in names):
        assert time.monotonic() < deadline, {n: (len(up[n]), len(down[n])) for n in names}
        for name, message, frames in server.poll(0.005):
            assert isinstance(message, m.Trained)
            up[name].append((message.sequence, [bytes(f) for f in frames]))
            number = answered[name]
            server.send(name, m.Committed(number), frames=frames_of(100 + names.index(name), number))
            answered[name] += 1
        assert not server.tick()
    for thread in threads:
        thread.join(GIVE_UP_SECONDS)
    for seed, name in enumerate(names):
        assert up[name] == [(number, frames_of(seed, number)) for number in range(count)]
        assert down[name] == [(number, frames_of(100 + seed, number)) for number in range(count)]
    serve(server, lambda: server.drained() and all(channel.drained() for channel in channels.values()))
    for channel in channels.values():
        assert close(channel, server)
    assert all(peer.left for peer in server.peers.values())
    assert server.refused == 0


@networks
def test_thousands_of_messages_arrive_once_and_in_order_both_ways(network: Network) -> None:
    server = network.server()
    exchange(server, ["producer:0", "consumer:0"], count=1_000)


def test_a_connection_that_loses_and_repeats_messages_is_made_good(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    send, receive = Router.send, Router.receive
    repeated: list[Any] = []

    def lossy_send(self: Router, peer: bytes, parts: list) -> bool:
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            send(self, peer, parts)
        return True

    def lossy_receive(self: Router) -> Any:
        if repeated and rng.random() < 0.5:
            return repeated.pop()
        received = receive(self)
        if received is not None and rng.random() < 0.1:
            repeated.append(received)
        elif received is not None and rng.random() < 0.1:
            received = receive(self)
        return received

    monkeypatch.setattr(Router, "send", lossy_send)
    monkeypatch.setattr(Router, "receive", lossy_receive)
    monkeypatch.setattr(wire, "_JOINED_BYTES", 0)  # each travels alone
    exchange(server, ["producer:0", "consumer:0"], count=60, timing=FAST._replace(resend_seconds=0.02))
    links = [peer.link for peer in server.peers.values()]
    assert sum(link.duplicates for link in links) > 0
    assert sum(link.gaps for link in links) > 0


@networks
def test_what_is_sent_before_there_is_a_connection_does_not_wait_for_a_resend(network: Network) -> None:
    server = network.server(PATIENT)
    channel = new_channel(server.address, Sender(RUN, "producer:0"), PATIENT)
    for number in range(5):
        channel.send(m.Trained(number))
    channel.start()
    channel.send(m.Trained(5))
    assert [message for _, message, _ in await_messages(server, 6)] == [m.Trained(number) for number in range(6)]
    assert close(channel, server)


def test_several_messages_travel_together(server: Server) -> None:
    channel = channel_to(server)
    channel.send(m.Want(3), m.Groups([]), frames=[b"tensor"])
    arrived = await_messages(server, 2)
    assert [message for _, message, _ in arrived] == [m.Want(3), m.Groups([])]
    assert all([bytes(frame) for frame in frames] == [b"tensor"] for _, _, frames in arrived)
    assert {name for name, _, _ in arrived} == {"producer:0"}
    assert close(channel, server)


def test_routes_get_their_kinds_in_order_and_receive_gets_the_rest(server: Server) -> None:
    channel = new_channel(server.address, Sender(RUN, "consumer:0"), FAST)
    commits = channel.route(m.Committed, m.SnapshotRequest)
    channel.start()
    channel.send(m.Hello(0))
    await_messages(server, 1)
    assert channel.receive() is None
    sent: list[m.Message] = [m.Committed(1), m.Trained(1), m.SnapshotRequest(1), m.Trained(2), m.Committed(2)]
    for message in sent:
        server.send("consumer:0", message)
    serve(server, server.drained)
    routed = [channel.take(commits, GIVE_UP_SECONDS) for _ in range(3)]
    others = [channel.receive(GIVE_UP_SECONDS) for _ in range(2)]
    assert [item.message for item in routed if item] == [sent[0], sent[2], sent[4]]
    assert [item.message for item in others if item] == [sent[1], sent[3]]
    assert channel.take(commits, 0.0) is None
    assert channel.receive() is None
    assert close(channel, server)


def test_a_sequence_out_of_turn_is_not_delivered_and_a_repeated_one_is_acknowledged_again(server: Server) -> None:
    peer = RawPeer(server.address)
    peer.send(2, m.Trained(2))
    peer.send(1, m.Trained(1))
    peer.send(1, m.Trained(1))
    peer.send(2, m.Trained(2))
    assert [message for _, message, _ in await_messages(server, 2)] == [m.Trained(1), m.Trained(2)]
    link = server.peers["producer:0"].link
    assert (link.gaps, link.duplicates) == (1, 1)
    acknowledged: list[int] = []

    def has_acknowledged() -> bool:
        while (header := peer.receive()) is not None:
            acknowledged.append(header.acknowledged)
        return 2 in acknowledged

    assert serve(server, has_acknowledged) == []
    acknowledged.clear()
    peer.send(1, m.Trained(1))
    assert serve(server, has_acknowledged) == []
    assert link.duplicates == 2


def test_poll_returns_at_most_about_as_many_as_it_may(server: Server) -> None:
    peer = RawPeer(server.address)
    for number in range(1, 41):
        peer.send(number, m.Trained(number), m.Goodbye())
    arrived: Arrived = []
    while len(arrived) < 80:
        some = server.poll(1.0, limit=10)
        assert len(some) <= 11
        arrived.extend(some)


# -------------------------------------------------------------------------------------------------------- restarts


@networks
def test_a_restarted_peer_starts_afresh_and_its_earlier_start_is_refused(network: Network) -> None:
    server = network.server()
    old = RawPeer(server.address, incarnation=0)
    old.send(1, m.Trained(1))
    old.send(2, m.Trained(2))
    await_messages(server, 2)
    server.send("producer:0", m.Committed(1))
    server.send("producer:0", m.Committed(2))
    old.dealer.close()

    channel = channel_to(server, incarnation=1)
    channel.send(m.Trained(10))
    assert [(name, message) for name, message, _ in await_messages(server, 1)] == [("producer:0", m.Trained(10))]
    peer = server.peers["producer:0"]
    assert (peer.incarnation, peer.link.received) == (1, 1)
    server.send("producer:0", m.Committed(10))
    serve(server, lambda: server.drained() and channel.drained())
    received = channel.receive(GIVE_UP_SECONDS)
    assert received is not None
    assert received.message == m.Committed(10), "what was for the earlier start is not for this one"
    assert close(channel, server)

    old = RawPeer(server.address, incarnation=0)
    old.send(3, m.Trained(3))
    old.send(0)
    assert serve(server, lambda: server.refused >= 2) == []
    assert "earlier start of producer:0" in server.last_refusal
    assert server.peers["producer:0"].link.received == 2


def test_a_channel_ignores_what_is_for_an_earlier_start_of_it(hub: RawHub) -> None:
    """Numbers and acknowledgements of an old connection would swallow messages of the new one."""
    channel = new_channel(hub.address, Sender(RUN, "producer:0", 1), PATIENT).start()
    channel.send(m.Trained(1))
    hub.await_header()
    hub.send(0, acknowledged=1_000, incarnation=0)
    hub.send(1, m.Committed(1), incarnation=0)
    hub.send(1, m.Committed(2), incarnation=1)
    received = channel.receive(GIVE_UP_SECONDS)
    assert received is not None
    assert received.message == m.Committed(2)
    assert not channel.drained()
    hub.send(2, m.Committed(3), acknowledged=1, incarnation=1)
    assert channel.receive(GIVE_UP_SECONDS) is not None
    assert channel.drained()
    channel.close(0.0)


# ------------------------------------------------------------------------------------------------------- strangers


def test_only_peers_that_the_run_has_are_let_in() -> None:
    server = opened(Server(RUN, None, FAST, MAX_BYTES, expected={"producer:0"}))
    stranger, known = (RawPeer(server.address, name) for name in ("producer:1", "producer:0"))
    stranger.send(1, m.Trained(1))
    assert serve(server, lambda: server.refused == 1) == []
    assert server.last_refusal == "there is no peer 'producer:1' in this run" and not server.peers
    known.send(1, m.Trained(2))
    assert [message for _, message, _ in serve(server, lambda: bool(server.peers))] == [m.Trained(2)]


def test_messages_that_break_the_protocol_are_counted_and_everybody_else_is_served(server: Server) -> None:
    stranger = RawPeer(server.address, "producer:7", run_id="run-2")
    stranger.send(1, m.Trained(1))
    assert serve(server, lambda: server.refused == 1) == []
    assert "another run ('run-2')" in server.last_refusal

    stranger.sender = Sender(RUN, "producer:0")
    stranger.send(1, m.Trained(1))
    assert serve(server, lambda: server.refused == 2) == []
    assert server.last_refusal == "a peer uses another peer's name"

    valid = encode(Sender(RUN, "producer:7"), 1, 0, [m.Trained(1)], [b"frame"])
    garbage: list[list[Buffer]] = [[b""], [b"garbage"], [b"", b"", b""], valid[:1], [*valid[:1], b"fram\x00"]]
    for parts in garbage:
        stranger.send_parts(parts)
    assert serve(server, lambda: server.refused == 2 + len(garbage)) == []
    assert server.peers == {}

    channel = channel_to(server)
    channel.send(m.Trained(1))
    assert [message for _, message, _ in await_messages(server, 1)] == [m.Trained(1)]
    assert close(channel, server)


def test_a_message_above_the_limit_is_never_delivered(server: Server) -> None:
    stranger = RawPeer(server.address, "producer:7")
    stranger.send(1, m.Trained(1))
    await_messages(server, 1)
    stranger.send(2, m.Trained(2), frames=[bytes(MAX_BYTES + 1)])
    channel = channel_to(server)
    for number in range(20):  # enough turns of both sides for the large one to have come
        channel.send(m.Want(number))
        assert [message for _, message, _ in await_messages(server, 1)] == [m.Want(number)]
    assert server.peers["producer:7"].link.received == 1
    assert close(channel, server)


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["ipc", "tcp"])
@pytest.mark.parametrize("kind", ["no key", "own key", "key of another run", "wrong key of the hub"])
def test_nobody_without_the_key_of_the_run_gets_in(host: str | None, kind: str) -> None:
    keys, other = Keys.generate(), Keys.generate()
    server = Network(host, True).server(keys=keys)
    right = server.address
    address = {
        "no key": Address(right.endpoint),
        "own key": Address(right.endpoint, right.server_public, other.client_public, other.client_secret),
        "key of another run": Address(right.endpoint, other.server_public, other.client_public, other.client_secret),
        "wrong key of the hub": Address(
            right.endpoint, other.server_public, right.client_public, right.client_secret
        ),
    }[kind]  # fmt: skip
    intruder = new_channel(address, Sender(RUN, "producer:9"), IMPATIENT).start()
    intruder.send(m.Trained(9))
    channel = channel_to(server)
    channel.send(m.Trained(1))
    lost = threading.Event()

    def wait_for_loss() -> None:
        with pytest.raises(PeerLostError, match="silent"):
            while True:
                intruder.receive(0.1)
        lost.set()

    thread = threading.Thread(target=wait_for_loss, daemon=True)
    thread.start()
    arrived = serve(server, lambda: lost.is_set() and channel.drained())
    assert [(name, message) for name, message, _ in arrived] == [("producer:0", m.Trained(1))]
    assert set(server.peers) == {"producer:0"}
    intruder.close(0.0)
    assert close(channel, server)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "[::]", "", "0", "0x0", "00.0.0.0"])
def test_the_hub_never_listens_on_all_addresses(host: str) -> None:
    before = left_behind()
    with pytest.raises(ProtocolError, match="never on all"):
        Server(RUN, host, FAST, MAX_BYTES)
    assert left_behind() == before


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    before = left_behind()
    with pytest.raises(ResourceError, match=r"cannot listen on 203\.0\.113\.7"):
        Server(RUN, "203.0.113.7", FAST, MAX_BYTES, Keys.generate())
    assert left_behind() == before


def test_the_folder_of_an_ipc_socket_is_private(server: Server) -> None:
    folder = Path(server.address.endpoint.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o077 == 0


def test_keys_are_fresh() -> None:
    first, second = Keys.generate(), Keys.generate()
    assert len({*vars(first).values(), *vars(second).values()}) == 8


# -------------------------------------------------------------------------------------------------------- failures


def assert_everything_raises(channel: Channel, route: Any, match: str) -> None:
    for _ in range(2):
        for call in (
            channel.check,
            channel.receive,
            lambda: channel.receive(GIVE_UP_SECONDS),
            lambda: channel.take(route, 0.0),
            lambda: channel.take(route, GIVE_UP_SECONDS),
            lambda: channel.send(m.Trained(1)),
        ):
            with pytest.raises(PeerLostError, match=match):
                call()


def failing_channel(address: Address, timing: Timing = FAST) -> tuple[Channel, Any]:
    channel = new_channel(address, Sender(RUN, "producer:0"), timing)
    route = channel.route(m.Committed)
    channel.start()
    channel.send(m.Hello(0))
    return channel, route


@networks
def test_abort_makes_every_later_call_raise_and_wakes_who_waits(network: Network) -> None:
    server = network.server()
    channel, route = failing_channel(server.address)
    await_messages(server, 1)
    waiting: list[BaseException] = []

    def wait(source: Any) -> None:
        try:
            while True:
                channel.take(source, 2 * GIVE_UP_SECONDS)
        except PeerLostError as error:
            waiting.append(error)

    threads = [threading.Thread(target=wait, args=(s,), daemon=True) for s in (route, route, channel.route(m.Leases))]
    for thread in threads[:2]:
        thread.start()
    server.send(
        "producer:0", m.Trained(1), m.Committed(1), m.Abort("rank 3 (producer 1) failed: KeyError", reported=True)
    )
    for thread in threads[:2]:
        serve(server, lambda thread=thread: not thread.is_alive())
    assert [str(error) for error in waiting] == ["rank 3 (producer 1) failed: KeyError"] * 2
    assert_everything_raises(channel, route, "rank 3")
    assert ends_in_time(lambda: channel.close(GIVE_UP_SECONDS)) in (True, False)
    assert "channel-producer:0" not in left_behind()[1]


def test_a_hub_that_is_silent_is_noticed(server: Server) -> None:
    channel, route = failing_channel(server.address, IMPATIENT)
    with pytest.raises(PeerLostError, match="silent"):
        for _ in range(2):
            channel.receive(GIVE_UP_SECONDS)
    assert_everything_raises(channel, route, "silent")
    assert ends_in_time(lambda: channel.close(GIVE_UP_SECONDS)) is False


def test_a_hub_that_only_keeps_alive_is_not_silent(server: Server) -> None:
    timing = IMPATIENT._replace(peer_timeout_seconds=1.5)
    channel, _ = failing_channel(server.address, timing)
    deadline = time.monotonic() + 1.5 * timing.peer_timeout_seconds
    serve(server, lambda: time.monotonic() > deadline)
    channel.check()
    assert close(channel, server)


def test_a_peer_that_is_silent_is_named_and_one_that_said_goodbye_is_not() -> None:
    server = Network(None, False).server(IMPATIENT)
    silent, gone = RawPeer(server.address, "producer:0"), RawPeer(server.address, "producer:1")
    silent.send(1, m.Hello(0))
    gone.send(1, m.Hello(1), m.Goodbye())
    await_messages(server, 3)
    channel = channel_to(server, "consumer:0", IMPATIENT)
    channel.send(m.Hello(2))
    await_messages(server, 1)
    lost: dict[str, str] = {}
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not lost and time.monotonic() < deadline:
        server.poll(0.01)
        lost = server.tick()
    assert "producer:0" in lost
    assert "producer:1" not in lost
    assert server.peers["producer:1"].left
    silent.dealer.close()
    gone.dealer.close()
    assert close(channel, server)


@pytest.mark.parametrize("fault", ["garbage", "another run", "corrupt frame"])
def test_a_hub_that_breaks_the_protocol_ends_the_channel(hub: RawHub, fault: str) -> None:
    channel, route = failing_channel(hub.address)
    hub.await_header()
    parts: dict[str, list[Buffer]] = {
        "garbage": [b"garbage"],
        "another run": encode(Sender("run-2", "hub"), 1, 0, [m.Trained(1)]),
        "corrupt frame": [*encode(Sender(RUN, "hub"), 1, 0, [m.Trained(1)], [b"frame"])[:1], b"fram\x00"],
    }
    assert hub.router.send(b"producer:0", parts[fault])
    with pytest.raises(PeerLostError, match="broken down: "):
        for _ in range(2):
            channel.receive(GIVE_UP_SECONDS)
    assert_everything_raises(channel, route, "broken down: ")
    assert ends_in_time(lambda: channel.close(GIVE_UP_SECONDS)) is False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_even_connect_leaves_nobody_waiting() -> None:
    channel = new_channel(Address("nonsense://"), Sender(RUN, "producer:0"), FAST)
    route = channel.route(m.Committed)
    ends_in_time(channel.start)
    assert_everything_raises(channel, route, "broken down")
    assert ends_in_time(lambda: channel.close(GIVE_UP_SECONDS)) is True, "nothing was sent"


# ------------------------------------------------------------------------------------------------------ the end


def left_behind() -> tuple[int, set[str]]:
    """Open descriptors, and threads by name."""
    return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}


@networks
def test_close_waits_for_acknowledgements(network: Network) -> None:
    server = network.server()
    channel = channel_to(server)
    for number in range(500):
        channel.send(m.Trained(number), frames=[b"x" * 100])
    arrived: Arrived = []
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(channel.close(GIVE_UP_SECONDS)))
    thread.start()
    serve_into(server, arrived, lambda: not thread.is_alive())
    assert results == [True]
    assert [message for _, message, _ in arrived] == [*(m.Trained(number) for number in range(500)), m.Goodbye()]
    assert server.peers["producer:0"].left
    assert server.drained()


@networks
def test_the_last_acknowledgement_leaves_before_the_hub_does(network: Network) -> None:
    server = network.server(PATIENT)
    channel = channel_to(server, timing=PATIENT)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(channel.close(GIVE_UP_SECONDS)))
    thread.start()
    serve(server, lambda: all(p.left for p in server.peers.values()) and bool(server.peers))
    server.tick()
    server.close()
    thread.join(GIVE_UP_SECONDS)
    assert results == [True]


@networks
def test_closing_against_a_dead_hub_ends(network: Network) -> None:
    server = network.server()
    channel = channel_to(server)
    channel.send(m.Hello(0))
    await_messages(server, 1)
    server.close()
    channel.send(m.Trained(1), frames=[bytes(100_000)])
    assert ends_in_time(lambda: channel.close(0.3)) is False
    assert "channel-producer:0" not in left_behind()[1]


def test_closing_a_channel_that_never_ran_ends(server: Server) -> None:
    channel = new_channel(server.address, Sender(RUN, "producer:0"), FAST)
    channel.send(m.Hello(0))
    assert ends_in_time(lambda: channel.close(GIVE_UP_SECONDS)) is False


@networks
def test_nothing_is_left_behind(network: Network) -> None:
    network.server().close()  # what the libraries open once and keep
    before = left_behind()
    server = network.server()
    path = Path(server.address.endpoint.removeprefix("ipc://"))
    assert network.host is not None or path.is_socket()
    channels = [channel_to(server, f"producer:{number}") for number in range(3)]
    for channel in channels:
        channel.send(m.Hello(0))
    await_messages(server, 3)
    for channel in channels:
        assert close(channel, server)
    server.close()
    assert left_behind() == before
    assert network.host is not None or not path.parent.exists()


def test_waking_a_closed_socket_writes_into_nobody_elses_file(server: Server, tmp_path: Path) -> None:
    """The numbers of its descriptors belong to the next files that are opened."""
    dealer = opened(Dealer(server.address, b"producer:0", MAX_BYTES))
    dealer.wake()
    dealer.close()
    files = [(tmp_path / str(number)).open("wb") for number in range(32)]
    dealer.wake()
    dealer.close()
    for file in files:
        file.close()  # fails if its descriptor was closed by the second `close`
        assert Path(file.name).stat().st_size == 0


def test_wake_ends_a_wait_from_another_thread(server: Server) -> None:
    dealer = opened(Dealer(server.address, b"producer:0", MAX_BYTES))
    waiter = threading.Thread(target=dealer.wait, args=(10 * GIVE_UP_SECONDS,), daemon=True)
    waiter.start()
    for _ in range(100_000):  # far more than the pipe holds; none of them blocks
        dealer.wake()
    waiter.join(GIVE_UP_SECONDS)
    assert not waiter.is_alive()
    dealer.close()
