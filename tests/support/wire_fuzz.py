"""Messages that are none: random bytes, and valid ones that were changed until nobody can know what they are."""

from __future__ import annotations

import copy
import math
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from tests.support.wire_messages import (
    EVERY_MESSAGE,
    SENDER,
    encoded,
    encoded_each,
    fields_of,
    golden_payload,
    pack,
    signed,
)
from zbgrpo.transport import messages as m
from zbgrpo.transport import wire
from zbgrpo.types import GroupPayload

CASES: list[list[bytes]] = [
    encoded(golden_payload()),
    encoded(golden_payload(), golden_payload()),
    encoded_each(*EVERY_MESSAGE),
    [bytes(part) for part in wire.encode(SENDER, 0, 41, [], times=[1.5, 2.5, 3.5])],
]
HOSTILE_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, math.nan, math.inf,
    "", "x" * 300, "hub", b"", b"\xff" * 9, [], [[]], {}, {"type": "Groups"}, {"type": "Groups", "groups": [[]]},
    {"type": "Leases", "leases": [[0, 0, 0, 0]]}, [0] * 9, [2**62] * 9, [-1] * 9, [3] * 1000,
]  # fmt: skip
INTEGERS = [-(2**31), -1, 0, 1, 2, 3, 2**31 - 1]
OPCODES = b"\x00\x7f\x80\x90\xc0\xc1\xc4\xc6\xc7\xca\xcb\xcf\xd3\xd4\xd9\xdb\xdc\xdd\xde\xdf\xff"


def random_parts(rng: random.Random) -> list[bytes]:
    """Nothing that was ever a message; half of it with a checksum that is right."""
    parts = [rng.randbytes(rng.choice([0, 1, 4, 5, 40, 400])) for _ in range(rng.randrange(6))]
    if parts and rng.random() < 0.5:
        parts[0] = signed(bytes([0x99 + rng.randrange(3)]) + parts[0] if rng.random() < 0.5 else parts[0])
    return parts


def changed_bytes(rng: random.Random) -> list[bytes]:
    """A message with one to four places changed."""
    changed = [bytearray(part) for part in rng.choice(CASES)]
    sign = rng.random() < 0.8
    if sign:
        del changed[0][-4:]
    for _ in range(rng.randint(1, 4)):
        part = changed[0 if rng.random() < 0.6 else rng.randrange(len(changed))]
        where, kind = rng.randrange(len(part) + 1), rng.randrange(7)
        if kind == 0 and where < len(part):
            part[where] ^= 1 << rng.randrange(8)
        elif kind == 1 and where < len(part):
            part[where] = rng.choice(OPCODES)
        elif kind == 2:
            part[where : where + rng.randint(1, 9)] = b""
        elif kind == 3:
            part[where:where] = rng.randbytes(rng.randint(1, 9))
        elif kind == 4:
            part[where : where + 5] = bytes([rng.choice(OPCODES)]) + struct.pack(">I", rng.choice([0, 9, 2**32 - 1]))
        elif kind == 5:
            changed.insert(rng.randrange(1, len(changed) + 1), bytearray(rng.randbytes(rng.randrange(40))))
        elif len(changed) > 1:
            del changed[rng.randrange(1, len(changed))]
    if sign:
        changed[0] = bytearray(signed(changed[0]))
    return [bytes(part) for part in changed]


def changed_fields(rng: random.Random) -> list[bytes]:
    """A message with values of other types and sizes in its header, whose checksum is right."""
    parts = rng.choice(CASES)
    fields = fields_of(parts[0])
    for _ in range(rng.randint(1, 3)):
        change_somewhere(fields, rng)
    return [signed(pack(fields)), *parts[1:]]


def change_somewhere(tree: Any, rng: random.Random) -> None:
    """Put a hostile value somewhere into nested lists and maps, or take something away."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], (list, dict)) and rng.random() < 0.8:
            tree = tree[key]
            continue
        if rng.random() < 0.2:
            del tree[key]
        else:
            tree[key] = copy.deepcopy(rng.choice(HOSTILE_VALUES))
        return


def changed_tensors(rng: random.Random) -> list[bytes]:
    """A group whose numbers mean nothing, in a message that is right in every other way."""
    payload = GroupPayload._make([tensor.copy() for tensor in golden_payload()])
    header = m.GroupHeader(11, 0, 11, 0, 6, 4, 5, 0, [len(tensor) for tensor in payload])
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(["lengths", "spans", "spans", "finish", "response_ids", "rewards"])
        flat = getattr(payload, name).reshape(-1)
        flat[rng.randrange(flat.size)] = rng.choice([0, 1, 2, 255] if name == "finish" else INTEGERS)
    frame = bytearray(wire.payload_frame(payload))
    if rng.random() < 0.3:
        sizes = list(header.sizes)
        sizes[rng.randrange(9)] = rng.choice([-1, 0, 1, 2, 3, 4, 2**62, 2**63 - 1])
        if rng.random() < 0.5:
            frame = bytearray(rng.randbytes(min(4096, max(0, declared(sizes)))))
        header = msgspec.structs.replace(header, sizes=sizes)
    header = msgspec.structs.replace(header, crc=zlib.crc32(frame))
    return [bytes(part) for part in wire.encode(SENDER, 3, 1, [m.Groups([header])], [bytes(frame)])]


def declared(sizes: list[int]) -> int:
    """Bytes of a frame with these sizes."""
    return sum(size * row for size, row in zip(sizes, (4, 4, 4, 4, 4, 4, 4, 4, 12), strict=True))


KINDS: list[Callable[[random.Random], list[bytes]]] = [random_parts, changed_bytes, changed_fields, changed_tensors]
