"""Lanes: what their states and invariant say, over real sockets and memory, and that nothing else can be opened."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbgrpo import failpoints
from zbgrpo.errors import ProtocolError
from zbgrpo.transport import lane, wire
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.lane import LaneReceiver, LaneSender, lane_or_none
from zbgrpo.transport.ring import Descriptor, RingWriter
from zbgrpo.transport.server import Server
from zbgrpo.transport.wire import Sender

RUN = "run-1"
TIMING = Timing(heartbeat_seconds=0.05, peer_timeout_seconds=60.0, resend_seconds=0.2)
LONG_BYTES = 20_000
GIVE_UP_SECONDS = 60.0
FIRST = b"first"

Arrived = list[tuple[str, m.Message, list[bytes]]]


class Ends:
    """A server, and channels to it; the server runs in this thread."""

    def __init__(self, host: str | None = None) -> None:
        self.server = Server(RUN, host, TIMING, 1 << 26)
        self.channels: list[Channel] = []
        self.arrived: Arrived = []

    def channel(self, incarnation: int = 0) -> Channel:
        sender = Sender(RUN, "producer:0", incarnation)
        channel = Channel(self.server.address, sender, TIMING, 1 << 26).start()
        self.channels.append(channel)
        channel.send(m.Hello(0))
        return channel

    def serve(self, until: Callable[[], Any]) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not until():
            assert time.monotonic() < deadline, f"gave up; {self.server.refused}, {self.server.last_refusal}"
            for name, message, frames in self.server.poll(0.005):
                self.arrived.append((name, message, [bytes(frame) for frame in frames]))
            self.server.tick()

    def with_lane(self, incarnation: int = 0) -> Channel:
        """A channel whose lane is open: it has sent a group, which came as a part."""
        channel = self.channel(incarnation)
        send(channel, FIRST)
        self.serve(lambda: channel._lane is not None and channel._lane._is_open and channel.drained())
        assert self.arrived.pop()[2] == [FIRST]
        return channel

    def groups(self) -> list[bytes]:
        """The frames of all groups that have arrived, in order."""
        return [frame for _, message, frames in self.arrived if isinstance(message, m.Groups) for frame in frames]

    def close(self) -> None:
        for channel in self.channels:
            channel.close(0.0)
        self.server.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    failpoints.arm("", "")
    made.close()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts, its header included, each message with frames or a record had, behind that of `with_lane`."""
    seen: list[int] = []
    original = wire.encode

    def counting(*args: Any, **options: Any) -> list[wire.Buffer]:
        encoded = original(*args, **options)
        if len(args) > 4 and len(args[4]) and args[4][0] != FIRST:
            seen.append(len(encoded))
        return encoded

    monkeypatch.setattr("zbgrpo.transport.channel.encode", counting)
    return seen


