"""The plan from the hub's memory through a real ring and real sockets to the training loops of one node."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.wire_messages import random_payload
from zbgrpo.errors import PeerLostError, ProtocolError, ResourceError
from zbgrpo.ledger.records import PlanEntry, PlanKind
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.plan_stream import PlannedEntry, PlanPublisher, PlanReader, StoredGroup
from zbgrpo.transport.ring import RingReader, RingWriter, record_bytes
from zbgrpo.transport.server import Server
from zbgrpo.transport.wire import Sender, group_header, payload_crc, payload_frame
from zbgrpo.types import GroupPayload, Uid

RUN = "run-1"
RING_NAME = f"test-{os.getpid()}"
TIMING = Timing(heartbeat_seconds=0.05, peer_timeout_seconds=60.0, resend_seconds=0.2)
GIVE_UP_SECONDS = 60.0


# -------------------------------------------------------------------------------------------------------- builders


def stored(lease_id: int, payload: GroupPayload | None = None, **header_changes: Any) -> StoredGroup:
    """A group as the hub holds it. Its number is also the seed of its content."""
    payload = random_payload(lease_id) if payload is None else payload
    frame = payload_frame(payload)
    header = group_header(Uid(0, lease_id), lease_id, 0, payload, payload_crc(frame))
    return StoredGroup(msgspec.structs.replace(header, **header_changes), frame)


def record_size(lease_id: int) -> int:
    return record_bytes(len(payload_frame(random_payload(lease_id))))


def train(sequence: int, ranks: Sequence[Sequence[int]]) -> PlanEntry:
    return PlanEntry(sequence, PlanKind.TRAIN, version=sequence, closes_step=True, ranks=[list(ids) for ids in ranks])


def groups_of(entry: PlanEntry) -> dict[int, StoredGroup]:
    return {lease_id: stored(lease_id) for ids in entry.ranks for lease_id in ids}


def assert_is_group(lease_id: int, header: m.GroupHeader, payload: GroupPayload) -> None:
    assert header.lease_id == lease_id
    for actual, expected in zip(payload, random_payload(lease_id), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


class Node:
    """A hub with a ring, and the readers of its node. `dp_indices` are those of readers 0, 1, ..."""

    def __init__(
        self, dp_indices: Sequence[int], ring_bytes: int, spoil: Callable[[Node, m.PlanFor], m.PlanFor] | None = None
    ) -> None:
        self.ring = RingWriter.create(RING_NAME, ring_bytes, len(dp_indices))
        self.server = Server(RUN, None, TIMING, 1 << 24)
        self.spoil = spoil
        self.names = {f"reader:{number}": dp for number, dp in enumerate(dp_indices)}
        self.publisher = PlanPublisher(self.ring, self.names, self.send)
        self.channels: list[Channel] = []
        self.readers: list[PlanReader] = []
        for name in self.names:
            channel = Channel(self.server.address, Sender(RUN, name), TIMING, 1 << 24)
            channel.send(m.Hello(0))
            self.channels.append(channel)
            self.readers.append(PlanReader(channel, RingReader.attach(self.ring.path, self.ring.capacity_bytes)))
        for reader in self.readers:
            reader.start()
        self.ring.unlink()
        self.serve(lambda: self.server.peers.keys() == self.names.keys())

    def send(self, name: str, message: m.Message) -> None:
        assert isinstance(message, m.PlanFor)
        self.server.send(name, message if self.spoil is None else self.spoil(self, message))

    def serve(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not until():
            assert time.monotonic() < deadline, "gave up"
            for name, message, _ in self.server.poll(0.01):
                if isinstance(message, m.Release):
                    self.publisher.released(name, message.sequence)
            self.server.tick()

    def collect(self, counts: Sequence[int]) -> list[list[PlannedEntry]]:
        """That many entries of every reader, while the hub runs."""
        collected: list[list[PlannedEntry]] = [[] for _ in self.readers]

        def take() -> bool:
            for reader, entries, count in zip(self.readers, collected, counts, strict=True):
                while len(entries) < count and (entry := reader.next_entry(0.0)) is not None:
                    entries.append(entry)
            return all(len(entries) == count for entries, count in zip(collected, counts, strict=True))

        self.serve(take)
        return collected

    def error_of(self, reader: PlanReader) -> BaseException:
        """What the reader raises; it must go on raising it."""
        errors: list[BaseException] = []

        def has_raised() -> bool:
            try:
                reader.next_entry(0.0)
            except (ProtocolError, PeerLostError) as error:
                errors.append(error)
            return len(errors) == 3

        self.serve(has_raised)
        return errors[-1]

    def close(self) -> None:
        thread = threading.Thread(target=lambda: [reader.close() for reader in self.readers])
        thread.start()
        self.serve(lambda: not thread.is_alive())
        self.server.close()
        self.ring.close()


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*args: Any, **kwargs: Any) -> Node:
        nodes.append(Node(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


# ------------------------------------------------------------------------------------------------ through the ring


@pytest.mark.parametrize("ring_groups", [4, 32])
@pytest.mark.parametrize("dp_indices", [[0, 1], [1, 0], [0, 0], [0, 1, 1]], ids=str)
def test_entries_in_order_and_groups_only_to_their_ranks(
    make_node: Callable[..., Node], dp_indices: list[int], ring_groups: int
) -> None:
    """Hundreds of groups through a ring of about four, in a record each, or of about 32, in records of several."""
    per_record: list[int] = []

    def look(node: Node, message: m.PlanFor) -> m.PlanFor:
        per_record.append(len(message.groups))
        return message

    lease_ids = iter(range(1_000))
    entries: list[PlanEntry] = []
    for number in range(25 * ring_groups // 4):
        ranks = [[next(lease_ids) for _ in range((number + dp) % 4)] for dp in range(max(dp_indices) + 1)]
        entries.append(train(len(entries), ranks))
        if number % 5 == 4:
            entries.append(PlanEntry(len(entries), PlanKind.SAVE, version=number))
    entries.append(PlanEntry(len(entries), PlanKind.END, version=len(entries)))
    published = [lease_id for entry in entries for ids in entry.ranks for lease_id in ids]
    sizes = [record_size(lease_id) for lease_id in published]
    node = make_node(dp_indices, max(ring_groups * sum(sizes) // len(sizes), *sizes), look)
    assert sum(sizes) > 5 * node.ring.capacity_bytes

    for entry in entries:
        node.publisher.publish(entry, groups_of(entry))
    assert node.publisher.num_queued > 0, "the ring must be too small for all of it"
    collected = node.collect([len(entries)] * len(dp_indices))
    node.serve(lambda: node.ring.live_records == 0)

    assert node.publisher.num_queued == 0
    assert ring_groups == 4 or sum(number > 1 for number in per_record) > 50
    for dp_index, mine in zip(dp_indices, collected, strict=True):
        assert [planned.entry for planned in mine] == entries
        for planned in mine:
            expected = planned.entry.ranks[dp_index] if planned.entry.ranks else []
            assert [group.header.lease_id for group in planned.groups] == expected
            for group in planned.groups:
                assert_is_group(group.header.lease_id, group.header, group.payload)
    assert all(reader.next_entry(0.0) is None for reader in node.readers)


def test_what_a_reader_got_does_not_change_when_the_ring_is_written_again(make_node: Callable[..., Node]) -> None:
    """Records are copied out before they are given back."""
    node = make_node([0], max(record_size(lease_id) for lease_id in range(30)))
    for number in range(30):
        entry = train(number, [[number]])
        node.publisher.publish(entry, groups_of(entry))
    (planned,) = node.collect([30])
    for number, one in enumerate(planned):
        assert_is_group(number, one.groups[0].header, one.groups[0].payload)
        one.groups[0].payload.response_ids[:] = 0  # it is the trainer's own


def test_a_slow_training_loop_does_not_hold_up_the_ring_of_the_others(make_node: Callable[..., Node]) -> None:
    """Reader 1 takes nothing until the end; its thread empties the ring all the same."""
    node = make_node([0, 1], 2 * max(record_size(lease_id) for lease_id in range(40)))
    for number in range(20):
        entry = train(number, [[2 * number], [2 * number + 1]])
        node.publisher.publish(entry, groups_of(entry))
    first, none = node.collect([20, 0])
    assert len(first) == 20
    assert none == []
    _, second = node.collect([0, 20])
    assert [planned.groups[0].header.lease_id for planned in second] == list(range(1, 40, 2))


# --------------------------------------------------------------------------------------------- the publisher alone


class Outbox:
    """What a publisher sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, list[int]]] = []
        self.records: dict[int, int] = {}
        """Ring sequence by lease id."""
        self.num_complete = 0

    def __call__(self, name: str, message: m.Message) -> None:
        assert isinstance(message, m.PlanFor)
        self.num_complete += message.complete
        ids = [header.lease_id for header in message.groups]
        self.sent.append((name, message.entry.sequence, ids))
        assert (message.record is None) == (not ids)
        if message.record is not None:
            self.records.update(dict.fromkeys(ids, message.record.sequence))


