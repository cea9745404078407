"""Two links over a connection that loses, repeats and reorders, with a clock that only the test moves."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zbgrpo.transport.link import Link

RESEND_SECONDS = 5.0
LEFT, RIGHT = 0, 1
sides = st.sampled_from([LEFT, RIGHT])


class Packet(NamedTuple):
    """What is on the connection. Sequence 0 is an acknowledgement alone."""

    sequence: int
    acknowledged: int
    item: int


class Side:
    """A link and what its owner does with it: the loop of `Channel` and `Server` without sockets."""

    def __init__(self) -> None:
        self.link: Link[Packet] = Link(RESEND_SECONDS)
        self.sent: list[int] = []
        self.delivered: list[int] = []

    def send(self, item: int, now: float) -> Packet:
        packet = Packet(self.link.next_sequence, self.link.received, item)
        self.link.sent(packet, now)
        self.sent.append(item)
        return packet

    def arrived(self, packet: Packet, now: float) -> None:
        self.link.acknowledged(packet.acknowledged, now)
        if packet.sequence and self.link.accept(packet.sequence):
            self.delivered.append(packet.item)

    def turn(self, now: float) -> list[Packet]:
        """What goes out without being asked: an acknowledgement that is owed, and what must be sent again."""
        packets = []
        if self.link.must_acknowledge:
            self.link.must_acknowledge = False
            packets.append(Packet(0, self.link.received, -1))
        return [*packets, *self.link.due(now)]


class LossyConnection(RuleBasedStateMachine):
    """Whatever the connection does, every message is delivered exactly once and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_item = 0
        self.sides = [Side(), Side()]
        self.under_way: list[list[Packet]] = [[], []]  # by destination

    @rule(source=sides, lost=st.booleans())
    def send(self, source: int, lost: bool) -> None:
        packet = self.sides[source].send(self.next_item, self.now)
        self.next_item += 1
        if not lost:
            self.under_way[1 - source].append(packet)

    @rule(to=sides, data=st.data(), stays=st.booleans())
    def deliver_any(self, to: int, data: st.DataObject, stays: bool) -> None:
        """Any packet, not only the oldest; when it stays it will come again."""
        waiting = self.under_way[to]
        if not waiting:
            return
        place = data.draw(st.integers(0, len(waiting) - 1))
        self.sides[to].arrived(waiting[place] if stays else waiting.pop(place), self.now)

    @rule(to=sides)
    def deliver_all_in_order(self, to: int) -> None:
        self._deliver(to)

    @rule(to=sides, data=st.data())
    def lose(self, to: int, data: st.DataObject) -> None:
        waiting = self.under_way[to]
        if waiting:
            del waiting[data.draw(st.integers(0, len(waiting) - 1)) :]

    @rule(source=sides, lost=st.booleans())
    def turn(self, source: int, lost: bool) -> None:
        packets = self.sides[source].turn(self.now)
        if not lost:
            self.under_way[1 - source].extend(packets)

    @rule(seconds=st.sampled_from([0.1, 1.0, RESEND_SECONDS, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def delivered_once_and_in_order(self) -> None:
        for source, target in ((LEFT, RIGHT), (RIGHT, LEFT)):
            sender, receiver = self.sides[source], self.sides[target]
            assert receiver.delivered == sender.sent[: len(receiver.delivered)]
            assert receiver.link.received == len(receiver.delivered)

    @invariant()
    def nothing_is_forgotten_before_it_has_arrived(self) -> None:
        for source, target in ((LEFT, RIGHT), (RIGHT, LEFT)):
            sender, receiver = self.sides[source], self.sides[target]
            assert len(sender.sent) - sender.link.num_unacknowledged <= len(receiver.delivered)

    def teardown(self) -> None:
        """A connection that behaves from now on: soon everything has arrived and is acknowledged."""
        for _ in range(3):
            self.now += RESEND_SECONDS
            for source in (LEFT, RIGHT):
                self.under_way[1 - source].extend(self.sides[source].turn(self.now))
                self._deliver(1 - source)
        for source, target in ((LEFT, RIGHT), (RIGHT, LEFT)):
            assert self.sides[target].delivered == self.sides[source].sent
            assert self.sides[source].link.num_unacknowledged == 0
            assert self.sides[source].turn(self.now + 1_000) == []
        self.delivered_once_and_in_order()

    def _deliver(self, target: int) -> None:
        for packet in self.under_way[target]:
            self.sides[target].arrived(packet, self.now)
        self.under_way[target].clear()


TestLossyConnection = LossyConnection.TestCase
TestLossyConnection.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)


def test_the_example_of_the_module() -> None:
    a: Link[str] = Link(RESEND_SECONDS)
    b: Link[str] = Link(RESEND_SECONDS)
    for item in ("one", "two", "three"):
        a.sent(item, now=0.0)
    assert b.accept(1)
    assert not b.accept(3), "2 is lost"
    assert (b.received, b.gaps) == (1, 1)
    a.acknowledged(b.received, now=1.0)
    assert a.num_unacknowledged == 2
    assert list(a.due(now=5.9)) == [], "the time counts from the last progress"
    assert list(a.due(now=6.0)) == ["two", "three"]
    assert b.accept(2)
    assert b.accept(3)
    a.acknowledged(b.received, now=6.1)
    assert a.num_unacknowledged == 0
    assert list(a.due(now=100.0)) == []
    b.must_acknowledge = False
    assert not b.accept(2), "a late copy"
    assert (b.must_acknowledge, b.received, b.duplicates) == (True, 3, 1)


def test_what_is_sent_again_waits_as_long_before_the_next_time() -> None:
    link: Link[str] = Link(RESEND_SECONDS)
    link.sent("one", now=0.0)
    assert list(link.due(now=5.0)) == ["one"]
    assert list(link.due(now=9.9)) == []
    assert list(link.due(now=10.0)) == ["one"]


def test_time_without_anything_unacknowledged_does_not_count() -> None:
    link: Link[str] = Link(RESEND_SECONDS)
    link.sent("one", now=0.0)
    link.acknowledged(1, now=1.0)
    link.sent("two", now=100.0)
    assert list(link.due(now=104.9)) == []
    assert list(link.due(now=105.0)) == ["two"]


def test_sending_carries_the_acknowledgement() -> None:
    link: Link[str] = Link(RESEND_SECONDS)
    assert not link.must_acknowledge
    assert link.accept(1)
    assert link.must_acknowledge
    assert link.next_sequence == 1
    link.sent("answer", now=0.0)
    assert not link.must_acknowledge
    assert link.next_sequence == 2


def test_old_and_repeated_acknowledgements_change_nothing() -> None:
    link: Link[int] = Link(RESEND_SECONDS)
    for item in range(4):
        link.sent(item, now=0.0)
    link.acknowledged(3, now=4.0)
    for old in (3, 1, 0, -1):
        link.acknowledged(old, now=8.0)
    assert link.num_unacknowledged == 1
    assert list(link.due(now=9.0)) == [3], "an acknowledgement without progress does not put the resending off"
