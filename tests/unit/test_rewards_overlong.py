"""The length penalty and the reward that training uses."""

from __future__ import annotations

import pytest

from zbgrpo.rewards.overlong import final_reward, length_penalty


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (75, 0.0), (76, -0.4), (80, -2.0), (99, -9.6), (100, -10.0), (5000, -10.0)]
)
def test_ramp(length: int, expected: float) -> None:
    assert length_penalty(length, max_new_tokens=100, cache_tokens=25) == pytest.approx(expected)


def test_ramp_over_the_whole_length() -> None:
    assert length_penalty(0, 10, 10) == 0.0
    assert length_penalty(5, 10, 10) == pytest.approx(-5.0)


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_cache_out_of_range(cache: int) -> None:
    with pytest.raises(ValueError, match="cache_tokens"):
        length_penalty(1, 100, cache)


@pytest.mark.parametrize(
    ("outcome", "truncated", "length", "penalty_on", "expected"),
    [
        (10.0, False, 50, True, 10.0),
        (10.0, False, 80, True, 8.0),
        (10.0, False, 100, True, 0.0),  # exactly as long as the limit, but ended
        (10.0, True, 100, True, -10.0),
        (0.0, False, 50, True, 0.0),
        (10.0, False, 100, False, 10.0),
        (10.0, True, 100, False, 0.0),
        (-3.0, True, 100, False, 0.0),
    ],
)
def test_final_reward(outcome: float, truncated: bool, length: int, penalty_on: bool, expected: float) -> None:
    assert final_reward(outcome, truncated, length, 100, 25, penalty_on) == pytest.approx(expected)


def test_cache_is_needed_only_with_the_penalty() -> None:
    assert final_reward(10.0, False, 100, 100, None, False) == 10.0
    with pytest.raises(ValueError, match="cache_tokens"):
        final_reward(10.0, False, 100, 100, None, True)