@pytest.fixture
def ring() -> Iterator[RingWriter]:
    """Room for two records of the size of `SAME`."""
    made = RingWriter.create(RING_NAME, 2 * record_size(0), num_readers=2)
    yield made
    made.close()


SAME = random_payload(0)


def same(*lease_ids: int) -> dict[int, StoredGroup]:
    return {lease_id: stored(lease_id, SAME) for lease_id in lease_ids}


def test_an_entry_that_does_not_fit_holds_back_all_that_follow(ring: RingWriter) -> None:
    outbox = Outbox()
    publisher = PlanPublisher(ring, {"reader:4": 0, "reader:7": 1}, outbox)
    publisher.publish(train(0, [[10], [11]]), same(10, 11))
    publisher.publish(train(1, [[12, 13], []]), same(12, 13))
    publisher.publish(PlanEntry(2, PlanKind.SAVE, 1), {})
    assert outbox.sent == [("reader:4", 0, [10]), ("reader:7", 0, [11])]
    assert publisher.num_queued == 2

    publisher.released("reader:7", outbox.records[11])
    assert len(outbox.sent) == 2, "the older record still occupies the beginning"
    publisher.released("reader:4", outbox.records[10])
    assert outbox.sent[2:4] == [("reader:4", 1, [12]), ("reader:4", 1, [13])], "half the ring is too much for a record"
    assert outbox.sent[4:] == [("reader:7", 1, []), ("reader:4", 2, []), ("reader:7", 2, [])]
    assert publisher.num_queued == 0


