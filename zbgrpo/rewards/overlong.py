"""Rewards and response length."""

from __future__ import annotations

from typing import Optional

MAX_PENALTY = 10.0
"""Size of the full penalty: that of a right answer."""


def length_penalty(length_tokens: int, max_new_tokens: int, cache_tokens: int) -> float:
    """Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), scaled to rewards of 10.

    0 up to `max_new_tokens - cache_tokens`, from there linearly down to -10 at `max_new_tokens`, and -10 beyond.
    """
    if not 0 < cache_tokens <= max_new_tokens:
        raise ValueError(f"cache_tokens must be in 1..{max_new_tokens}, not {cache_tokens}")
    excess_tokens = length_tokens - (max_new_tokens - cache_tokens)
    if excess_tokens <= 0:
        return 0.0
    return -MAX_PENALTY * min(excess_tokens, cache_tokens) / cache_tokens


def final_reward(
    outcome_reward: float,
    truncated: bool,
    length_tokens: int,
    max_new_tokens: int,
    cache_tokens: Optional[int],
    penalty_on: bool,
) -> float:
    """Reward that training uses: the outcome's reward, 0 if the response is truncated, plus the penalty if it is on.

    Truncation takes the outcome's reward away in every preset: what was cut off was not finished. Callers pass
    `truncated` for the built-in verifiers only; a user's own function judges what there is. `cache_tokens` is needed
    only with the penalty.
    """
    accuracy_part = 0.0 if truncated else outcome_reward
    if not penalty_on:
        return accuracy_part
    if cache_tokens is None:
        raise ValueError("the length penalty needs cache_tokens")
    return accuracy_part + length_penalty(length_tokens, max_new_tokens, cache_tokens)
