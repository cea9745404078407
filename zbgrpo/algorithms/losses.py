"""The clipped policy-gradient loss of GRPO and DAPO, as sums that any split into microbatches leaves unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before exp, so that nothing overflows."""


LOSS_STATISTICS = (
    "num_tokens", "num_responses", "policy_loss", "kl", "clipped", "ratio", "ratio_sq", "responses_skipped",
    "tokens_skipped", "tokens_left_out",
)  # fmt: skip
"""Keys of `LossSums.stats`."""


@dataclass(frozen=True)
class LossConfig:
    """Settings of `policy_loss`, all decided: no presets here."""

    clip_low: float
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float
    """The ratio is clipped above at 1 + clip_high."""
    kl_coeff: float
    """Weight of the KL to the reference model inside the loss; 0 needs no reference log-probs."""
    token_mean: bool
    """True: sum over tokens by number of tokens (DAPO). False: mean over the tokens of a response, then over
    responses (GRPO)."""
    skip_threshold: float
    """A response with a token ratio above this is left out and counted."""


@dataclass
class LossSums:
    """Sums over one microbatch. Add them over the microbatches and data-parallel ranks of one optimizer step, then
    divide once: loss = sum(loss) / sum(denominator)."""

    loss: Tensor
    """float64 scalar, differentiable: the numerator, policy loss + kl_coeff x KL."""
    denominator: Tensor
    """float64 scalar: effective tokens (token_mean) or effective responses."""
    stats: dict[str, Tensor]
    """Detached float64 scalars, always under the same keys. An effective token is in the mask and not in a skipped
    response; an effective response has one.

    num_tokens, num_responses     effective ones
    policy_loss                   the loss without its KL term, aggregated like it
    kl                            k3 to the reference, summed over effective tokens (0 without reference)
    clipped                       effective tokens where the clip acted, so that the policy term has no gradient
    ratio, ratio_sq               sums of w and w^2, w = new / old probability: effective sample size ratio^2 / ratio_sq
    responses_skipped             responses with a ratio above the threshold
    tokens_skipped                tokens of the mask in those responses
    tokens_left_out               all tokens given that are not effective
    """


def policy_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    mask: Tensor,
    num_responses: int,
    config: LossConfig,
    ref_logprobs: Optional[Tensor] = None,
) -> LossSums:
    """Clipped surrogate with an optional KL term, summed over one microbatch.

    Shapes: `new_logprobs` (differentiable), `old_logprobs`, `ref_logprobs`, `response_index` (int64, in
    [0, num_responses)) and `mask` (bool) are [T], one entry per response token in any order; `advantages` is
    [num_responses]. `mask` is False for tokens left out for their lag and for responses left out as truncated.

    With w = exp(new - old) and A the advantage of the response, a token costs
    `-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) + kl_coeff k3`, where k3 = exp(d) - d - 1 with d = ref - new is
    the unbiased, non-negative KL estimate of Schulman (2020, "Approximating KL divergence"). new - old and d are
    clamped to +-20; a clamped log-ratio has gradient zero. A response with any token of the mask at w > skip_threshold
    is left out as a whole, outside the denominator too.

    Guarantees: the sums depend on the set of responses only, not on their order or on the microbatches they come in,
    as long as no response is split between two calls; arithmetic is float64 whatever the inputs are, so this holds to
    rounding at that precision. Without effective tokens, loss and gradient are zero and still attached to the graph.
    Tokens that are not in the mask, and advantages without effective tokens, may be anything, NaN included. At tokens
    of the mask, an infinite log-ratio is clamped like any extreme one; a NaN there, or an effective advantage that is
    not finite, is an error of the caller and leaves the loss without a finite value.

    Raises ValueError when shapes disagree or `kl_coeff` is not 0 and there is no reference.
    """
    _check_shapes(new_logprobs, old_logprobs, advantages, response_index, mask, num_responses, ref_logprobs)
    if config.kl_coeff != 0 and ref_logprobs is None:
        raise ValueError(f"kl_coeff is {config.kl_coeff}, so the loss needs ref_logprobs")

    ratio = _clamped_log_ratio(new_logprobs, old_logprobs, mask).exp()
    above = (ratio.detach() > config.skip_threshold) & mask
    skipped = _count_by_response(above, response_index, num_responses) > 0
    effective = mask & ~skipped[response_index]
    tokens_of_response = _count_by_response(effective, response_index, num_responses)
    num_tokens, num_effective_responses = tokens_of_response.sum(), (tokens_of_response > 0).double().sum()
    weight = effective.double()
    if not config.token_mean:
        weight = weight / tokens_of_response.clamp(min=1)[response_index]

    # where, not a product with the weight: 0 x NaN is NaN.
    advantage = torch.where(effective, advantages.detach().double()[response_index], 0.0)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
    policy = -(torch.minimum(unclipped, clipped) * weight).sum()
    loss = policy
    k3 = None
    if ref_logprobs is not None:
        log_ratio = -_clamped_log_ratio(new_logprobs, ref_logprobs, effective)
        k3 = torch.expm1(log_ratio) - log_ratio  # expm1: exp(d) - 1 - d cancels for small d
        if config.kl_coeff != 0:
            loss = policy + config.kl_coeff * (k3 * weight).sum()

    with torch.no_grad():
        counted_ratio = torch.where(effective, ratio, 0.0)
        stats = {
            "num_tokens": num_tokens,
            "num_responses": num_effective_responses,
            "policy_loss": policy.detach(),
            "kl": k3.detach().sum() if k3 is not None else torch.zeros_like(num_tokens),
            "clipped": ((clipped < unclipped) & effective).double().sum(),
            "ratio": counted_ratio.sum(),
            "ratio_sq": counted_ratio.square().sum(),
            "responses_skipped": skipped.double().sum(),
            "tokens_skipped": (mask & ~effective).double().sum(),
            "tokens_left_out": (~effective).double().sum(),
        }
    return LossSums(loss, num_tokens if config.token_mean else num_effective_responses, stats)


def _clamped_log_ratio(new_logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """new - other in float64 within +-MAX_LOG_RATIO, differentiable in new; 0 with gradient 0 outside the mask."""
    difference = new_logprobs.double() - other_logprobs.detach().double()
    return torch.where(mask, difference, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _count_by_response(tokens: Tensor, response_index: Tensor, num_responses: int) -> Tensor:
    """Number of True entries of each response, float64 [num_responses]; exact, so the order of adding is no matter."""
    counts = torch.zeros(num_responses, dtype=torch.float64, device=tokens.device)
    return counts.index_add_(0, response_index, tokens.double())


def _check_shapes(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    mask: Tensor,
    num_responses: int,
    ref_logprobs: Optional[Tensor],
) -> None:
    """Shapes and dtypes only: values are on the device, and looking at them would wait for it."""
    tokens = {"old_logprobs": old_logprobs, "response_index": response_index, "mask": mask}
    if ref_logprobs is not None:
        tokens["ref_logprobs"] = ref_logprobs
    if new_logprobs.dim() != 1:
        raise ValueError(f"new_logprobs must have shape [T], not {list(new_logprobs.shape)}")
    for name, tensor in tokens.items():
        if tensor.shape != new_logprobs.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, new_logprobs {list(new_logprobs.shape)}")
    if advantages.shape != (num_responses,):
        raise ValueError(f"advantages has shape {list(advantages.shape)} for {num_responses} responses")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}")
