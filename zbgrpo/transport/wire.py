"""Bytes of a message: one msgpack header, then one raw frame per group (small ones in one part). Nothing is ever
unpickled.

The last four bytes of the header's part are the crc32 of those before them, so that no lease, version or
acknowledgement arrives as another one.

The frame of a group holds its tensors back to back, in the order of `PAYLOAD_DTYPES`. Its crc32 is computed once, by
whoever made the group, and checked wherever it arrives, in a message or out of a ring; by it the logs are joined.

Guarantees of `decode`: header and frames have their crc32, which for a group is also the one in its own header; magic,
protocol and run are right, the header has the declared types; of `check_frames`: dtypes and shapes of a group's tensors
agree with the length of its frame, checked with integers before anything is allocated. Anything else is a
`ProtocolError`, and the message is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from zbgrpo.errors import ProtocolError
from zbgrpo.transport.messages import MAGIC, PROTOCOL, GroupHeader, Groups, Header, Message, PlanRelay
from zbgrpo.transport.ring import Descriptor
from zbgrpo.types import PAYLOAD_DTYPES, GroupPayload, Uid

Buffer = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_DTYPES = [np.dtype(name) for name in PAYLOAD_DTYPES.values()]
_WORD_BYTES = 4
"""Of a number in any tensor of a group."""
_SPAN_WORDS = 3
NUM_TENSORS = len(_DTYPES)
MAX_HEADER_BYTES = 64 * 1024 * 1024
_CRC_BYTES = 4  # of the header, little-endian
_JOINED_BYTES = 1 << 20


class Sender(NamedTuple):
    """Who sends: the run, the peer's name, and the number of its start (a restarted peer has a higher one)."""

    run_id: str
    name: str
    incarnation: int = 0


class Item(NamedTuple):
    """Messages that were sent with one call, and the frames of the groups among them. Or of several calls, see
    `together`."""

    messages: list[Message]
    frames: Sequence[Buffer]
    shares: list[tuple[int, int]] = []  # noqa: RUF012, never changed
    """Numbers of messages and frames of each call, if there were several."""


def together(waiting: Sequence[Item]) -> tuple[int, Item]:
    """How many of the first items travel in one message, and what they are then. What waits goes together, since every
    message costs as much as several groups; not more of it than is worth a copy."""
    number, num_bytes = 0, 0
    for item in waiting:
        num_bytes += sum(map(len, item.frames))
        if number and num_bytes > _JOINED_BYTES:
            break
        number += 1
    if number == 1:
        return 1, waiting[0]
    items = [waiting[n] for n in range(number)]
    messages = [message for item in items for message in item.messages]
    frames = [frame for item in items for frame in item.frames]
    return number, Item(messages, frames, [(len(item.messages), len(item.frames)) for item in items])


def with_frames(header: Header, frames: Sequence[memoryview]) -> Iterator[tuple[Message, Sequence[memoryview]]]:
    """The messages under a header that `decode` has checked, each with the frames that were sent with it."""
    message = frame = 0
    for num_messages, num_frames in header.shares or [(len(header.messages), len(frames))]:
        own = frames[frame : frame + num_frames]
        for each in header.messages[message : message + num_messages]:
            yield each, own
        message, frame = message + num_messages, frame + num_frames


def encode(
    sender: Sender,
    sequence: int,
    acknowledged: int,
    messages: Sequence[Message],
    frames: Sequence[Buffer] = (),
    shares: Sequence[tuple[int, int]] = (),
    times: Sequence[float] = (),
    record: Descriptor | None = None,
) -> list[Buffer]:
    """All parts of a multipart message; raises `ProtocolError` when the other side would refuse its header.

    The frames of a message with groups are those of its groups, whose checksums are not computed again. `record`: where
    they have been put, if they are not to be parts of the message.
    """
    crcs = _known_crcs(messages, len(frames)) or [crc32(frame) for frame in frames]
    lengths: list[int] = []
    if record is not None:
        lengths, frames = [len(frame) for frame in frames], ()
    elif len(frames) > 1 and sum(sizes := [len(frame) for frame in frames]) <= _JOINED_BYTES:
        # One copy more, which costs less than what the sockets do for every part.
        lengths, frames = sizes, [b"".join(frames)]
    fields = Header(
        MAGIC, PROTOCOL, *sender, sequence, acknowledged, list(messages), crcs, list(times), lengths,
        list(shares), record,
    )  # fmt: skip
    content = _encoder.encode(fields)
    header = content + crc32(content).to_bytes(_CRC_BYTES, "little")
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are accepted")
    return [header, *frames]


