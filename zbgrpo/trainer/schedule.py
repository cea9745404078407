"""The learning rate of a step."""

from __future__ import annotations

import math


def schedule_steps(num_episodes: int, num_rows: int, groups_per_step: int) -> int:
    """Length of the cosine: min(episodes, 4) x rows // S steps, at least one."""
    return max(1, min(num_episodes, 4) * num_rows // groups_per_step)


def learning_rate(peak: float, step: int, num_steps: int, schedule: str) -> float:
    """Rate of optimizer step `step` (from 0): cosine from `peak` to 0.1 peak over `num_steps`, then constant."""
    if schedule == "constant":
        return peak
    progress = min(step / num_steps, 1.0)
    return peak * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