def test_an_entry_larger_than_the_ring_goes_out_in_parts(ring: RingWriter) -> None:
    """Only one group has to fit. Its readers learn of it at once, because only they can make room for the next."""
    outbox = Outbox()
    publisher = PlanPublisher(ring, {"reader:0": 0, "reader:1": 1}, outbox)
    publisher.publish(train(0, [[10], []]), same(10))
    publisher.publish(train(1, [[11, 12, 13], [14]]), same(11, 12, 13, 14))
    publisher.publish(PlanEntry(2, PlanKind.END, 2), {})
    assert outbox.sent == [("reader:0", 0, [10]), ("reader:1", 0, []), ("reader:0", 1, [11])]
    publisher.pump()
    assert ring.live_records == 2, "nothing is written twice"
    publisher.released("reader:0", outbox.records[10])
    publisher.released("reader:0", outbox.records[11])
    assert outbox.sent[3:] == [("reader:0", 1, [12]), ("reader:0", 1, [13])]
    assert outbox.num_complete == 3
    publisher.released("reader:0", outbox.records[12])
    assert outbox.sent[5:] == [("reader:1", 1, [14]), ("reader:0", 2, []), ("reader:1", 2, [])]
    assert (outbox.num_complete, publisher.num_queued) == (6, 0)


