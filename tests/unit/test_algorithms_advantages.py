import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zbgrpo.algorithms.advantages import group_advantages
from zbgrpo.errors import ConfigError


def reference(rewards: list[float]) -> list[float]:
    """The formula in plain Python; equal rewards have advantage 0."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


float32_rewards = st.floats(-20, 20, width=32)


@given(st.lists(float32_rewards, min_size=2, max_size=16))
def test_formula(rewards: list[float]) -> None:
    exact = group_advantages(torch.tensor(rewards, dtype=torch.float64))
    assert exact.tolist() == pytest.approx(reference(rewards), rel=1e-9, abs=1e-12)
    single = group_advantages(torch.tensor(rewards, dtype=torch.float32))
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(reference(rewards), rel=1e-6, abs=1e-7)


def test_hand_computed_group() -> None:
    """Mean 2.5; squared deviations 56.25 + 3 x 6.25 = 75; 75 / 3 = 25, so std 5 (with n it would be 4.33)."""
    advantages = group_advantages(torch.tensor([10.0, 0.0, 0.0, 0.0], dtype=torch.float64)).tolist()
    assert advantages == pytest.approx([7.5 / 5.0001] + [-2.5 / 5.0001] * 3, rel=1e-14)


@given(st.floats(-20, 20), st.integers(2, 64))
def test_equal_rewards_give_exactly_zero(reward: float, num_responses: int) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((num_responses,), reward, dtype=dtype)
        assert group_advantages(rewards).tolist() == [0.0] * num_responses


@pytest.mark.parametrize("reward", [0.1, 0.35, 1 / 3, 10.0, -7.3])
def test_rewards_that_differ_by_rounding_stay_without_effect(reward: float) -> None:
    rewards = torch.full((8,), reward)
    rewards[3] = torch.nextafter(rewards[3], torch.tensor(math.inf))
    ulp = float(rewards[3] - rewards[0])
    advantages = group_advantages(rewards)
    assert advantages.abs().max() <= ulp / 1e-4
    assert advantages.tolist() == pytest.approx(reference(rewards.tolist()), rel=1e-6, abs=1e-12)


def test_one_outlier_among_equal_rewards() -> None:
    """A one-pass float32 variance has a residue here that blows advantages up by a factor of thousands."""
    rewards = [0.35] * 7 + [0.0]
    advantages = group_advantages(torch.tensor(rewards)).tolist()
    assert advantages == pytest.approx(reference(rewards), rel=1e-6)
    assert advantages[-1] == pytest.approx(-2.4728, abs=1e-3)
    assert group_advantages(torch.tensor([0.35] * 7)).tolist() == [0.0] * 7


def test_offset_far_from_zero_does_not_cancel() -> None:
    rewards = torch.tensor([4096.0, 4096.0005, 4096.001, 4096.0], dtype=torch.float32)
    assert group_advantages(rewards).tolist() == pytest.approx(reference(rewards.tolist()), rel=1e-6)


def test_integer_rewards() -> None:
    advantages = group_advantages(torch.tensor([10, 0]))
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(reference([10.0, 0.0]), rel=1e-6)


@pytest.mark.parametrize("num_responses", [0, 1])
def test_group_without_baseline_is_an_error(num_responses: int) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        group_advantages(torch.ones(num_responses))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, bad, 0.0]))


def test_more_than_one_group_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[R\]"):
        group_advantages(torch.zeros(2, 4))