def decode(parts: Sequence[Buffer], run_id: str) -> tuple[Header, list[memoryview]]:
    """Header and frames of a multipart message, checked; raises `ProtocolError`."""
    header = decode_header(parts, run_id)
    return header, decode_frames(header, parts)


def decode_header(parts: Sequence[Buffer], run_id: str) -> Header:
    """The header of a multipart message, checked; raises `ProtocolError`."""
    if not parts or len(parts[0]) > MAX_HEADER_BYTES:
        raise ProtocolError("message without a header, or with one that is too long")
    content, checksum = memoryview(parts[0])[:-_CRC_BYTES], parts[0][-_CRC_BYTES:]
    if crc32(content) != int.from_bytes(checksum, "little"):
        raise ProtocolError("header is damaged, or of a program of another version")
    try:
        header = _decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"header is not valid: {error}") from error
    if header.magic != MAGIC:
        raise ProtocolError("message of another program")
    if header.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {header.protocol}, this side speaks {PROTOCOL}: use one version on all nodes")
    if header.run_id != run_id:
        raise ProtocolError(f"message of another run ({header.run_id[:64]!r})")
    return header


def decode_frames(
    header: Header,
    parts: Sequence[Buffer],
    in_lane: Callable[[Descriptor, Sequence[int]], list[memoryview]] | None = None,
) -> list[memoryview]:
    """The frames of a message of this header, checked; raises `ProtocolError`. `in_lane`: takes them out of the peer's
    lane, if it has one."""
    frames = [memoryview(part) for part in parts[1:]]
    if header.record is not None:
        if in_lane is None or frames:
            raise ProtocolError(f"{header.sender} has no lane, or does not use it")
        frames = in_lane(header.record, header.lengths)
    elif header.lengths:
        frames = _separated(frames, header.lengths)
    if len(frames) != len(header.crcs):
        raise ProtocolError(f"{len(frames)} frames, {len(header.crcs)} checksums")
    if header.shares and not _shared_out(header.shares, len(header.messages), len(frames)):
        raise ProtocolError(f"{len(header.messages)} messages and {len(frames)} frames, shared out otherwise")
    for number, (frame, crc) in enumerate(zip(frames, header.crcs, strict=True)):
        if crc32(frame) != crc:
            raise ProtocolError(f"frame {number} of message {header.sequence} from {header.sender} is corrupt")
    if (declared := _known_crcs(header.messages, len(frames))) and declared != header.crcs:
        raise ProtocolError(f"groups of message {header.sequence} from {header.sender} have other frames than they say")
    return frames


