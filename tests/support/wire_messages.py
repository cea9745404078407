"""Messages for the tests of the wire: valid ones of every kind, and the means to change them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from zbgrpo.ledger.evaluation import EvaluationLease, EvaluationResult
from zbgrpo.ledger.records import Lease, PlanEntry, PlanKind
from zbgrpo.transport import messages as m
from zbgrpo.transport import wire
from zbgrpo.transport.ring import Descriptor
from zbgrpo.transport.wire import Sender
from zbgrpo.types import GroupPayload, Uid

SENDER = Sender("run-1", "producer:0", 2)
pack = msgspec.msgpack.encode


def golden_payload() -> GroupPayload:
    """Two responses of 2 and 1 tokens, the first with a change of version in it."""
    return GroupPayload(
        np.array([1, 2, 3], np.int32),
        np.array([7, 8, 9], np.int32),
        np.array([-0.5, -1.0, -2.0], np.float32),
        np.array([2, 1], np.int32),
        np.array([1.0, 0.25], np.float32),
        np.array([1.0, 0.0], np.float32),
        np.array([1.0, 0.0], np.float32),
        np.array([0, 2], np.int32),
        np.array([[0, 0, 4], [0, 1, 5], [1, 0, 5]], np.int32),
    )


def random_payload(seed: int) -> GroupPayload:
    """A group of 1 to 6 responses of 1 to 60 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 61, rng.integers(1, 7)).astype(np.int32)
    count, total = len(lengths), int(lengths.sum())
    return GroupPayload(
        rng.integers(0, 50_000, rng.integers(1, 50)).astype(np.int32),
        rng.integers(0, 50_000, total).astype(np.int32),
        rng.standard_normal(total, np.float32),
        lengths,
        *(rng.standard_normal(count, np.float32) for _ in range(3)),
        rng.integers(0, 3, count).astype(np.int32),
        np.array([(response, 0, seed) for response in range(count)], np.int32),
    )


def random_group(seed: int) -> tuple[m.GroupHeader, bytes]:
    """Header and frame of a random payload."""
    payload = random_payload(seed)
    return header_of(payload), wire.payload_frame(payload)


def header_of(payload: GroupPayload, lease_id: int = 11) -> m.GroupHeader:
    crc = wire.payload_crc(wire.payload_frame(payload))
    return wire.group_header(Uid(0, lease_id), lease_id, 0, payload, crc)


def encoded(*groups: GroupPayload, sender: Sender = SENDER) -> list[bytes]:
    """The parts of one message with these groups, as the network delivers them."""
    headers = [header_of(payload, 11 + number) for number, payload in enumerate(groups)]
    frames = [wire.payload_frame(payload) for payload in groups]
    return [bytes(part) for part in wire.encode(sender, 3, 1, [m.Groups(headers)], frames)]


def received(parts: list[bytes]) -> list[GroupPayload]:
    """What a receiver makes of these parts, down to the arrays."""
    header, frames = wire.decode(parts, SENDER.run_id)
    payloads = []
    for message in header.messages:
        if isinstance(message, m.Groups):
            wire.check_frames(message.groups, frames)
            for group, frame in zip(message.groups, frames, strict=True):
                payloads.append(wire.payload_from_frame(group, frame))
    return payloads


def signed(content: bytes | bytearray) -> bytes:
    """A header of this content, with the checksum that belongs to it."""
    return bytes(content) + zlib.crc32(content).to_bytes(4, "little")


def fields_of(header: bytes) -> list[Any]:
    fields = msgspec.msgpack.decode(header[:-4])
    assert isinstance(fields, list)
    return fields


def reencoded(parts: list[bytes], change: Callable[[list[Any]], None]) -> list[bytes]:
    """The same message after a change of its header's fields, whose checksum is right; frames and theirs stay."""
    fields = fields_of(parts[0])
    change(fields)
    return [signed(pack(fields)), *parts[1:]]


def groups_of(*frames: bytes) -> m.Groups:
    """Groups with these frames, which need not hold any tensors."""
    header = header_of(golden_payload())
    return m.Groups([msgspec.structs.replace(header, crc=wire.payload_crc(frame)) for frame in frames])


def encoded_each(*messages: m.Message) -> list[bytes]:
    """The parts of one message with these, and with the frames of the groups among them."""
    frames = [wire.payload_frame(golden_payload()) for one in messages if isinstance(one, m.Groups) for _ in one.groups]
    return [bytes(part) for part in wire.encode(SENDER, 9, 8, messages, frames)]


EVERY_MESSAGE: list[m.Message] = [
    m.Hello(3, 1, 2), m.Lane("/proc/1/fd/3", 1 << 20), m.LaneOpen(),
    m.Want(4, 7), m.Applied(5, "digest"), m.Filtered(1, 0.5, 1.0, 0.25, 8, 900, True),
    m.Groups([header_of(golden_payload())]), m.Dropped(1, "reward_error", "why"), m.Returned(1, "why"),
    m.Evaluated(1, EvaluationResult("task", 2, 3, [1.0], [1.0], [0.0], [5], [False], ["text \u00e9"])),
    m.Trained(4), m.Committed(5, True), m.SnapshotRequest(5), m.WeightsStart(1, 5, True), m.BroadcastsDone(),
    m.Release(1), m.TimeReport({"decode": 1.5}), m.Progress(1.5, "busy", False),
    m.StopRequest("SIGTERM"), m.Failed("error"), m.Goodbye(), m.Leases([Lease(1, 2, 3, 4)]),
    m.EvaluationLeases([EvaluationLease(1, "task", 2, 3)]),
    m.ReleaseVersion(5), m.PlanFor(PlanEntry(1, PlanKind.TRAIN, 2, 0, True, False, [[1], [2]]),
                                   [header_of(golden_payload())], Descriptor(1, 64, 128)),
    m.PlanRelay(PlanEntry(1, PlanKind.END, 2)), m.LedgerState(5, {"data": {"a": [1, b"bytes"]}}),
    m.StepReport(5, {"consumed": 1}, 4, {"groups": 1.0}, {"producer:0": m.TimeReport({})}),
    m.EvaluationRows(5, []), m.EvaluationDone(5), m.FinalReport({}, {}, "detail", {}), m.Finished("end"),
    m.Abort("error", True),
]  # fmt: skip
