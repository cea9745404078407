"""The relay of a further consumer node: takes that node's plan from the hub and feeds it through its own ring."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

from zbgrpo.engine.hub_process import address_of, child_main, title_of
from zbgrpo.engine.hub_spec import HubSpec
from zbgrpo.errors import PeerLostError
from zbgrpo.ledger.records import PlanKind
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel
from zbgrpo.transport.plan_stream import PlanPublisher, StoredGroup
from zbgrpo.transport.ring import RingWriter
from zbgrpo.transport.server import Server
from zbgrpo.transport.wire import Sender, check_frames

_TURN_SECONDS = 0.02


def run(spec: HubSpec, server: Server, ring: RingWriter) -> int:
    """Serve the local readers until the plan has ended and they have left.

    What goes wrong is told to the hub here; to the local readers by the caller, who catches it.
    """
    assert spec.hub_address is not None
    sender = Sender(spec.run_id, f"relay:{spec.node}")
    channel = Channel(address_of(spec.hub_address), sender, spec.timing, spec.max_message_bytes)
    channel.start()
    with contextlib.ExitStack() as stack:
        stack.push(partial(_leave, spec, channel))
        channel.send(m.Hello(rank=-1, node=spec.node))
        _serve(spec, server, ring, channel)
    return 0


def _serve(spec: HubSpec, server: Server, ring: RingWriter, channel: Channel) -> None:
    local = {reader.name: reader.dp_index for reader in spec.readers if reader.node == spec.node}
    publisher = PlanPublisher(ring, local, server.send)
    attached: set[str] = set()
    ended = False
    while not (ended and all(peer.left for peer in server.peers.values())):
        for name, message, _ in server.poll(_TURN_SECONDS):
            if isinstance(message, m.Hello):
                attached.add(name)
                if attached == set(local):
                    ring.unlink()
            elif isinstance(message, m.Release) and name in local:
                publisher.released(name, message.sequence)
        channel.check()
        while attached == set(local) and (received := channel.receive()) is not None:
            ended = _publish(publisher, received.message, received.frames) or ended
        for name, loss in server.tick().items():
            raise PeerLostError(f"{spec.title(name)} {loss}")


def _leave(
    spec: HubSpec,
    channel: Channel,
    kind: type[BaseException] | None,
    error: BaseException | None,
    place: TracebackType | None,
) -> None:
    """Leave the hub, with the cause before the goodbye if there is one: a goodbye alone would be all it ever hears."""
    if error is not None:
        with contextlib.suppress(PeerLostError):  # the hub has ended the run, or is gone
            channel.send(m.Failed(f"the {title_of(spec)} failed: {type(error).__name__}: {error}"))
    channel.close(drain_seconds=5.0)


def _publish(publisher: PlanPublisher, message: Any, frames: Sequence[memoryview]) -> bool:
    """Hand a plan entry on; whether it is the last one."""
    if not isinstance(message, m.PlanRelay):
        return False
    check_frames(message.groups, frames)
    stored = {header.lease_id: StoredGroup(header, f) for header, f in zip(message.groups, frames, strict=True)}
    publisher.publish(message.entry, stored)
    return message.entry.kind in (PlanKind.STOP, PlanKind.END)


def main() -> int:
    """Entry of the child process."""
    return child_main(run)


if __name__ == "__main__":
    sys.exit(main())