def test_the_groups_of_a_rank_share_a_record_and_its_readers_share_it_too() -> None:
    ring, outbox = RingWriter.create(RING_NAME, 64 * record_size(0), num_readers=3), Outbox()
    publisher = PlanPublisher(ring, {"reader:0": 0, "reader:1": 1, "reader:2": 1}, outbox)
    entry = train(0, [[10, 11, 12], list(range(20, 40))])
    publisher.publish(entry, same(10, 11, 12, *range(20, 40)))
    first, *others = outbox.sent
    assert first == ("reader:0", 0, [10, 11, 12])
    of_reader_1 = [ids for name, _, ids in others if name == "reader:1"]
    assert of_reader_1 == [ids for name, _, ids in others if name == "reader:2"]
    assert [lease_id for ids in of_reader_1 for lease_id in ids] == list(range(20, 40))
    assert len(of_reader_1) == 3, "an eighth of the ring at most"
    assert ring.live_records == 4
    ring.close()


def test_a_repeated_release_changes_nothing_and_a_false_one_is_an_error(ring: RingWriter) -> None:
    outbox = Outbox()
    publisher = PlanPublisher(ring, {"reader:0": 0, "reader:1": 1}, outbox)
    publisher.publish(train(0, [[10], [11]]), same(10, 11))
    for _ in range(2):
        publisher.released("reader:0", outbox.records[10])
    assert ring.live_records == 1
    with pytest.raises(ProtocolError):
        publisher.released("reader:0", outbox.records[11])
    with pytest.raises(ProtocolError):
        publisher.released("reader:0", 99)


@pytest.mark.parametrize("ranks", [[[10, 11], []], [[10]]], ids=str)
def test_an_entry_without_its_groups_or_ranks_is_an_error(ring: RingWriter, ranks: list[list[int]]) -> None:
    publisher = PlanPublisher(ring, {"reader:0": 0, "reader:1": 1}, Outbox())
    with pytest.raises(ProtocolError, match="plan entry 7 lacks"):
        publisher.publish(train(7, ranks), same(10))
    assert publisher.num_queued == 0


def test_a_group_that_can_never_fit_is_an_error(ring: RingWriter) -> None:
    large = SAME._replace(prompt_ids=np.zeros(10_000, np.int32))
    publisher = PlanPublisher(ring, {"reader:0": 0, "reader:1": 1}, Outbox())
    with pytest.raises(ResourceError, match="can never fit"):
        publisher.publish(train(0, [[10], []]), {10: stored(10, large)})


# ---------------------------------------------------------------------------------------------------------- faults


def spoil_ring(node: Node, message: m.PlanFor) -> m.PlanFor:
    """A byte of the record flips between the writing and the reading."""
    if message.record is not None:
        node.ring._view[64 + message.record.offset + message.record.length - 100] ^= 1
    return message


def spoil_record(node: Node, message: m.PlanFor) -> m.PlanFor:
    return msgspec.structs.replace(message, record=None)


def spoil_groups(node: Node, message: m.PlanFor) -> m.PlanFor:
    return msgspec.structs.replace(message, groups=[])


def spoil_descriptor(node: Node, message: m.PlanFor) -> m.PlanFor:
    record = None if message.record is None else msgspec.structs.replace(message.record, offset=1 << 40)
    return msgspec.structs.replace(message, record=record)


