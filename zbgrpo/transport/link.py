"""Reliable, ordered delivery between two peers over a lossy, duplicating connection. Pure state, the clock is given.

Each side numbers what it sends from 1 and keeps it until the other side acknowledges it; acknowledgements are
cumulative and ride on everything. A receiver takes number n + 1 after n and nothing else: a lower number is a
duplicate (acknowledged again, not delivered), a higher one means that something was lost (dropped; the sender sends
everything unacknowledged again after `resend_seconds`). So a message is sent at least once and delivered exactly once.

Example: A sends 1, 2, 3; 2 is lost. B delivers 1, drops 3, acknowledges 1. After the timeout A sends 2 and 3 again;
B delivers both and acknowledges 3; a late copy of 2 is answered with "3" and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Link(Generic[Item]):
    """One side's state. `Item` is whatever is sent (the encoded parts of a message)."""

    def __init__(self, resend_seconds: float) -> None:
        self.resend_seconds = resend_seconds
        self.received = 0
        """Highest number delivered: what to acknowledge."""
        self.must_acknowledge = False
        """Set when something arrived that nothing sent since has acknowledged."""
        self.duplicates = 0
        self.gaps = 0
        self._next = 1
        self._unacknowledged: deque[tuple[int, Item]] = deque()
        self._oldest_sent_at = 0.0

    @property
    def next_sequence(self) -> int:
        """Number of the next message to send."""
        return self._next

    @property
    def num_unacknowledged(self) -> int:
        return len(self._unacknowledged)

    def sent(self, item: Item, now: float) -> None:
        """Record that `item` was sent under `next_sequence`."""
        if not self._unacknowledged:
            self._oldest_sent_at = now
        self._unacknowledged.append((self._next, item))
        self._next += 1
        self.must_acknowledge = False

    def acknowledged(self, sequence: int, now: float) -> None:
        """The other side has everything up to `sequence`."""
        while self._unacknowledged and self._unacknowledged[0][0] <= sequence:
            self._unacknowledged.popleft()
            self._oldest_sent_at = now

    def expects(self, sequence: int) -> bool:
        """Whether `accept` would deliver the message with this number."""
        return sequence == self.received + 1

    def accept(self, sequence: int) -> bool:
        """Whether the message with this number is to be delivered now."""
        self.must_acknowledge = True
        if self.expects(sequence):
            self.received = sequence
            return True
        if sequence <= self.received:
            self.duplicates += 1
        else:
            self.gaps += 1
        return False

    def due(self, now: float) -> Sequence[Item]:
        """Everything to be sent again now, in order."""
        if not self._unacknowledged or now - self._oldest_sent_at < self.resend_seconds:
            return []
        self._oldest_sent_at = now
        return [item for _, item in self._unacknowledged]
