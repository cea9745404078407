"""A rank's connection to the hub (or a relay): a background thread that sends, receives, resends and keeps alive.

The owner calls `send` and `receive` from any thread; messages arrive in order, each once. A hub that is silent for
longer than the peer timeout, or that says the run has failed, makes every later call raise `PeerLostError`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from zbgrpo import failpoints
from zbgrpo.errors import PeerLostError, ProtocolError
from zbgrpo.observe.clockoffset import ClockOffset
from zbgrpo.transport.lane import LaneSender, lane_or_none
from zbgrpo.transport.link import Link
from zbgrpo.transport.messages import Abort, Goodbye, LaneOpen, Message, Progress
from zbgrpo.transport.sockets import Address, Dealer
from zbgrpo.transport.wire import Buffer, Item, Sender, decode, encode, together, with_frames

logger = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 0.002
"""How long an acknowledgement waits for a message that it can ride on."""

TURN_SECONDS = 0.0005
"""For how long messages are taken before those that they have led to are sent. With more, the processes on the way of a
group take turns instead of working at the same time; with less, everything costs a message of its own."""

_LOOK_SECONDS = 0.2  # between two looks whether there is a connection
GONE_SECONDS = 10.0
"""How long there may be no connection at all, on either side: a process that has died is never replaced. A process that
is stopped loses its connection too, within a few seconds, since nothing answers in its place."""


class Timing(NamedTuple):
    """How long the two sides of a connection wait."""

    heartbeat_seconds: float = 2.0
    peer_timeout_seconds: float = 45.0
    resend_seconds: float = 5.0
    progress_timeout_seconds: float = 1800.0


class Received(NamedTuple):
    """One message with the frames that came behind it."""

    message: Message
    frames: Sequence[memoryview]


class Channel:
    """See the module's text. Messages of the types in `route` go to queues of their own, the others to `receive`."""

    def __init__(self, address: Address, sender: Sender, timing: Timing, max_message_bytes: int) -> None:
        self._address, self._sender, self._timing = address, sender, timing
        self._lane: LaneSender | None = None
        self._may_offer_lane = address.is_local
        self._max_message_bytes = max_message_bytes
        self._outbox: deque[Item] = deque()
        self._inbox: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self._queues = [self._inbox]
        self._routes: dict[type, Callable[[Received], None]] = {}
        self._on_failure: list[Callable[[PeerLostError], None]] = []
        self._link: Link[list[Buffer]] = Link(timing.resend_seconds)
        self.hub_clock = ClockOffset()
        """Distance to the other side's monotonic clock, measured with every heartbeat."""
        self.failure: PeerLostError | None = None
        """What every call raises from now on."""
        self.doing: Callable[[], tuple[str, bool]] = lambda: ("", False)
        """What the main loop is at, and whether it waits for other ranks in that; asked with every heartbeat."""
        self._turned: float | None = None
        self._progress_at = 0.0
        self._waiting = False
        """Whether the thread must be woken for what is new in the outbox; it looks once more after it has set this."""
        self._closing = threading.Event()
        self._dealer: Dealer | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"channel-{sender.name}", daemon=True)

    def route(self, *kinds: type) -> queue.SimpleQueue[Received | None]:
        """A queue of its own for these message types; None in it means that the channel has failed."""
        own: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self._queues.append(own)
        for kind in kinds:
            self._routes[kind] = own.put
        return own

    def deliver(
        self,
        kind: type,
        callback: Callable[[Received], None],
        on_failure: Callable[[PeerLostError], None] = lambda error: None,
    ) -> None:
        """Call back for messages of this type, and when the channel fails, in the channel's own thread: it must neither
        wait nor fail."""
        self._routes[kind] = callback
        self._on_failure.append(on_failure)

    def start(self) -> Channel:
        """Start the thread; routes must be set before."""
        self._thread.start()
        self._started.wait(self._timing.peer_timeout_seconds)
        return self

    def send(self, *messages: Message, frames: Sequence[Buffer] = ()) -> None:
        """Queue messages, with the tensors of the group message among them. Buffers must not change afterwards."""
        self.check()
        self._outbox.append(Item(list(messages), frames))
        if self._waiting and self._dealer is not None:
            self._dealer.wake()

    def receive(self, timeout_seconds: float = 0.0) -> Received | None:
        """The next message that has no route; None when none came in time."""
        return self.take(self._inbox, timeout_seconds)

    def take(self, source: queue.SimpleQueue[Received | None], timeout_seconds: float) -> Received | None:
        """The next message of a route; None when none came in time; raises `PeerLostError` if the channel failed."""
        self.check()
        try:
            received = source.get_nowait() if timeout_seconds <= 0 else source.get(timeout=timeout_seconds)
        except queue.Empty:
            self.check()
            return None
        if received is None:
            source.put(None)
            self.check()
        return received

    def check(self) -> None:
        """Raise `PeerLostError` if the hub is lost or has ended the run."""
        if self.failure is not None:
            raise self.failure

    def alive(self) -> None:
        """The owner's main loop makes a turn. From the first one on the hub hears with every heartbeat how long ago the
        last one was, and ends the run if that is too long."""
        self._turned = time.monotonic()

    def wait_for_failure(self, timeout_seconds: float) -> PeerLostError | None:
        """The failure of the channel, if there is one within this time."""
        deadline = time.monotonic() + timeout_seconds
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure

    def drained(self) -> bool:
        """Whether the other side has acknowledged everything that was sent."""
        return not self._outbox and not self._link.num_unacknowledged

    def close(self, drain_seconds: float) -> bool:
        """Say goodbye, wait up to `drain_seconds` for acknowledgements, close; whether everything arrived."""
        if self.failure is None:
            self._outbox.append(Item([Goodbye()], ()))
        deadline = time.monotonic() + drain_seconds
        while not self.drained() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        drained = self.drained()
        if not drained:
            logger.warning("%s left before its last messages were acknowledged", self._sender.name)
        self._closing.set()
        if self._dealer is not None:
            self._dealer.wake()
        if self._thread.is_alive():
            self._thread.join(self._timing.peer_timeout_seconds)
        return drained

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        failure = PeerLostError("the connection to the hub has broken down")
        try:
            self._dealer = Dealer(self._address, self._sender.name.encode(), self._max_message_bytes)
            self._started.set()
            self._serve(self._dealer)
        except ProtocolError as error:
            failure = PeerLostError(f"the connection to the hub has broken down: {error}")
        finally:
            # However the thread ends, nobody may go on waiting for messages.
            if self.failure is None and not self._closing.is_set():
                self._fail(failure)
            self._started.set()
            if self._dealer is not None:
                self._dealer.close()
            if self._lane is not None:
                self._lane.close()

    def _serve(self, dealer: Dealer) -> None:
        heard = alive = connected = time.monotonic()
        while not self._closing.is_set() and self.failure is None:
            self._flush(dealer)
            self._waiting = True
            # What could not be sent waits for the connection; what has come since the flush is sent at once.
            blocked = not self._flush(dealer)
            owes = self._link.must_acknowledge
            timeout = ACKNOWLEDGE_SECONDS if owes else self._timing.heartbeat_seconds / 4
            dealer.wait(timeout, or_writable=blocked)
            self._waiting = False
            now = time.monotonic()
            until = now + TURN_SECONDS
            while (parts := dealer.receive()) is not None:
                if self._arrived(parts, now):
                    heard = now
                if time.monotonic() > until:
                    break
            if now - alive >= self._timing.heartbeat_seconds or (owes and self._link.must_acknowledge):
                alive = now
                self._link.must_acknowledge = False
                progress, sent = self._progress(now), time.monotonic()
                dealer.send(encode(self._sender, 0, self._link.received, progress, times=[sent]))
            for item in self._link.due(now):
                dealer.send(item)
            if now - connected >= _LOOK_SECONDS:
                if dealer.writable():
                    connected = now
                elif now - connected > min(GONE_SECONDS, self._timing.peer_timeout_seconds):
                    self._fail(PeerLostError("the hub is gone: its connection has closed"))
            if now - heard > self._timing.peer_timeout_seconds:
                self._fail(PeerLostError(f"the hub has been silent for {now - heard:.0f} s"))

    def _progress(self, now: float) -> list[Message]:
        due = now - self._progress_at >= self._timing.heartbeat_seconds / 2  # not with every acknowledgement
        if (turned := self._turned) is None or self._closing.is_set() or not due:
            return []
        self._progress_at = now
        return [Progress(max(0.0, round(now - turned, 1)), *self.doing())]

    def _flush(self, dealer: Dealer) -> bool:
        """Send what waits; whether all of it could be sent. Before there is a connection the messages wait here: they
        would be lost, and sent again only much later."""
        while self._outbox:
            number, item = together(self._outbox.copy())  # others add to it meanwhile
            if item.frames and self._may_offer_lane:
                self._offer_lane()
                continue
            record = None
            if self._lane is not None and item.frames:
                record = self._lane.place(self._link.next_sequence, item.frames)
            parts = encode(self._sender, self._link.next_sequence, self._link.received, *item, record=record)
            if not dealer.send([*parts[:-1], failpoints.damaged("wire.send", parts[-1])]):
                if self._lane is not None and record is not None:
                    self._lane.take_back()
                return False
            self._link.sent(parts, time.monotonic())
            for _ in range(number):
                self._outbox.popleft()  # only now, so that `drained` never misses a message between the two
        return True

    def _offer_lane(self) -> None:
        """Before the first frames, so that only those who send some have one."""
        self._may_offer_lane = False
        self._lane = lane_or_none(partial(LaneSender, self._sender.name))
        if self._lane is not None:
            self._outbox.appendleft(Item([self._lane.offer()], ()))

    def _arrived(self, parts: list[memoryview], now: float) -> bool:
        """Take a message; False when it is for another start of this peer, whose numbers mean nothing here."""
        header, frames = decode(parts, self._sender.run_id)
        if header.incarnation != self._sender.incarnation:
            return False
        self._link.acknowledged(header.acknowledged, now)
        if self._lane is not None:
            self._lane.acknowledged(header.acknowledged)
        if len(header.times) == 3:
            sent, received, answered = header.times
            self.hub_clock.add(sent, received, answered, now)
        if header.sequence == 0 or not self._link.accept(header.sequence):
            return True
        for message, own_frames in with_frames(header, frames):
            if isinstance(message, Abort):
                self._fail(PeerLostError(message.error, message.reported))
            elif isinstance(message, LaneOpen):
                if self._lane is not None:
                    self._lane.opened()
            else:
                self._routes.get(type(message), self._inbox.put)(Received(message, own_frames))
        return True

    def _fail(self, error: PeerLostError) -> None:
        self.failure = error
        for target in self._queues:
            target.put(None)
        for tell in self._on_failure:
            tell(error)
