"""Damage on the way: whatever bits of a message are flipped, it is refused; it never arrives as another one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.wire_messages import (
    EVERY_MESSAGE,
    SENDER,
    encoded,
    encoded_each,
    golden_payload,
    groups_of,
    received,
)
from zbgrpo.errors import ProtocolError
from zbgrpo.transport import wire
from zbgrpo.types import GroupPayload

SEED = 20
NUM_FLIPS = 10_000
NUM_BURSTS = 3_000


def long_payload() -> GroupPayload:
    """Two responses of 400 and 200 tokens."""
    rng = np.random.default_rng(SEED)
    return golden_payload()._replace(
        response_ids=rng.integers(0, 9, 600).astype(np.int32), logprobs=rng.standard_normal(600, np.float32),
        lengths=np.array([400, 200], np.int32),
    )  # fmt: skip


def large_frames() -> list[bytes]:
    """A message whose frames are parts of their own."""
    frames = [random.Random(number).randbytes(600_000 + number) for number in range(2)]
    return [bytes(part) for part in wire.encode(SENDER, 3, 1, [groups_of(*frames)], frames)]


VALID: dict[str, list[bytes]] = {
    "group": encoded(golden_payload()),
    "groups": encoded(golden_payload(), long_payload()),
    "every kind": encoded_each(*EVERY_MESSAGE),
    "acknowledgement": [bytes(part) for part in wire.encode(SENDER, 0, 41, [], times=[1.5, 2.5, 3.5])],
} | {type(message).__name__: encoded_each(message) for message in EVERY_MESSAGE}


def flipped(parts: list[bytes], part: int, bits: list[int]) -> list[bytes]:
    """The message with these bits of one of its parts turned over."""
    damaged = bytearray(parts[part])
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    return [*parts[:part], bytes(damaged), *parts[part + 1 :]]


def assert_refused(parts: list[bytes], where: str) -> None:
    """`where` says how to make the same message again."""
    try:
        arrived = received(parts)
        header, _ = wire.decode(parts, SENDER.run_id)
    except ProtocolError:
        return
    pytest.fail(f"delivered although damaged, {where}: {header}, {len(arrived)} groups")


def test_the_undamaged_messages_are_delivered() -> None:
    for parts in VALID.values():
        wire.decode(parts, SENDER.run_id)
    assert {len(parts) for parts in VALID.values()} == {1, 2}, "with and without frames"


def test_every_bit_of_every_header_is_covered() -> None:
    """All of them, not a sample: names, numbers, times, lengths, and the checksum itself."""
    num_flipped = 0
    for name, parts in VALID.items():
        for bit in range(8 * len(parts[0])):
            assert_refused(flipped(parts, 0, [bit]), f"{name}: bit {bit} of the header")
            num_flipped += 1
    assert num_flipped > NUM_FLIPS


@pytest.mark.parametrize("area", ["headers", "frames"])
def test_ten_thousand_random_flips_are_all_refused(area: str) -> None:
    with_frames = [name for name, parts in VALID.items() if len(parts) > 1]
    for number in range(NUM_FLIPS):
        rng = random.Random(f"{SEED} {area} {number}")
        name = rng.choice(list(VALID) if area == "headers" else with_frames)
        part = 0 if area == "headers" else 1
        bit = rng.randrange(8 * len(VALID[name][part]))
        where = f"Random('{SEED} {area} {number}'): {name}, part {part}, bit {bit}"
        assert_refused(flipped(VALID[name], part, [bit]), where)


def test_several_flips_in_one_message_are_refused() -> None:
    """Bursts of up to 32 bits, which a crc32 finds for certain, and scattered ones, which it misses once in 2**32."""
    for number in range(NUM_BURSTS):
        rng = random.Random(f"{SEED} several {number}")
        name = rng.choice(list(VALID))
        part = rng.randrange(len(VALID[name]))
        num_bits = 8 * len(VALID[name][part])
        if rng.random() < 0.5:
            start = rng.randrange(num_bits - 32)
            bits = [start, *(start + offset for offset in range(1, 32) if rng.random() < 0.5)]
        else:
            bits = rng.sample(range(num_bits), rng.randint(2, 9))
        assert_refused(flipped(VALID[name], part, bits), f"Random('{SEED} several {number}'): {name}, {part}, {bits}")


def test_flips_in_frames_that_are_parts_of_their_own_are_refused() -> None:
    parts = large_frames()
    assert len(parts) == 3
    for number in range(60):
        rng = random.Random(f"{SEED} large {number}")
        part = rng.choice([1, 2])
        bit = rng.randrange(8 * len(parts[part]))
        with pytest.raises(ProtocolError, match="corrupt"):
            wire.decode(flipped(parts, part, [bit]), SENDER.run_id)


def test_frames_in_another_order_or_of_another_message_are_refused() -> None:
    """A checksum each, so that whole frames that change places are noticed too."""
    first, second, third = large_frames()
    header = encoded(golden_payload())[0]
    for wrong in ([first, third, second], [first, second, second], [header, second], [first, *encoded(long_payload())]):
        with pytest.raises(ProtocolError):
            wire.decode(wrong, SENDER.run_id)
