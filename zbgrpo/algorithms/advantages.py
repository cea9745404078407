"""Group-relative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from zbgrpo.errors import ConfigError

STD_FLOOR = 1e-4
"""Added to the standard deviation; rewards that differ by rounding only stay without effect."""


def group_advantages(rewards: Tensor) -> Tensor:
    """Advantage of each response within its group: `(r - mean) / (std + 1e-4)`, std with `n - 1` (Shao et al. 2024,
    "DeepSeekMath", section 4.1.2).

    `rewards` is [R], all responses of one prompt, also those whose tokens are masked later. The result is [R], in the
    dtype of `rewards` (float32 if that is an integer type), and exactly zero when all rewards are equal.

    Raises ConfigError if R < 2, since a group of one has no baseline, and ValueError if the shape is not [R] or a
    reward is not finite.
    """
    if rewards.dim() != 1:
        raise ValueError(f"rewards of one group must have shape [R], not {list(rewards.shape)}")
    if len(rewards) < 2:
        raise ConfigError(f"a group needs at least 2 responses to have a baseline, not {len(rewards)}: raise -g")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards must be finite: {rewards.tolist()}")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if bool((rewards == rewards[0]).all()):
        # Not left to the formula: the mean of n equal numbers need not be that number.
        return torch.zeros_like(rewards, dtype=dtype)
    # Two passes in float64. sqrt(E[r^2] - E[r]^2) in float32 leaves a residue of the size of the floor.
    exact = rewards.to(torch.float64)
    deviation = exact - exact.mean()
    std = (deviation.square().sum() / (len(rewards) - 1)).sqrt()
    return (deviation / (std + STD_FLOOR)).to(dtype)
