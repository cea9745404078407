"""What the hub does with the bytes of groups, and nothing else: the hub's sockets, plan publisher and ring.

It gives leases to one producer, a bounded number at a time, makes a TRAIN entry of every message, and ends with the
last row. There is no ledger and no log; what these cost is what `zbgrpo bench hub` measures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zbgrpo.engine.hub_process import child_main
from zbgrpo.engine.hub_spec import HubSpec
from zbgrpo.errors import PeerLostError
from zbgrpo.ledger.records import Lease, PlanEntry, PlanKind
from zbgrpo.transport import messages as m
from zbgrpo.transport.plan_stream import PlanPublisher, StoredGroup
from zbgrpo.transport.ring import RingWriter
from zbgrpo.transport.server import Server
from zbgrpo.transport.wire import check_frames

_TURN_SECONDS = 0.1
_PRODUCER, _READER, _CONSUMER = "producer:0", "reader:0", "consumer:0"


class Forwarder:
    """One producer, one reader. A group is under way from its lease until its reader has released it."""

    def __init__(self, spec: HubSpec, server: Server, ring: RingWriter) -> None:
        self._server, self._ring, self._limit = server, ring, spec.leases_per_producer
        self._batch, self._num_rows = spec.groups_per_minibatch, spec.num_rows
        self._publisher = PlanPublisher(ring, {_READER: 0}, self._send_plan)
        self._groups_in: dict[int, int] = {}
        """Their number by ring record."""
        self._leased = self._planned = self._released = self._sequence = 0
        self._ended = False

    def run(self) -> int:
        """Until everybody has left."""
        peers = self._server.peers
        while not (self._ended and all(peer.left for peer in peers.values())):
            for name, message, frames in self._server.poll(_TURN_SECONDS):
                self._handle(name, message, frames)
            if {_PRODUCER, _READER, _CONSUMER} <= peers.keys():
                self._ring.unlink()
                self._grant()
            for name, loss in self._server.tick().items():
                raise PeerLostError(f"{name} {loss}")
        return 0

    def _handle(self, name: str, message: m.Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, m.Groups):
            check_frames(message.groups, frames)
            stored = {h.lease_id: StoredGroup(h, frame) for h, frame in zip(message.groups, frames, strict=True)}
            self._publish(PlanKind.TRAIN, stored)
            self._planned += len(stored)
            if self._planned == self._num_rows:
                self._publish(PlanKind.END, {})
        elif isinstance(message, m.Release):
            self._publisher.released(name, message.sequence)
            self._released += self._groups_in.pop(message.sequence)
        elif isinstance(message, m.BroadcastsDone):
            self._ended = True
            self._server.send(_PRODUCER, m.Finished("end"))

    def _send_plan(self, name: str, message: m.Message) -> None:
        assert isinstance(message, m.PlanFor)
        if message.record is not None:
            self._groups_in[message.record.sequence] = len(message.groups)
        self._server.send(name, message)

    def _publish(self, kind: PlanKind, stored: dict[int, StoredGroup]) -> None:
        entry = PlanEntry(self._sequence, kind, 0, ranks=[list(stored)] if stored else [])
        self._sequence += 1
        self._publisher.publish(entry, stored)

    def _grant(self) -> None:
        room = min(self._limit - (self._leased - self._released), self._num_rows - self._leased)
        room -= room % self._batch
        if room > 0:
            first, self._leased = self._leased, self._leased + room
            self._server.send(_PRODUCER, m.Leases([Lease(n, 0, n, 0) for n in range(first, first + room)]))


def main() -> int:
    """Entry of the child process."""
    return child_main(lambda spec, server, ring: Forwarder(spec, server, ring).run())


if __name__ == "__main__":
    sys.exit(main())
