"""Bytes of a message: what comes back is what went in, and whatever is not a message is a `ProtocolError`."""

from __future__ import annotations

import ast
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.wire_messages import (
    EVERY_MESSAGE,
    SENDER,
    encoded,
    encoded_each,
    golden_payload,
    groups_of,
    header_of,
    pack,
    random_payload,
    received,
    reencoded,
    signed,
)
from zbgrpo.errors import ProtocolError
from zbgrpo.transport import messages as m
from zbgrpo.transport import wire
from zbgrpo.types import PAYLOAD_DTYPES, GroupPayload

# -------------------------------------------------------------------------------------------------------- builders


@st.composite
def payloads(draw: st.DrawFn) -> GroupPayload:
    """Any group that a producer may send."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    num_prompt = draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total, count = sum(lengths), len(lengths)
    spans = []
    for response, length in enumerate(lengths):
        starts = {0} | draw(st.sets(st.integers(0, length - 1), max_size=4))
        versions = sorted(draw(st.integers(0, 2**31 - 1)) for _ in starts)
        spans += [(response, start, version) for start, version in zip(sorted(starts), versions, strict=True)]
    floats = [generator.standard_normal(size, dtype=np.float32) for size in (total, count, count, count)]
    return GroupPayload(
        generator.integers(0, 2**31, num_prompt, dtype=np.int32),
        generator.integers(0, 2**31, total, dtype=np.int32),
        floats[0],
        np.array(lengths, np.int32),
        *floats[1:],
        generator.integers(0, 3, count).astype(np.int32),
        np.array(spans, np.int32),
    )


def assert_equal(actual: GroupPayload, expected: GroupPayload) -> None:
    for name, one, other in zip(GroupPayload._fields, actual, expected, strict=True):
        assert one.dtype == other.dtype == np.dtype(PAYLOAD_DTYPES[name]), name
        assert one.shape == other.shape, name
        assert one.tobytes() == other.tobytes(), name


# ------------------------------------------------------------------------------------------------------ round trip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(payloads(), min_size=1, max_size=5))
def test_groups_come_back_as_they_went_in(groups: list[GroupPayload]) -> None:
    parts = encoded(*groups)
    assert len(parts) == 2, "small frames lie in one part"
    header, frames = wire.decode(parts, SENDER.run_id)
    assert (header.sender, header.incarnation, header.sequence, header.acknowledged) == ("producer:0", 2, 3, 1)
    (message,) = header.messages
    assert isinstance(message, m.Groups)
    wire.check_frames(message.groups, frames)
    for group, frame, crc, expected in zip(message.groups, frames, header.crcs, groups, strict=True):
        assert wire.payload_crc(frame) == group.crc == crc
        assert (group.oldest_version, group.newest_version) == (expected.spans[:, 2].min(), expected.spans[:, 2].max())
        assert_equal(wire.payload_from_frame(group, frame), expected)
        assert_equal(wire.payload_from_frame(group, memoryview(b"x" + frame)[1:]), expected)  # not aligned


def test_large_frames_are_parts_of_their_own() -> None:
    frames = [bytes([number]) * 600_000 for number in range(3)]
    parts = wire.encode(SENDER, 1, 0, [groups_of(*frames)], frames)
    assert parts[1:] == frames
    header, received_frames = wire.decode(parts, SENDER.run_id)
    assert header.lengths == [] and received_frames == frames


@pytest.mark.parametrize("lengths", [[1, 1], [-1, 4], [3, 0, 1], [2**62, 3 - 2**62], [3] * 100_000], ids=len)
def test_lengths_that_do_not_make_up_the_part_are_refused(lengths: list[int]) -> None:
    parts = [bytes(part) for part in wire.encode(SENDER, 1, 0, [m.Trained(4)], [b"ab", b"c"])]
    assert len(parts) == 2
    for wrong in (parts, [*parts, b"abc"], parts[:1]):
        with pytest.raises(ProtocolError, match="not the"):
            wire.decode(reencoded(wrong, set_field(10, lengths)), SENDER.run_id)


def test_arrays_are_views_of_the_frames() -> None:
    parts = encoded(golden_payload())
    header, frames = wire.decode(parts, SENDER.run_id)
    (message,) = header.messages
    assert isinstance(message, m.Groups)
    payload = wire.payload_from_frame(message.groups[0], frames[0])
    assert np.shares_memory(payload.response_ids, np.frombuffer(parts[1], np.uint8))


def test_tensors_that_are_not_contiguous_or_of_another_dtype_travel_as_declared() -> None:
    golden = golden_payload()
    strided = golden._replace(
        response_ids=np.repeat(golden.response_ids, 2)[::2], rewards=golden.rewards.astype(np.float64),
        spans=np.asfortranarray(golden.spans),
    )  # fmt: skip
    assert wire.payload_frame(strided) == wire.payload_frame(golden)


def test_every_message_comes_back() -> None:
    assert {type(message) for message in EVERY_MESSAGE} == set(m.Message.__args__)
    header, frames = wire.decode(encoded_each(*EVERY_MESSAGE), SENDER.run_id)
    assert header.messages == EVERY_MESSAGE
    assert [bytes(frame) for frame in frames] == [wire.payload_frame(golden_payload())]


def test_a_message_without_content_is_an_acknowledgement() -> None:
    header, frames = wire.decode(wire.encode(SENDER, 0, 41, []), SENDER.run_id)
    assert (header.sequence, header.acknowledged, header.messages, frames) == (0, 41, [], [])


def test_unknown_fields_of_a_later_program_are_ignored() -> None:
    parts = [bytes(part) for part in wire.encode(SENDER, 1, 0, [m.Trained(4)])]
    newer = reencoded(parts, lambda fields: fields[7][0].update(new_field=1))
    assert wire.decode(newer, SENDER.run_id)[0].messages == [m.Trained(4)]


GOLDEN_HEADER = bytes.fromhex(
    "9da67a626772706f05a572756e2d31aa70726f64756365723a300203019182a474797065a647726f757073a667726f757073"
    "91990b000b00060405ce862329fc9903030302020202020391ce862329fc909090c0"
    "d341da55"
)
"""The header of a message with `golden_payload`, and its checksum."""


def test_the_bytes_of_a_message_do_not_change_by_accident() -> None:
    """A change here is a change of the format: raise `PROTOCOL`, then renew these bytes."""
    parts = encoded(golden_payload())
    assert m.PROTOCOL == 5
    assert parts[0].hex(" ") == GOLDEN_HEADER.hex(" ")
    tensors = [
        "010000000200000003000000",
        "070000000800000009000000",
        "000000bf000080bf000000c0",
        "0200000001000000",
        "0000803f0000803e",
        "0000803f00000000",
        "0000803f00000000",
        "0000000002000000",
        "000000000000000004000000000000000100000005000000010000000000000005000000",
    ]
    assert [part.hex() for part in parts[1:]] == ["".join(tensors)]


# ------------------------------------------------------------------------------------------------- broken messages


def set_field(index: int, value: Any) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        fields[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_field(0, "other"), "another program"),
        (set_field(1, m.PROTOCOL + 1), f"protocol {m.PROTOCOL + 1}, this side speaks {m.PROTOCOL}"),
        (set_field(2, "run-2"), "another run"),
        (set_field(2, "x" * 10_000), "another run"),
        (set_field(8, []), "1 frames, 0 checksums"),
        (lambda fields: fields[8].append(0), "1 frames, 2 checksums"),
        (lambda fields: fields[8].__setitem__(0, fields[8][0] ^ 1), "corrupt"),
        (set_field(3, 5), "header is not valid"),
        (set_field(5, "1"), "header is not valid"),
        (set_field(7, [{"type": "Unheard"}]), "header is not valid"),
        (set_field(7, [{}]), "header is not valid"),
        (lambda fields: fields.__delitem__(slice(7, None)), "header is not valid"),
    ],
)
def test_wrong_headers_are_refused(change: Callable[[list[Any]], None], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        wire.decode(reencoded(encoded(golden_payload()), change), SENDER.run_id)


@pytest.mark.parametrize("added", [1, 1 << 32, -(1 << 32), (1 << 63) - (1 << 32)])
def test_a_group_whose_header_has_another_checksum_is_refused(added: int) -> None:
    """Also one that differs from it behind the 32nd bit only: the logs are joined by it."""

    def change(fields: list[Any]) -> None:
        group = fields[7][0]["groups"][0]
        group[7] += added

    with pytest.raises(ProtocolError, match="other frames than they say"):
        wire.decode(reencoded(encoded(golden_payload()), change), SENDER.run_id)


def test_missing_and_additional_frames_are_refused() -> None:
    parts = encoded(golden_payload())
    for wrong in (parts[:-1], [*parts, b""], parts[:1], [parts[0], *parts[2:]]):
        with pytest.raises(ProtocolError, match="checksums"):
            wire.decode(wrong, SENDER.run_id)
    for nothing in ([], [b""]):
        with pytest.raises(ProtocolError):
            wire.decode(nothing, SENDER.run_id)


def test_every_truncated_header_is_refused() -> None:
    parts = encoded(golden_payload())
    for length in range(len(parts[0]) - 4):
        for header in (parts[0][: length + 4], parts[0][:length], signed(parts[0][:length])):
            with pytest.raises(ProtocolError):
                wire.decode([header, *parts[1:]], SENDER.run_id)
    for longer in (parts[0] + b"\x00", signed(parts[0][:-4] + b"\x00"), b"\x00" + parts[0]):
        with pytest.raises(ProtocolError):
            wire.decode([longer, *parts[1:]], SENDER.run_id)


SIZES = [3, 3, 3, 2, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    "sizes",
    [
        [*SIZES[:1], 4, *SIZES[2:]],
        [*SIZES[:1], 2**62, *SIZES[2:]],
        [*SIZES[:-1], 2**63],
        [-3, *SIZES[1:]],
        [*SIZES[:-1], -1],
        SIZES[:-1],
        [*SIZES, 0],
        [],
        [0] * 9,
        [3] * 100_000,
    ],
    ids=lambda sizes: f"{len(sizes)} sizes from {sizes[:2]}",
)
def test_sizes_that_do_not_agree_with_the_frames_are_refused_before_anything_is_allocated(sizes: list[int]) -> None:
    parts = reencoded(encoded(golden_payload()), lambda fields: fields[7][0]["groups"][0].__setitem__(8, sizes))
    tracemalloc.start()
    with pytest.raises(ProtocolError) as raised:
        received(parts)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * 1024 * 1024
    assert len(str(raised.value)) < 500


def test_sizes_of_two_groups_that_only_add_up_are_refused() -> None:
    """Each has its own frame, so it is noticed before the tensors are looked at."""

    def shift(fields: list[Any]) -> None:
        first, second = fields[7][0]["groups"]
        first[8][1], second[8][1] = 2, 4

    with pytest.raises(ProtocolError, match="declares"):
        received(reencoded(encoded(golden_payload(), golden_payload()), shift))


def test_groups_without_their_frames_are_refused() -> None:
    parts = wire.encode(SENDER, 1, 0, [m.Groups([header_of(golden_payload())])])
    with pytest.raises(ProtocolError, match="0 frames, 1 groups"):
        received([bytes(part) for part in parts])


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [2, 2]},
        {"lengths": [3, 0]},
        {"lengths": [4, -1]},
        {"lengths": [3, 0], "spans": [[0, 0, 4], [1, 0, 4]]},
        {"lengths": [4, -1], "spans": [[0, 0, 4], [1, 0, 4]]},
        {"lengths": [2, 1, 1]},
        {"lengths": []},
        {"prompt_ids": []},
        {"logprobs": [-1.0]},
        {"rewards": [1.0]},
        {"format_acc": [1.0, 1.0, 1.0]},
        {"ans_acc": []},
        {"finish": [0]},
        {"spans": [[0, 0, 4]]},
        {"spans": [[1, 0, 4]]},
        {"spans": [[0, 1, 4], [1, 0, 4]]},
        {"spans": [[0, 0, 4], [0, 0, 5], [1, 0, 4]]},
        {"spans": [[0, 0, 4], [0, 2, 5], [1, 0, 4]]},
        {"spans": [[0, 0, 4], [1, 0, 4], [2, 0, 4]]},
        {"spans": [[1, 0, 4], [0, 0, 4]]},
        {"spans": [[0, 0, 4], [1, 0, 4], [0, 1, 4]]},
        {"spans": [[0, 0, 4], [-1, 0, 4], [1, 0, 4]]},
        {"spans": [[0, 0, 4], [0, -1, 4], [1, 0, 4]]},
        {"spans": [[0, 0, 4], [1, -(2**31), 4]]},
    ],
    ids=str,
)
def test_lengths_and_spans_that_contradict_each_other_are_refused(changes: dict[str, list[Any]]) -> None:
    dtypes = {name: np.dtype(PAYLOAD_DTYPES[name]) for name in changes}
    payload = golden_payload()._replace(**{name: np.array(value, dtypes[name]) for name, value in changes.items()})
    with pytest.raises(ProtocolError, match="contradict"):
        received(encoded(payload))


def test_no_spans_at_all_are_refused() -> None:
    payload = golden_payload()._replace(spans=np.zeros((0, 3), np.int32))
    frame = wire.payload_frame(payload)
    sizes, crc = [len(tensor) for tensor in payload], wire.payload_crc(frame)
    header = msgspec.structs.replace(header_of(golden_payload()), sizes=sizes, crc=crc)
    with pytest.raises(ProtocolError, match="contradict"):
        wire.payload_from_frame(header, frame)


@pytest.mark.parametrize("field", ["num_tokens", "oldest_version", "newest_version"])
def test_a_header_that_contradicts_its_tensors_is_refused(field: str) -> None:
    """The ledger balances and bounds staleness by these numbers."""
    header, frame = header_of(golden_payload()), wire.payload_frame(golden_payload())
    wire.payload_from_frame(header, frame)
    wrong = msgspec.structs.replace(header, **{field: getattr(header, field) + 1})
    with pytest.raises(ProtocolError, match="contradict"):
        wire.payload_from_frame(wrong, frame)


def test_tensors_of_other_sizes_than_declared_are_refused() -> None:
    header, frame = header_of(golden_payload()), wire.payload_frame(golden_payload())
    for wrong in (frame[:-1], frame + b"\0", frame[4:], b""):
        with pytest.raises(ProtocolError, match="not the tensors"):
            wire.payload_from_frame(header, wrong)


def test_groups_that_lie_one_behind_the_other_come_back_and_any_damage_is_noticed() -> None:
    groups = [random_payload(seed) for seed in range(5)]
    headers = [header_of(payload) for payload in groups]
    frames = bytearray(b"".join(map(wire.payload_frame, groups)))
    for actual, expected in zip(wire.payloads_from_frames(headers, frames), groups, strict=True):
        assert_equal(actual, expected)
    for place in range(len(frames)):
        frames[place] ^= 1 << place % 8
        with pytest.raises(ProtocolError, match="checksums differ"):
            wire.payloads_from_frames(headers, frames)
        frames[place] ^= 1 << place % 8
    with pytest.raises(ProtocolError, match="not the tensors"):
        wire.payloads_from_frames(headers[:-1], frames)
    swapped = [headers[1], headers[0], *headers[2:]]
    with pytest.raises(ProtocolError, match="checksums differ"):
        wire.payloads_from_frames(swapped, frames)


def test_a_header_too_long_for_the_receiver_fails_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would be refused and sent again for ever."""
    monkeypatch.setattr(wire, "MAX_HEADER_BYTES", 1_000)
    message = m.Failed("x" * 2_000)
    with pytest.raises(ProtocolError, match="at most 1000"):
        wire.encode(SENDER, 1, 0, [message])
    monkeypatch.undo()
    parts = wire.encode(SENDER, 1, 0, [message])
    monkeypatch.setattr(wire, "MAX_HEADER_BYTES", 1_000)
    with pytest.raises(ProtocolError, match="too long"):
        wire.decode(parts, SENDER.run_id)


