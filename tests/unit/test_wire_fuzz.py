"""Whatever is received, `decode`, `check_frames` and `payload_from_frame` raise nothing but `ProtocolError`."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from tests.support.wire_fuzz import KINDS, random_parts
from tests.support.wire_messages import received
from zbgrpo.errors import ProtocolError
from zbgrpo.types import GroupPayload

SEED = 21
PEAK_BYTES = 16 << 20
"""The messages have some KB; the headers of the tests of hostile sizes declare up to 2**64."""


def assert_consistent(payload: GroupPayload) -> None:
    """What every reader of a group relies on."""
    count = len(payload.lengths)
    assert count > 0 and min(payload.lengths.tolist()) >= 1
    assert int(payload.lengths.sum(dtype=np.int64)) == len(payload.response_ids) == len(payload.logprobs)
    assert {len(t) for t in (payload.rewards, payload.format_acc, payload.ans_acc, payload.finish)} == {count}
    assert sorted(set(payload.spans[:, 0].tolist())) == list(range(count))
    assert len(payload.token_versions()) == len(payload.response_ids)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzzed_messages_give_a_protocol_error_or_a_consistent_group(count: int) -> None:
    """No other exception, no memory out of proportion."""
    outcomes: dict[str, list[int]] = {kind.__name__: [0, 0] for kind in KINDS}
    tracemalloc.start()
    try:
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            parts = kind(random.Random(f"{SEED} {number}"))
            try:
                groups = received(parts)
            except ProtocolError:
                outcomes[kind.__name__][0] += 1
                continue
            except BaseException as error:
                pytest.fail(f"Random('{SEED} {number}'), {kind.__name__}: {type(error).__name__}: {error}; {parts}")
            outcomes[kind.__name__][1] += 1
            for payload in groups:
                assert_consistent(payload)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES
    for name, (refused, accepted) in outcomes.items():
        assert refused > count / 20, f"{name} finds nothing that is wrong: {outcomes}"
        # Otherwise a kind is so coarse that nothing gets behind the first check.
        assert accepted > count / 1000 or name == random_parts.__name__, outcomes