def frame(number: int, num_bytes: int = LONG_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(num_bytes)


def send(channel: Channel, *frames: bytes) -> None:
    headers = [m.GroupHeader(1, 0, 0, 0, 1, 0, 0, wire.payload_crc(one), []) for one in frames]
    channel.send(m.Groups(headers), frames=list(frames))


def ring_of(channel: Channel) -> RingWriter:
    assert channel._lane is not None
    return channel._lane._ring


# ------------------------------------------------------------------------------------------ states


def test_frames_come_through_an_open_lane_whose_room_comes_back(ends: Ends, parts: list[int]) -> None:
    channel = ends.with_lane()
    sent = [frame(number) for number in range(8)]
    for number in range(0, 8, 2):
        send(channel, *sent[number : number + 2])
    ends.serve(lambda: len(ends.groups()) == 8 and channel.drained())
    assert ends.groups() == sent
    assert set(parts) == {1}, "nothing but headers came through the socket"
    assert ring_of(channel).used_bytes == 0 and not channel._lane._placed  # type: ignore[union-attr]
    assert [type(message) for _, message, _ in ends.arrived[:1]] == [m.Hello], "the offer is not for the hub"


def test_before_it_is_open_frames_are_parts(ends: Ends, parts: list[int]) -> None:
    channel = ends.channel()
    send(channel, frame(0))
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not parts and time.monotonic() < deadline:  # sent while nobody serves, so not answered yet
        time.sleep(0.001)
    ends.serve(lambda: ends.groups() and channel.drained())
    assert set(parts) == {2} and ends.groups() == [frame(0)]


@pytest.mark.parametrize("num_bytes", [0, 1, lane._MIN_BYTES - 1, lane._LANE_BYTES // 2 + 1])
def test_what_is_small_or_too_large_is_a_part(ends: Ends, parts: list[int], num_bytes: int) -> None:
    channel = ends.with_lane()
    send(channel, frame(0, num_bytes))
    ends.serve(ends.groups)
    assert parts == [2] and ends.groups() == [frame(0, num_bytes)]


def test_where_it_has_no_room_frames_are_parts_and_all_stay_in_order(ends: Ends, parts: list[int]) -> None:
    channel = ends.with_lane()
    sent = [frame(number, 3 << 20) for number in range(16)]  # more than it holds
    for one in sent:
        send(channel, one)
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while len(parts) < len(sent) and time.monotonic() < deadline:  # nobody takes anything meanwhile
        time.sleep(0.001)
    assert parts == [1] * 10 + [2] * 6
    ends.serve(lambda: len(ends.groups()) == len(sent))
    assert ends.groups() == sent


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.EPERM])
def test_without_memory_or_a_descriptor_for_it_groups_come_all_the_same(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    tried: list[object] = []

    def fail(*arguments: object) -> int:
        tried.append(arguments)
        raise OSError(number, os.strerror(number))

    channel = ends.channel()
    monkeypatch.setattr(os, call, fail)
    send(channel, frame(0))
    ends.serve(lambda: ends.groups() and channel.drained())
    assert tried and channel._lane is None and ends.groups() == [frame(0)]


def test_who_sends_no_frames_has_no_lane(ends: Ends) -> None:
    channel = ends.channel()
    channel.send(m.Trained(1))
    ends.serve(lambda: len(ends.arrived) == 2 and channel.drained())
    assert channel._lane is None and ends.server.peers["producer:0"].lane is None


def test_over_tcp_there_is_no_lane() -> None:
    ends = Ends("127.0.0.1")
    channel = ends.channel()
    send(channel, frame(0))
    ends.serve(lambda: ends.groups() and channel.drained())
    assert channel._lane is None
    ends.close()


def test_a_server_on_tcp_opens_no_file_that_it_is_told_of() -> None:
    ends, ring = Ends("127.0.0.1"), RingWriter.create_anonymous("x", 1 << 20)
    channel = ends.channel()
    channel.send(m.Lane(ring.path, ring.capacity_bytes))
    ends.serve(channel.drained)
    assert ends.server.peers["producer:0"].lane is None
    ends.close()
    ring.close()


def test_another_start_of_the_peer_has_another_lane(ends: Ends) -> None:
    first = ends.with_lane()
    send(first, frame(0))
    ends.serve(ends.groups)
    first.close(0.0)
    second = ends.with_lane(incarnation=1)
    send(second, frame(1))
    ends.serve(lambda: len(ends.groups()) == 2 and second.drained())
    assert ends.groups() == [frame(0), frame(1)]


# ------------------------------------------------------------------------------------------ the invariant


def test_a_message_that_is_sent_again_has_the_same_record(ends: Ends, parts: list[int]) -> None:
    channel = ends.with_lane()
    failpoints.arm("wire.receive=corrupt", "hub")
    sent = [frame(number) for number in range(3)]
    for one in sent:
        send(channel, one)
    ends.serve(lambda: len(ends.groups()) == 3 and channel.drained())
    assert ends.server.refused >= 1, "the first one was"
    assert ends.groups() == sent and set(parts) == {1}


def test_a_duplicate_is_not_looked_for_in_the_lane(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames may have left the lane, and others lie there."""
    channel = ends.with_lane()
    kept: list[list[Any]] = []
    sent = channel._link.sent
    monkeypatch.setattr(channel._link, "sent", lambda item, now: (kept.append(item), sent(item, now)))
    send(channel, frame(0))
    ends.serve(lambda: ends.groups() and channel.drained())
    message = next(parts for parts in kept if wire.decode_header(parts, RUN).record is not None)
    send(channel, frame(1))
    ends.serve(lambda: len(ends.groups()) == 2 and channel.drained())
    before = ends.server.peers["producer:0"].link.duplicates
    late = [message]
    monkeypatch.setattr(channel._link, "due", lambda now: [late.pop()] if late else [])
    ends.serve(lambda: ends.server.peers["producer:0"].link.duplicates > before)
    assert ends.server.refused == 0 and ends.groups() == [frame(0), frame(1)]


def test_what_changes_in_the_lane_is_refused(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = ends.with_lane()
    original = LaneSender.place

    def spoiled(self: LaneSender, message: int, frames: Any) -> Descriptor | None:
        record = original(self, message, frames)
        assert record is not None
        self._ring._view[64 + record.offset + 64 + 5_000] ^= 1
        return record

    monkeypatch.setattr(LaneSender, "place", spoiled)
    send(channel, frame(0))
    ends.serve(lambda: ends.server.refused)
    assert ends.groups() == [] and "corrupt" in ends.server.last_refusal


def test_a_record_of_a_peer_without_a_lane_is_refused() -> None:
    one = frame(0)
    record = Descriptor(0, 0, 64 + 20_032)
    encoded = wire.encode(Sender(RUN, "producer:0"), 1, 0, [m.Groups([])], [one], record=record)
    assert len(encoded) == 1
    with pytest.raises(ProtocolError, match="has no lane"):
        wire.decode(encoded, RUN)


# ------------------------------------------------------------------------------------------ its memory


def test_nothing_but_a_lane_can_be_opened(tmp_path: Path) -> None:
    ring = RingWriter.create_anonymous("lane", 4096)
    LaneReceiver(m.Lane(ring.path, 4096)).close()
    (tmp_path / "file").write_bytes(os.pread(int(ring.path.rpartition("/")[2]), 4096 + 64, 0))
    os.mkfifo(tmp_path / "fifo")
    for path, capacity in (
        (ring.path, 8192),  # of another size
        (ring.path, -64),
        (str(tmp_path / "file"), 4096),  # whose size can be changed: reading it could end this process
        (str(tmp_path / "fifo"), 4096),
        (str(tmp_path), 4096),
        (str(tmp_path / "missing"), 4096),
        ("\0", 4096),
        ("/dev/zero", 4096),
    ):
        assert lane_or_none(partial(LaneReceiver, m.Lane(path, capacity))) is None, path
    ring.close()
    assert lane_or_none(partial(LaneReceiver, m.Lane(ring.path, 4096))) is None, "nobody can after the hub has"


def test_its_size_cannot_be_changed() -> None:
    ring = RingWriter.create_anonymous("lane", 4096)
    descriptor = int(ring.path.rpartition("/")[2])
    for num_bytes in (64, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, num_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    ring.close()


def test_nothing_is_left_of_it(ends: Ends) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("zbgrpo-lane")
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return maps, sum("zbgrpo-lane" in link for link in links)

    channel = ends.with_lane()
    assert held() == (2, 2), "both ends have mapped it, and each mapping has a descriptor; no other is open"
    send(channel, frame(0))
    ends.serve(lambda: ends.groups() and channel.drained())
    ends.close()
    assert held() == (0, 0)
