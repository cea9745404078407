"""The hub's side of all connections: one ROUTER, one link per peer, liveness. Used from one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from zbgrpo import failpoints
from zbgrpo.errors import ProtocolError
from zbgrpo.transport.channel import ACKNOWLEDGE_SECONDS, GONE_SECONDS, TURN_SECONDS, Timing
from zbgrpo.transport.lane import LaneReceiver, lane_or_none
from zbgrpo.transport.link import Link
from zbgrpo.transport.messages import Goodbye, Hello, Lane, LaneOpen, Message, Progress
from zbgrpo.transport.sockets import Keys, Router
from zbgrpo.transport.wire import Buffer, Item, Sender, decode_frames, decode_header, encode, together, with_frames

_LINGER_SECONDS = 1.0
_SUSPICION_SECONDS = 1.0  # without a connection, when somebody is known to be gone


@dataclass
class Peer:
    """What the hub knows of one connection."""

    name: str
    incarnation: int
    link: Link[list[Buffer]]
    heard: float
    alive: float
    introduced: bool = False
    """Whether it has said hello. Before that it loads its model, and may be silent for longer."""
    left: bool = False
    outbox: deque[Item] = field(default_factory=deque)
    """What is to be sent at the end of the turn."""
    unreachable_since: float | None = None
    """Since when there is no connection."""
    progress: Progress | None = None
    progress_at: float = 0.0
    owes_since: float | None = None
    """When an acknowledgement that is not sent yet became due."""
    asked: tuple[float, ...] = ()
    """When its last question for the time was sent, by its clock, and received, by ours; empty once it is answered."""
    lane: LaneReceiver | None = None


class Server:
    """See the module's text. Peers are named by themselves (`producer:0`, `consumer:1`, `reader:1`, `relay:2`)."""

    def __init__(
        self,
        run_id: str,
        host: str | None,
        timing: Timing,
        max_message_bytes: int,
        keys: Keys | None = None,
        expected: Collection[str] | None = None,
    ) -> None:
        """`expected`: names of all peers that there are; messages under any other are refused. None: any name."""
        self._expected = expected
        self._sender = Sender(run_id, "hub")
        self._timing = timing
        self._router = Router(host, max_message_bytes, keys)
        self.address = self._router.address
        self._is_local = host is None
        self.peers: dict[str, Peer] = {}
        self._owes = False
        self.refused = 0
        """Messages that broke the protocol: counted and dropped."""
        self.last_refusal = ""
        self.suspicious = False
        """Whether somebody is known to be gone: who has no connection is named soon."""

    def poll(self, timeout_seconds: float, limit: int = 256) -> list[tuple[str, Message, Sequence[memoryview]]]:
        """Messages that have arrived, in order per peer: at most about `limit`, after waiting for the first."""
        arrived: list[tuple[str, Message, Sequence[memoryview]]] = []
        self.flush()
        if not self._router.wait(min(timeout_seconds, ACKNOWLEDGE_SECONDS) if self._owes else timeout_seconds):
            return arrived
        until = time.monotonic() + TURN_SECONDS
        while len(arrived) < limit and (received := self._router.receive()) is not None:
            name, parts = received
            parts[-1] = memoryview(failpoints.damaged("wire.receive", parts[-1]))
            try:
                arrived.extend(self._accept(name, parts))
            except ProtocolError as error:
                self.refused += 1
                self.last_refusal = str(error)
            if time.monotonic() > until:
                break
        return arrived

    def _accept(self, name: bytes, parts: list[memoryview]) -> list[tuple[str, Message, Sequence[memoryview]]]:
        header = decode_header(parts, self._sender.run_id)
        if header.sender.encode() != name:
            raise ProtocolError("a peer uses another peer's name")
        if self._expected is not None and header.sender not in self._expected:
            raise ProtocolError(f"there is no peer {header.sender[:64]!r} in this run")
        now = time.monotonic()
        peer = self.peers.get(header.sender)
        if peer is not None and header.incarnation < peer.incarnation:
            raise ProtocolError(f"message of an earlier start of {header.sender}")
        frames: list[memoryview] = []
        if peer is None or header.incarnation > peer.incarnation:
            frames = decode_frames(header, parts)
            self._close_lane(peer)
            peer = Peer(header.sender, header.incarnation, Link(self._timing.resend_seconds), now, now)
            self.peers[header.sender] = peer
        elif peer.link.expects(header.sequence):
            # One that has come before is not looked at again: its frames may have left the lane.
            frames = decode_frames(header, parts, None if peer.lane is None else peer.lane.frames)
        peer.heard, peer.unreachable_since = now, None
        peer.link.acknowledged(header.acknowledged, now)
        if len(header.times) == 1:
            peer.asked = (header.times[0], now)
        if header.sequence == 0:
            for message in header.messages:
                if isinstance(message, Progress):
                    peer.progress, peer.progress_at = message, now
            return []
        if not peer.link.accept(header.sequence):
            return []
        peer.introduced = peer.introduced or any(isinstance(m, Hello) for m in header.messages)
        peer.left = peer.left or any(isinstance(m, Goodbye) for m in header.messages)
        arrived: list[tuple[str, Message, Sequence[memoryview]]] = []
        for message, own_frames in with_frames(header, frames):
            if isinstance(message, Lane):
                self._open_lane(peer, message)
            else:
                arrived.append((peer.name, message, own_frames))
        return arrived

    def _open_lane(self, peer: Peer, offered: Lane) -> None:
        """Only what comes through a socket of this user's own folder names files of this machine."""
        if peer.lane is None and self._is_local:
            peer.lane = lane_or_none(partial(LaneReceiver, offered))
            if peer.lane is not None:
                peer.outbox.append(Item([LaneOpen()], ()))

    def _close_lane(self, peer: Peer | None) -> None:
        if peer is not None and peer.lane is not None:
            peer.lane.close()
            peer.lane = None

    def send(self, name: str, *messages: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send to a peer that has said hello, at the end of the turn; sent again until it acknowledges."""
        self.peers[name].outbox.append(Item(list(messages), frames))

    def flush(self) -> None:
        """Put what waits on its way. `poll`, `tick` and `drained` do it, so that it waits for a turn at most."""
        for peer in self.peers.values():
            while peer.outbox:
                number, item = together(peer.outbox)
                parts = encode(self._to(peer), peer.link.next_sequence, peer.link.received, *item)
                for _ in range(number):
                    peer.outbox.popleft()
                peer.link.sent(parts, time.monotonic())
                self._transmit(peer, parts)

    def tick(self) -> dict[str, str]:
        """Acknowledge, resend, keep alive. Names of peers that are lost: gone, silent for too long, or stuck, with what
        is to be said of them."""
        self.flush()
        now, lost = time.monotonic(), {}
        self._owes = False
        for peer in self.peers.values():
            owes = peer.link.must_acknowledge
            if peer.left and not owes:
                continue
            if owes and peer.owes_since is None:
                peer.owes_since = now
            late = owes and (peer.left or now - (peer.owes_since or now) >= ACKNOWLEDGE_SECONDS)
            if late or self.suspicious or now - peer.alive >= self._timing.heartbeat_seconds:
                peer.link.must_acknowledge, peer.alive = False, now
                self._keep_alive(peer)
            if not peer.link.must_acknowledge:
                peer.owes_since = None
            else:
                self._owes = True
            for item in peer.link.due(now):
                self._transmit(peer, item)
            if not peer.left and (reason := self._loss(peer, now)) is not None:
                lost[peer.name] = reason
        return lost or self._stuck(now)

    def _transmit(self, peer: Peer, parts: list[Buffer]) -> bool:
        """Whether there is a connection to the peer."""
        if self._router.send(peer.name.encode(), parts):
            peer.unreachable_since = None
        elif peer.unreachable_since is None:
            peer.unreachable_since = time.monotonic()
        return peer.unreachable_since is None

    def _loss(self, peer: Peer, now: float) -> str | None:
        timeout, since = self._timing.peer_timeout_seconds, peer.unreachable_since
        limit = _SUSPICION_SECONDS if self.suspicious else min(GONE_SECONDS, timeout)
        if since is not None and now - since > limit:
            return f"is gone or stopped: it has had no connection for {now - since:.0f} s"
        if peer.introduced and now - peer.heard > timeout:
            return f"has been silent for {timeout:.0f} s"
        return None

    def _stuck(self, now: float) -> dict[str, str]:
        """The peer whose main loop has not made a turn for too long. Others may wait for it in a collective, and so be
        quiet for as long; the one to name is one that waits for nobody."""
        quiet = [
            (not peer.progress.waiting, peer.progress.quiet_seconds + now - peer.progress_at, peer)
            for peer in self.peers.values()
            if peer.progress is not None and not peer.left
        ]
        limit = self._timing.progress_timeout_seconds
        if not any(seconds > limit for _, seconds, _ in quiet):
            return {}
        _, seconds, peer = max((item for item in quiet if item[1] > limit / 2), key=lambda item: item[:2])
        assert peer.progress is not None
        return {peer.name: f"has not gone on for {seconds:.0f} s (in {peer.progress.doing})"}

    def _to(self, peer: Peer) -> Sender:
        # The peer's own incarnation: what is still on its way to an earlier start must not be taken by a later one.
        return self._sender._replace(incarnation=peer.incarnation)

    def drained(self) -> bool:
        """Whether every peer has acknowledged everything, or has left, or cannot be reached."""
        self.flush()
        return all(
            peer.left or peer.unreachable_since is not None or not peer.link.num_unacknowledged
            for peer in self.peers.values()
        )

    def close(self) -> None:
        """Close the socket when those who have left have closed theirs, or after a second.

        They close when their goodbye is acknowledged. A connection that breaks takes unread messages with it, so a hub
        that closed first would make them wait for that acknowledgement in vain.
        """
        if self._router.closed:
            return
        deadline = time.monotonic() + _LINGER_SECONDS
        leaving = [peer for peer in self.peers.values() if peer.left]
        while leaving and time.monotonic() < deadline:
            self.poll(0.005)
            leaving = [peer for peer in leaving if self._keep_alive(peer)]
        self._router.close(_LINGER_SECONDS)
        for peer in self.peers.values():
            self._close_lane(peer)

    def _keep_alive(self, peer: Peer) -> bool:
        """Acknowledge what has arrived, answer what time it is; whether the peer is still connected."""
        times = (*peer.asked, time.monotonic()) if peer.asked else ()
        peer.asked = ()
        return self._transmit(peer, encode(self._to(peer), 0, peer.link.received, [], times=times))
