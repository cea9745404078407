"""Bytes of a message: one msgpack header, then one raw frame per tensor. Nothing is ever unpickled.

Guarantees of `decode`: magic, protocol and run are right, the header has the declared types, every frame has its
crc32; of `split_groups`: dtype and shape of each tensor agree with the length of its frame, checked with integers
before anything is allocated. Anything else is a `ProtocolError`, and the message is not used.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from zbgrpo.errors import ProtocolError
from zbgrpo.transport.messages import MAGIC, PROTOCOL, GroupHeader, Header, Message
from zbgrpo.types import PAYLOAD_DTYPES, GroupPayload, Uid

Buffer = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_DTYPES = [np.dtype(name) for name in PAYLOAD_DTYPES.values()]
_COLUMNS = [3 if name == "spans" else 1 for name in PAYLOAD_DTYPES]
NUM_TENSORS = len(_DTYPES)
MAX_HEADER_BYTES = 64 * 1024 * 1024


class Sender(NamedTuple):
    """Who sends: the run, the peer's name, and the number of its start (a restarted peer has a higher one)."""

    run_id: str
    name: str
    incarnation: int = 0


def encode(
    sender: Sender, sequence: int, acknowledged: int, messages: Sequence[Message], frames: Sequence[Buffer] = ()
) -> list[Buffer]:
    """All parts of a multipart message; raises `ProtocolError` when the other side would refuse its header."""
    crcs = [zlib.crc32(frame) for frame in frames]
    header = _encoder.encode(Header(MAGIC, PROTOCOL, *sender, sequence, acknowledged, list(messages), crcs))
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are accepted")
    return [header, *frames]


def decode(parts: Sequence[Buffer], run_id: str) -> tuple[Header, list[memoryview]]:
    """Header and frames of a multipart message, checked; raises `ProtocolError`."""
    if not parts or len(parts[0]) > MAX_HEADER_BYTES:
        raise ProtocolError("message without a header, or with one that is too long")
    try:
        header = _decoder.decode(parts[0])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"header is not valid: {error}") from error
    if header.magic != MAGIC:
        raise ProtocolError("message of another program")
    if header.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {header.protocol}, this side speaks {PROTOCOL}: use one version on all nodes")
    if header.run_id != run_id:
        raise ProtocolError(f"message of another run ({header.run_id[:64]!r})")
    frames = [memoryview(part) for part in parts[1:]]
    if len(frames) != len(header.crcs):
        raise ProtocolError(f"{len(frames)} frames, {len(header.crcs)} checksums")
    for number, (frame, crc) in enumerate(zip(frames, header.crcs, strict=True)):
        if zlib.crc32(frame) != crc:
            raise ProtocolError(f"frame {number} of message {header.sequence} from {header.sender} is corrupt")
    return header, frames


def payload_views(payload: GroupPayload) -> list[memoryview]:
    """The bytes of each tensor, in the order in which they travel."""
    return [
        np.ascontiguousarray(tensor, dtype=dtype).data.cast("B") if tensor.size else memoryview(b"")
        for tensor, dtype in zip(payload, _DTYPES, strict=True)
    ]


def payload_crc(views: Sequence[Buffer]) -> int:
    """crc32 over all tensors of a group: its identity in the logs."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return crc


def group_header(uid: Uid, lease_id: int, attempt: int, payload: GroupPayload, crc: int) -> GroupHeader:
    """Header of a finished group."""
    versions = payload.spans[:, 2]
    return GroupHeader(
        lease_id, uid.episode, uid.row, attempt, payload.num_tokens, int(versions.min()), int(versions.max()), crc,
        [len(tensor) for tensor in payload],
    )  # fmt: skip


def join_groups(groups: Sequence[Sequence[Buffer]]) -> list[Buffer]:
    """One frame per tensor, each with that tensor of all groups, one group after the other."""
    if len(groups) == 1:
        return list(groups[0])
    return [b"".join(group[i] for group in groups) for i in range(NUM_TENSORS)]


def frame_lengths(header: GroupHeader) -> list[int]:
    """Bytes of each tensor of a group."""
    sizes = header.sizes
    if len(sizes) != NUM_TENSORS or any(size < 0 for size in sizes):
        raise ProtocolError(f"group {header.lease_id} declares sizes {sizes[:16]}")
    return [s * c * d.itemsize for s, c, d in zip(sizes, _COLUMNS, _DTYPES, strict=True)]


def split_groups(headers: Sequence[GroupHeader], frames: Sequence[memoryview]) -> list[list[memoryview]]:
    """The inverse of `join_groups`: views of each group's tensors; raises `ProtocolError`."""
    if len(frames) != NUM_TENSORS:
        raise ProtocolError(f"{len(frames)} tensors, {NUM_TENSORS} expected")
    lengths = [frame_lengths(header) for header in headers]
    for number, frame in enumerate(frames):
        declared = sum(group[number] for group in lengths)
        if declared != len(frame):
            raise ProtocolError(f"tensor {number} has {len(frame)} bytes, its headers declare {declared}")
    groups, offsets = [], [0] * NUM_TENSORS
    for group in lengths:
        groups.append([frames[i][offsets[i] : offsets[i] + group[i]] for i in range(NUM_TENSORS)])
        offsets = [offset + length for offset, length in zip(offsets, group, strict=True)]
    return groups


def payload_from_views(header: GroupHeader, views: Sequence[Buffer]) -> GroupPayload:
    """Arrays over the given bytes (no copy); header, lengths, spans and counts agree; raises `ProtocolError`."""
    if [len(view) for view in views] != frame_lengths(header):
        raise ProtocolError(f"tensors of group {header.lease_id} do not have their declared sizes")
    arrays = [np.frombuffer(view, dtype=dtype) for view, dtype in zip(views, _DTYPES, strict=True)]
    payload = GroupPayload._make([*arrays[:-1], arrays[-1].reshape(-1, 3)])
    num_responses = payload.num_responses
    per_response = (payload.rewards, payload.format_acc, payload.ans_acc, payload.finish)
    problem = (
        num_responses == 0
        or any(len(array) != num_responses for array in per_response)
        or len(payload.prompt_ids) == 0
        or bool((payload.lengths < 1).any())
        or int(payload.lengths.sum()) != len(payload.response_ids)
        or len(payload.logprobs) != len(payload.response_ids)
        or not _spans_cover(payload)
        or header.num_tokens != payload.num_tokens
        or header.oldest_version != payload.spans[:, 2].min()
        or header.newest_version != payload.spans[:, 2].max()
    )
    if problem:
        raise ProtocolError(f"header, lengths or spans of group {header.lease_id} contradict each other")
    return payload


def _spans_cover(payload: GroupPayload) -> bool:
    """Every response has spans that start at 0 and go up."""
    responses, starts = payload.spans[:, 0].astype(np.int64), payload.spans[:, 1].astype(np.int64)
    if len(responses) == 0 or responses.min() < 0 or responses.max() >= payload.num_responses:
        return False
    firsts = np.flatnonzero(np.diff(responses, prepend=-1))
    return bool(
        np.array_equal(responses[firsts], np.arange(payload.num_responses))
        and (starts[firsts] == 0).all()
        and (starts < payload.lengths[responses]).all()
        and (np.diff(starts)[np.diff(responses) == 0] > 0).all()
    )
