"""A way for the frames of a peer's messages through memory, beside the socket of its messages.

A peer on the hub's machine writes the frames of a message into a ring of its own and sends where they are. The hub
copies them out as it takes the message: one copy on each side, in place of those that the socket makes for both.

States of a lane: OFFERED (before the peer's first frames) -> OPEN (the hub can map it, and has said so). Before it is
open, and where it has no room, frames travel as parts of their messages. Invariant: a record does not change before its
message has been acknowledged, that is before the hub has copied it; a message that is sent again has the same record.

Example: messages 3 and 4 have their frames in records 0 and 1. The acknowledgement of 3 gives the room of record 0
back; should 4 have been lost, it is sent again, and record 1 is still there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from zbgrpo.errors import ProtocolError, ResourceError
from zbgrpo.transport.messages import Lane
from zbgrpo.transport.ring import Descriptor, RingReader, RingWriter
from zbgrpo.transport.wire import Buffer

logger = logging.getLogger(__name__)

_LANE_BYTES = 32 << 20
_HUB = frozenset([0])  # the one reader of a lane
_MIN_BYTES = 8 << 10
"""With less, a part of the message is cheaper."""


class LaneSender:
    """The peer's end. Used from the thread of its channel."""

    def __init__(self, name: str) -> None:
        """Raises `ResourceError` if there is no memory for it."""
        self._ring = RingWriter.create_anonymous(f"lane-{name}", _LANE_BYTES)
        self._placed: deque[tuple[int, int]] = deque()
        """Messages and records that are not acknowledged."""
        self._is_open = False

    def offer(self) -> Lane:
        """What the hub is to be told."""
        return Lane(self._ring.path, self._ring.capacity_bytes)

    def opened(self) -> None:
        """The hub has it."""
        self._is_open = True
        self._ring.unlink()

    def place(self, message: int, frames: Sequence[Buffer]) -> Descriptor | None:
        """Put the frames of this message there. None if they are to travel as its parts."""
        num_bytes = sum(map(len, frames))
        if not self._is_open or not _MIN_BYTES <= num_bytes <= self._ring.capacity_bytes // 2:
            return None
        record = self._ring.try_write(frames, _HUB)
        if record is not None:
            self._placed.append((message, record.sequence))
        return record

    def acknowledged(self, message: int) -> None:
        """The hub has all messages up to this one."""
        while self._placed and self._placed[0][0] <= message:
            self._ring.release(0, self._placed.popleft()[1])

    def take_back(self) -> None:
        """The message of the newest record could not be sent."""
        self._ring.release(0, self._placed.pop()[1])

    def close(self) -> None:
        """No message will be sent again."""
        self._ring.close()


class LaneReceiver:
    """The hub's end of the lane of one peer."""

    def __init__(self, offered: Lane) -> None:
        """Raises `ProtocolError` if it cannot be mapped, or is something else."""
        self._ring = RingReader.attach_anonymous(offered.path, offered.capacity_bytes)

    def frames(self, record: Descriptor, lengths: Sequence[int]) -> list[memoryview]:
        """Copies of the frames of a message; raises `ProtocolError` if they are not there."""
        return self._ring.read(record, lengths)

    def close(self) -> None:
        """The peer has left, or has started again."""
        self._ring.close()


End = TypeVar("End", LaneSender, LaneReceiver)


def lane_or_none(end: Callable[[], End]) -> End | None:
    """An end of a lane; None where there is no memory for it, or where the hub cannot reach the peer's memory, as from
    another container."""
    try:
        return end()
    except (ProtocolError, ResourceError) as error:
        logger.info("groups travel through the socket only: %s", error)
        return None
