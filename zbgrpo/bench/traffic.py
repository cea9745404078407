"""Both ends of the way of a group, for the benchmarks of transport and hub: producers and a consumer without a model.

They are processes of their own and use what a run uses: leases, `Channel`, `PlanReader`, commits. A group's content
follows from its row, so the consumer knows what must arrive. It checks that every group comes exactly once; that it is
whole is what checksums are for, and one in a few is compared with what it must be.

    python -m zbgrpo.bench.traffic producer|consumer SETTINGS

`SETTINGS` is JSON (`Settings`); the last line of the output is JSON too.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np

from zbgrpo.engine.hub_process import address_of
from zbgrpo.errors import PeerLostError, ProtocolError
from zbgrpo.ledger.records import Lease, PlanKind
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.memory import keep_freed_memory
from zbgrpo.transport.plan_stream import PlannedEntry, PlanReader, TrainGroup
from zbgrpo.transport.ring import RingReader
from zbgrpo.transport.wire import Sender, group_header, payload_crc, payload_frame
from zbgrpo.types import FinishReason, GroupPayload, Uid

MAX_MESSAGE_BYTES = 1 << 30
TIMING = Timing()
VOCABULARY = 150_000
_GIVE_UP_SECONDS = 60.0
_COMPARED_EVERY = 64  # entries
_POOL_STEP = 61


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of the groups that travel together, every response as long as it may be."""

    groups: int
    """In one message and one plan entry."""
    responses: int
    prompt_tokens: int
    response_tokens: int

    @property
    def group_bytes(self) -> int:
        """Tensors of one group: ids, log-probs, per response 20 bytes of scores and one span."""
        per_response = 8 * self.response_tokens + 20 + 12
        return 4 * self.prompt_tokens + self.responses * per_response


class Settings(msgspec.Struct, frozen=True):
    """What an end of the traffic is told."""

    run_id: str
    address: dict[str, str]
    shape: Shape
    index: int = 0
    """Of a producer."""
    ring_path: str = ""
    ring_bytes: int = 0
    tensors: bool = False
    """Whether the consumer makes torch tensors of what it gets."""
    marks: int = 1
    """Groups between two entries of `marks` in the consumer's answer."""


class Mark(NamedTuple):
    """Groups that had arrived by a moment of the monotonic clock."""

    groups: int
    seconds: float