# ---------------------------------------------------------------------------------------------------------- hostile


def raw_header(messages: bytes) -> bytes:
    """A header around bytes that no encoder would write."""
    before = b"".join(pack(field) for field in (m.MAGIC, m.PROTOCOL, *SENDER, 1, 0))
    return signed(b"\x99" + before + messages + pack([]))


def state_with(value: bytes) -> bytes:
    """A header whose only untyped field holds this value."""
    fields = b"".join(pack(part) for part in ("type", "LedgerState", "version", 1, "state"))
    return raw_header(b"\x91\x83" + fields + b"\x81" + pack("key") + value)


HOSTILE = {
    "array of 2**32 - 1": state_with(b"\xdd\xff\xff\xff\xff"),
    "map of 2**32 - 1": state_with(b"\xdf\xff\xff\xff\xff"),
    "bytes of 2**32 - 1": state_with(b"\xc6\xff\xff\xff\xff"),
    "text of 2**32 - 1": state_with(b"\xdb\xff\xff\xff\xff"),
    "extension of 2**32 - 1": state_with(b"\xc9\xff\xff\xff\xff\x05"),
    "2**32 - 1 messages": raw_header(b"\xdd\xff\xff\xff\xff"),
    "depth 100000": state_with(b"\x91" * 100_000 + b"\x00"),
    "depth 100000 of maps": state_with(b"\x81\x01" * 100_000 + b"\x00"),
    "map as a key": state_with(b"\x81\x80\x01"),
    "list of maps as a key": state_with(b"\x81\x91\x80\x01"),
    "extension as a key": state_with(b"\x81\xd4\x05\x00\x01"),
    "timestamp out of range": state_with(b"\xc7\x0c\xff\x00\x00\x00\x00\x7f" + b"\xff" * 7),
    "not UTF-8": state_with(b"\xa2\xff\xfe"),
    "opcode that does not exist": state_with(b"\xc1"),
    "two headers": signed(raw_header(b"\x90") * 2),
    "number": signed(pack(5)),
    "text": signed(pack("zbgrpo")),
    "list": signed(pack([m.MAGIC])),
    "map": signed(pack({"magic": m.MAGIC})),
    "nothing": signed(b""),
    "no checksum": raw_header(b"\x90")[:-4],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_with_little_memory(name: str) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        wire.decode([HOSTILE[name]], SENDER.run_id)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 * 1024 * 1024


def test_decoding_runs_no_code_of_the_sender(tmp_path: Path) -> None:
    """Bytes that a pickle or YAML loader would execute are only bytes."""
    canary = tmp_path / "canary"
    hostile = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    messages: list[m.Message] = [m.LedgerState(1, {"a": hostile}), groups_of(hostile)]
    parts = [bytes(part) for part in wire.encode(SENDER, 1, 0, messages, [hostile])]
    header, frames = wire.decode(parts, SENDER.run_id)
    assert header.messages == messages
    assert bytes(frames[0]) == hostile
    with pytest.raises(ProtocolError):
        wire.decode([hostile], SENDER.run_id)
    assert not canary.exists()
    for module in (wire, m):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"pickle", "eval", "exec", "getattr", "__import__"}