def _separated(parts: Sequence[memoryview], lengths: Sequence[int]) -> list[memoryview]:
    """The frames that lie one after the other in the one part."""
    if len(parts) != 1 or min(lengths) < 0 or sum(lengths) != len(parts[0]):
        raise ProtocolError(f"{len(lengths)} frames that are not the {len(parts)} parts of their message")
    ends = list(accumulate(lengths))
    return [parts[0][end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _shared_out(shares: Sequence[tuple[int, int]], num_messages: int, num_frames: int) -> bool:
    numbers = [number for share in shares for number in share]
    return min(numbers) >= 0 and sum(numbers[::2]) == num_messages and sum(numbers[1::2]) == num_frames


def _known_crcs(messages: Sequence[Message], num_frames: int) -> list[int]:
    if num_frames == 0:
        return []
    crcs = [group.crc for m in messages if isinstance(m, (Groups, PlanRelay)) for group in m.groups]
    return crcs if len(crcs) == num_frames else []


def payload_frame(payload: GroupPayload) -> bytes:
    """The tensors of a group, back to back, in the order in which they travel."""
    return b"".join(map(_in_order, payload, _DTYPES))


def _in_order(tensor: np.ndarray, dtype: np.dtype) -> memoryview:
    if tensor.dtype != dtype or not tensor.flags.c_contiguous:
        tensor = np.ascontiguousarray(tensor, dtype)
    return tensor.data


def payload_crc(frame: Buffer) -> int:
    """crc32 over all tensors of a group: its identity in the logs, and what shows that its bytes are still the same."""
    return crc32(frame)


def group_header(uid: Uid, lease_id: int, attempt: int, payload: GroupPayload, crc: int) -> GroupHeader:
    """Header of a finished group."""
    versions = payload.spans[:, 2].tolist()
    return GroupHeader(
        lease_id, uid.episode, uid.row, attempt, payload.num_tokens, min(versions), max(versions), crc,
        [len(tensor) for tensor in payload],
    )  # fmt: skip


def frame_bytes(header: GroupHeader) -> int:
    """Bytes of the frame of a group, as its header declares them."""
    sizes = header.sizes
    if len(sizes) != NUM_TENSORS or min(sizes) < 0:
        raise ProtocolError(f"group {header.lease_id} declares sizes {sizes[:16]}")
    return _WORD_BYTES * (sum(sizes) + (_SPAN_WORDS - 1) * sizes[-1])


def check_frames(headers: Sequence[GroupHeader], frames: Sequence[Buffer]) -> None:
    """Raises `ProtocolError` unless there is one frame per group, of the length that its header declares."""
    if len(frames) != len(headers):
        raise ProtocolError(f"{len(frames)} frames, {len(headers)} groups")
    for header, frame in zip(headers, frames, strict=True):
        if frame_bytes(header) != len(frame):
            raise ProtocolError(
                f"group {header.lease_id} has {len(frame)} bytes, its header declares {frame_bytes(header)}"
            )


def payload_from_frame(header: GroupHeader, frame: Buffer) -> GroupPayload:
    """`payloads_from_frames` for a single group."""
    return payloads_from_frames([header], frame)[0]


def payloads_from_frames(headers: Sequence[GroupHeader], frames: Buffer) -> list[GroupPayload]:
    """Arrays over the frames of these groups, which lie one behind the other (no copy). All together have the checksum
    that those in the headers give; counts, lengths and spans of each agree with its header. Raises `ProtocolError`."""
    sizes = list(map(frame_bytes, headers))
    if len(frames) != sum(sizes):
        raise ProtocolError(f"{len(frames)} bytes are not the tensors of {len(headers)} groups")
    _check_crcs(headers, sizes, frames)
    words = np.frombuffer(frames, np.int32)
    floats = words.view(np.float32)
    payloads = []
    a = 0  # where the tensors of a group begin, in words
    for header in headers:
        if not _sizes_agree(header):
            raise _contradiction(header)
        a, b, c, d, e, f, g, h, i = accumulate(header.sizes[:-1], initial=a)
        end = i + _SPAN_WORDS * header.sizes[-1]
        lengths, spans = words[d:e], words[i:end]
        if not _agrees(header, lengths.tolist(), spans.tolist()):
            raise _contradiction(header)
        payloads.append(
            GroupPayload(
                words[a:b], words[b:c], floats[c:d], lengths, floats[e:f], floats[f:g], floats[g:h], words[h:i],
                spans.reshape(-1, _SPAN_WORDS),
            )
        )  # fmt: skip
        a = end
    return payloads


def _check_crcs(headers: Sequence[GroupHeader], sizes: Sequence[int], frames: Buffer) -> None:
    """One checksum of all frames against what theirs give together: for each one alone this thread would let go of the
    interpreter, and it takes longer to get it back from others than to compute it."""
    together = 0
    for header, size in zip(headers, sizes, strict=True):
        together = crc32_combine(together, header.crc, size)
    if crc32(frames) != together:
        raise ProtocolError(
            f"groups {[header.lease_id for header in headers][:16]} are corrupt: their checksums differ"
        )


def _contradiction(header: GroupHeader) -> ProtocolError:
    return ProtocolError(f"header, lengths or spans of group {header.lease_id} contradict each other")


def _sizes_agree(header: GroupHeader) -> bool:
    """Whether there is something of everything, and as much as there must be."""
    num_prompt, num_new, num_logprobs, *per_response, num_spans = header.sizes
    num_responses = per_response[0]
    counted = num_logprobs == num_new and per_response.count(num_responses) == len(per_response)
    return counted and min(num_prompt, num_responses, num_spans) > 0


def _agrees(header: GroupHeader, lengths: list[int], spans: list[int]) -> bool:
    """Whether counts, lengths, spans (three numbers each) and header fit together. In plain numbers: a group has few
    responses and spans, for which that is faster than arrays."""
    num_prompt, num_new, *_ = header.sizes
    versions = spans[2::_SPAN_WORDS]
    return (
        min(lengths) > 0
        and sum(lengths) == num_new
        and _spans_cover(spans[::_SPAN_WORDS], spans[1::_SPAN_WORDS], lengths)
        and header.num_tokens == num_prompt + num_new
        and header.oldest_version == min(versions)
        and header.newest_version == max(versions)
    )


def _spans_cover(responses: list[int], starts: list[int], lengths: list[int]) -> bool:
    """Every response has spans that start at 0 and go up."""
    if responses == list(range(len(lengths))) and not any(starts):  # one each
        return True
    current, last_start = -1, 0
    for response, start in zip(responses, starts, strict=True):
        if response == current:
            if start <= last_start:
                return False
        elif response != current + 1 or start != 0 or response == len(lengths):
            return False
        if start >= lengths[response]:
            return False
        current, last_start = response, start
    return current == len(lengths) - 1