class Content:
    """What the group of a row holds: windows into arrays of random numbers, another one for each row."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._num_tokens = shape.responses * shape.response_tokens
        generator = np.random.default_rng(0)
        size = shape.prompt_tokens + 2 * self._num_tokens + 4096
        self._ids = generator.integers(0, VOCABULARY, size).astype(np.int32)
        self._numbers = -generator.random(size, dtype=np.float32)
        self._num_windows = size - self._num_tokens - shape.prompt_tokens
        self._lengths = np.full(shape.responses, shape.response_tokens, np.int32)
        self._ones = np.ones(shape.responses, np.float32)
        self._finish = np.full(shape.responses, FinishReason.END_TOKEN, np.int32)
        self._spans = np.zeros((shape.responses, 3), np.int32)
        self._spans[:, 0] = np.arange(shape.responses)

    def payload(self, row: int, version: int) -> GroupPayload:
        """The group of a row, sampled wholly with this version."""
        shape, start = self.shape, row * _POOL_STEP % self._num_windows
        prompt_end = start + shape.prompt_tokens
        end = prompt_end + self._num_tokens
        spans = self._spans.copy()
        spans[:, 2] = version
        return GroupPayload(
            self._ids[start:prompt_end],
            self._ids[prompt_end:end],
            self._numbers[prompt_end:end],
            self._lengths,
            self._numbers[start : start + shape.responses],
            self._ones,
            self._ones,
            self._finish,
            spans,
        )

    def check(self, group: TrainGroup) -> None:
        """Raises `ProtocolError` unless this is the content of its row."""
        header, payload = group
        expected = self.payload(header.row, header.oldest_version)
        for name, got, wanted in zip(GroupPayload._fields, payload, expected, strict=True):
            if not np.array_equal(got, wanted):
                raise ProtocolError(f"group {header.lease_id} (row {header.row}) arrived with other {name}")


# ------------------------------------------------------------------------------------------------ producer


class TrafficProducer:
    """Answers every lease with its group, as soon as it comes; applies a version as soon as it is announced."""

    def __init__(self, settings: Settings, channel: Channel) -> None:
        self._channel, self._content = channel, Content(settings.shape)
        self._index, self._batch = settings.index, settings.shape.groups
        self._version = -1
        self._received = 0
        self.num_sent = 0

    def run(self) -> int:
        """Until the plan has ended; returns the number of groups sent."""
        self._channel.send(m.Hello(1 + self._index))
        while True:
            received = self._channel.receive(_GIVE_UP_SECONDS)
            if received is None:
                raise PeerLostError("no lease has come for a long time")
            match received.message:
                case m.Leases(leases):
                    self._answer(leases)
                case m.WeightsStart():
                    self._version = received.message.version
                    self._channel.send(m.Applied(self._version, ""), self._want())
                case m.Finished():
                    return self.num_sent

    def _want(self) -> m.Want:
        # More than the hub ever grants at once: how many leases are out is bounded by its limit alone.
        return m.Want(1_000_000, self._received)

    def _answer(self, leases: list[Lease]) -> None:
        self._received += len(leases)
        for begin in range(0, len(leases), self._batch):
            headers: list[m.GroupHeader] = []
            frames: list[bytes] = []
            for lease in leases[begin : begin + self._batch]:
                payload = self._content.payload(lease.row, max(self._version, 0))
                frame = payload_frame(payload)
                crc = payload_crc(frame)
                headers.append(group_header(Uid(lease.episode, lease.row), lease.lease_id, lease.attempt, payload, crc))
                frames.append(frame)
            self._channel.send(m.Groups(headers), frames=frames)
            self.num_sent += len(headers)


# ------------------------------------------------------------------------------------------------ consumer


class TrafficConsumer:
    """Takes the plan, checks and copies its groups, and commits every step at once."""

    def __init__(self, settings: Settings, channel: Channel, reader: PlanReader) -> None:
        self._channel, self._reader, self._content = channel, reader, Content(settings.shape)
        self._tensors, self._every = settings.tensors, settings.marks
        self._arrived: set[int] = set()
        self.marks: list[Mark] = []
        self.newest: list[tuple[Any, ...]] = []
        """The torch tensors of the newest entry, by group."""

    def run(self) -> dict[str, Any]:
        """Until the plan has ended: {"groups", "marks"}."""
        self._channel.send(m.WeightsStart(1, 0))
        while True:
            planned = self._reader.next_entry(_GIVE_UP_SECONDS)
            while self._channel.receive() is not None:  # reports, which nobody reads here
                pass
            if planned is None:
                raise PeerLostError("no plan entry has come for a long time")
            if planned.entry.kind is PlanKind.TRAIN:
                self._take(planned)
            elif planned.entry.kind is PlanKind.END:
                break
        self._channel.send(m.BroadcastsDone())
        return {"groups": len(self._arrived), "marks": self.marks}

    def _take(self, planned: PlannedEntry) -> None:
        entry, groups = planned
        if self._tensors:
            self.newest = [as_tensors(group) for group in groups]
        for group in groups:
            if group.header.row in self._arrived:
                raise ProtocolError(f"row {group.header.row} arrived twice")
            self._arrived.add(group.header.row)
        if entry.sequence % _COMPARED_EVERY == 0:
            self._content.check(groups[0])
        self._channel.send(m.Trained(entry.sequence))
        if entry.closes_step:
            version = entry.version + 1
            self._channel.send(m.Committed(version), m.WeightsStart(version + 1, version))
        if not self.marks or len(self._arrived) - self.marks[-1].groups >= self._every:
            self.marks.append(Mark(len(self._arrived), time.monotonic()))


def as_tensors(group: TrainGroup) -> tuple[Any, ...]:
    """The arrays of a group as torch tensors. Their memory is what the groups of the entry were copied to out of the
    ring, which nobody else uses."""
    import torch

    return tuple(map(torch.from_numpy, group.payload))


# ------------------------------------------------------------------------------------------------ the processes


def _channel(settings: Settings, name: str) -> Channel:
    keep_freed_memory()
    return Channel(address_of(settings.address), Sender(settings.run_id, name), TIMING, MAX_MESSAGE_BYTES)


def _run_producer(settings: Settings) -> dict[str, Any]:
    channel = _channel(settings, f"producer:{settings.index}").start()
    start = time.process_time()
    num_sent = TrafficProducer(settings, channel).run()
    channel.close(_GIVE_UP_SECONDS)
    return {"groups": num_sent, "cpu_seconds": time.process_time() - start}


def _run_consumer(settings: Settings) -> dict[str, Any]:
    if settings.tensors:
        import torch

        torch.set_num_threads(1)
    channel = _channel(settings, "consumer:0")
    ring = RingReader.attach(settings.ring_path, settings.ring_bytes)
    reader_channel = _channel(settings, "reader:0")
    reader = PlanReader(reader_channel, ring).start()
    channel.start()
    for each in (channel, reader_channel):
        each.send(m.Hello(0))
    start = time.process_time()
    result = TrafficConsumer(settings, channel, reader).run()
    reader.close()
    channel.close(_GIVE_UP_SECONDS)
    return result | {"cpu_seconds": time.process_time() - start}


def main() -> int:
    """One end, until the plan has ended."""
    role, settings = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Settings)
    result = _run_producer(settings) if role == "producer" else _run_consumer(settings)
    print(msgspec.json.encode(result).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