def spoil_sizes(node: Node, message: m.PlanFor) -> m.PlanFor:
    groups = [msgspec.structs.replace(group, sizes=[2**40, *group.sizes[1:]]) for group in message.groups]
    return msgspec.structs.replace(message, groups=groups)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_ring, "corrupt"),
        (spoil_record, "1 groups, with the ring record None"),
        (spoil_groups, "0 groups, with the ring record Descriptor"),
        (spoil_descriptor, "ring record"),
        (spoil_sizes, "cannot hold frames"),
    ],
)
def test_a_spoiled_record_is_an_error_at_its_reader(
    make_node: Callable[..., Node], spoil: Callable[[Node, m.PlanFor], m.PlanFor], says: str
) -> None:
    node = make_node([0, 1], 1 << 16)
    for number in range(3):
        entry = train(number, [[number], []])
        node.publisher.publish(entry, groups_of(entry))
    node.collect([3, 3])
    node.spoil = spoil
    entry = train(3, [[3], []])
    node.publisher.publish(entry, groups_of(entry))
    error = node.error_of(node.readers[0])
    assert isinstance(error, ProtocolError)
    assert says in str(error)
    assert [planned.entry for planned in node.collect([0, 1])[1]] == [entry], (
        "the other reader has nothing to do with it"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"crc": 1}, "corrupt"), ({"num_tokens": 1}, "contradict"), ({"newest_version": 9}, "contradict")],
    ids=str,
)
def test_a_group_that_is_not_what_its_header_says_is_an_error(
    make_node: Callable[..., Node], changes: Mapping[str, int], says: str
) -> None:
    node = make_node([0, 1], 1 << 16)
    node.publisher.publish(train(0, [[5], [6]]), {5: stored(5, **changes), 6: stored(6)})
    error = node.error_of(node.readers[0])
    assert isinstance(error, ProtocolError)
    assert says in str(error)
    assert_is_group(6, *node.collect([0, 1])[1][0].groups[0])


def test_entries_before_the_end_of_the_run_by_an_error_come_first(make_node: Callable[..., Node]) -> None:
    node = make_node([0], 1 << 16)
    entry = train(0, [[5]])
    node.publisher.publish(entry, groups_of(entry))
    node.serve(lambda: node.ring.live_records == 0)
    node.server.send("reader:0", m.Abort("rank 1 (producer 0) failed"))
    node.serve(lambda: "channel-reader:0" not in {thread.name for thread in threading.enumerate()})
    planned = node.readers[0].next_entry(GIVE_UP_SECONDS)
    assert planned is not None
    assert planned.entry == entry
    error = node.error_of(node.readers[0])
    assert isinstance(error, PeerLostError)
    assert str(error) == "rank 1 (producer 0) failed"


def test_a_training_loop_that_waits_wakes_when_the_run_fails(make_node: Callable[..., Node]) -> None:
    node = make_node([0], 1 << 16)
    raised: list[str] = []

    def wait() -> None:
        try:
            node.readers[0].next_entry(10 * GIVE_UP_SECONDS)
        except PeerLostError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    node.server.send("reader:0", m.Abort("failed"))
    node.serve(lambda: not thread.is_alive())
    assert raised == ["failed"]


# --------------------------------------------------------------------------------------------------------- the end


def left_behind() -> tuple[int, set[str], set[str]]:
    """Open descriptors, threads, and names of shared memory."""
    names = {name for name in os.listdir("/dev/shm") if name.startswith(f"zbgrpo-{RING_NAME}-")}
    return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}, names


def test_nothing_is_left_behind() -> None:
    Node([0], 1 << 12).close()  # what the libraries open once and keep
    before = left_behind()
    node = Node([0, 1], 1 << 16)
    entry = train(0, [[5], [6]])
    node.publisher.publish(entry, groups_of(entry))
    node.collect([1, 1])
    node.close()
    assert left_behind() == before
    for reader in node.readers:
        with pytest.raises(ProtocolError, match="has stopped"):
            reader.next_entry(0.0)


def test_a_reader_that_never_ran_can_be_closed(ring: RingWriter) -> None:
    server = Server(RUN, None, TIMING, 1 << 24)
    channel = Channel(server.address, Sender(RUN, "reader:0"), TIMING, 1 << 24)
    reader = PlanReader(channel, RingReader.attach(ring.path, ring.capacity_bytes))
    assert reader.next_entry(0.0) is None
    reader.close()
    server.close()
