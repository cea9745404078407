"""The hub's side of all connections: one ROUTER, one link per peer, liveness. Used from one thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from zbgrpo import failpoints
from zbgrpo.errors import ProtocolError
from zbgrpo.transport.channel import ACKNOWLEDGE_SECONDS, Timing
from zbgrpo.transport.link import Link
from zbgrpo.transport.messages import Goodbye, Message
from zbgrpo.transport.sockets import Keys, Router
from zbgrpo.transport.wire import Buffer, Sender, decode, encode

_LINGER_SECONDS = 1.0


@dataclass
class Peer:
    """What the hub knows of one connection."""

    name: str
    incarnation: int
    link: Link[list[Buffer]]
    heard: float
    alive: float
    left: bool = False
    owes_since: float | None = None
    """When an acknowledgement that is not sent yet became due."""
    asked: tuple[float, ...] = ()
    """When its last question for the time was sent, by its clock, and received, by ours; empty once it is answered."""


class Server:
    """See the module's text. Peers are named by themselves (`producer:0`, `consumer:1`, `reader:1`, `relay:2`)."""

    def __init__(
        self, run_id: str, host: str | None, timing: Timing, max_message_bytes: int, keys: Keys | None = None
    ) -> None:
        self._sender = Sender(run_id, "hub")
        self._timing = timing
        self._router = Router(host, max_message_bytes, keys)
        self.address = self._router.address
        self.peers: dict[str, Peer] = {}
        self._owes = False
        self.refused = 0
        """Messages that broke the protocol: counted and dropped."""
        self.last_refusal = ""

    def poll(self, timeout_seconds: float, limit: int = 256) -> list[tuple[str, Message, list[memoryview]]]:
        """Messages that have arrived, in order per peer: at most about `limit`, after waiting for the first."""
        arrived: list[tuple[str, Message, list[memoryview]]] = []
        if not self._router.wait(min(timeout_seconds, ACKNOWLEDGE_SECONDS) if self._owes else timeout_seconds):
            return arrived
        while len(arrived) < limit and (received := self._router.receive()) is not None:
            name, parts = received
            parts[-1] = memoryview(failpoints.damaged("wire.receive", parts[-1]))
            try:
                arrived.extend(self._accept(name, parts))
            except ProtocolError as error:
                self.refused += 1
                self.last_refusal = str(error)
        return arrived

    def _accept(self, name: bytes, parts: list[memoryview]) -> list[tuple[str, Message, list[memoryview]]]:
        header, frames = decode(parts, self._sender.run_id)
        if header.sender.encode() != name:
            raise ProtocolError("a peer uses another peer's name")
        now = time.monotonic()
        peer = self.peers.get(header.sender)
        if peer is None or header.incarnation > peer.incarnation:
            peer = Peer(header.sender, header.incarnation, Link(self._timing.resend_seconds), now, now)
            self.peers[header.sender] = peer
        elif header.incarnation < peer.incarnation:
            raise ProtocolError(f"message of an earlier start of {header.sender}")
        peer.heard = now
        peer.link.acknowledged(header.acknowledged, now)
        if len(header.times) == 1:
            peer.asked = (header.times[0], now)
        if header.sequence == 0 or not peer.link.accept(header.sequence):
            return []
        peer.left = peer.left or any(isinstance(m, Goodbye) for m in header.messages)
        return [(peer.name, message, frames) for message in header.messages]

    def send(self, name: str, *messages: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send to a peer that has said hello; sent again until it acknowledges."""
        peer = self.peers[name]
        parts = encode(self._to(peer), peer.link.next_sequence, peer.link.received, messages, frames)
        peer.link.sent(parts, time.monotonic())
        self._router.send(name.encode(), parts)

    def tick(self) -> list[str]:
        """Acknowledge, resend, keep alive; names of peers that have been silent for too long."""
        now, lost = time.monotonic(), []
        self._owes = False
        for peer in self.peers.values():
            owes = peer.link.must_acknowledge
            if peer.left and not owes:
                continue
            if owes and peer.owes_since is None:
                peer.owes_since = now
            late = owes and (peer.left or now - (peer.owes_since or now) >= ACKNOWLEDGE_SECONDS)
            if late or now - peer.alive >= self._timing.heartbeat_seconds:
                peer.link.must_acknowledge, peer.alive = False, now
                self._keep_alive(peer)
            if not peer.link.must_acknowledge:
                peer.owes_since = None
            else:
                self._owes = True
            for item in peer.link.due(now):
                self._router.send(peer.name.encode(), item)
            if not peer.left and now - peer.heard > self._timing.peer_timeout_seconds:
                lost.append(peer.name)
        return lost

    def _to(self, peer: Peer) -> Sender:
        # The peer's own incarnation: what is still on its way to an earlier start must not be taken by a later one.
        return self._sender._replace(incarnation=peer.incarnation)

    def drained(self) -> bool:
        """Whether every peer has acknowledged everything, or has left."""
        return all(peer.left or not peer.link.num_unacknowledged for peer in self.peers.values())

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

    def _keep_alive(self, peer: Peer) -> bool:
        """Acknowledge what has arrived, answer what time it is; whether the peer is still connected."""
        times = (*peer.asked, time.monotonic()) if peer.asked else ()
        peer.asked = ()
        return self._router.send(peer.name.encode(), encode(self._to(peer), 0, peer.link.received, [], times=times))
