"""Random numbers per response, and drawing tokens with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zbgrpo.types import Uid

_BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream(seed: int, purpose: str, uid: Uid, attempt: int, response: int) -> int:
    """The 64-bit name of a response's random numbers: a hash of run seed, purpose, uid, attempt and response."""
    text = f"{seed}/{purpose}/{uid.episode}/{uid.row}/{attempt}/{response}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (stream, position): float64 [n]. A pure function of its arguments.

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014) over stream + (position + 1) x golden ratio.
    """
    with np.errstate(over="ignore"):
        state = streams.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor, temperatures: Sequence[float] | np.ndarray, draws: np.ndarray, top_k: int | None, top_p: float
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: ids int64 [n] and log-probs float32 [n].

    logits [n, V]; draws in [0, 1) [n]. A temperature of 0 takes the most likely token. The log-prob is that of the
    full softmax at the row's temperature (at 1 for greedy rows), also when top_k or top_p narrow the choice.
    """
    on_host = np.asarray(temperatures, dtype=np.float32)
    scale = torch.as_tensor(on_host, device=logits.device)
    greedy = scale == 0
    logprobs = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, scale)[:, None], dim=-1)
    weights = _narrow(logprobs.exp(), top_k, top_p)
    tokens = _inverse_cdf(weights, torch.as_tensor(draws, device=logits.device))
    if (on_host == 0).any():  # not asked on the device, which would wait for it
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _narrow(weights: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Zero the weights outside the k most likely tokens, then outside the smallest set with mass top_p."""
    if top_k is not None and top_k < weights.shape[1]:
        threshold = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = torch.where(weights < threshold, 0.0, weights)
    if top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        drop = before >= top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)
        weights = weights.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), 0.0)
    return weights


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The first index at which the cumulative weight exceeds draw x total. Never an index of weight 0.

    In two levels, with the running sums in float64: a running float32 sum over a large vocabulary would lose the tail.
    """
    num_rows, vocabulary = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK)).view(num_rows, -1, _BLOCK)
    blocks = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = draws.to(torch.float64) * blocks[:, -1]
    block = (blocks <= target[:, None]).sum(-1).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_(min=0)[:, None])[:, 0], 0.0)
    inner = padded[torch.arange(num_rows, device=weights.device), block]
    sums = inner.to(torch.float64).cumsum(-1)
    # Rounding may leave the target just above the block's own sum: stay below it.
    rest = torch.minimum(target - before, sums[:, -1] * (1 - 2.0**-50))
    return block * _BLOCK + (sums <= rest[:, None]).sum(-1).clamp_(max=_BLOCK - 1)
