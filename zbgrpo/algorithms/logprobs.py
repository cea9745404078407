"""Log-probs of given tokens from hidden states, without the [tokens, vocabulary] logits ever existing whole.

Forward works on rows: `chunk_tokens` tokens against the whole vocabulary, since a softmax needs the row. It keeps one
log-sum-exp and one log-prob per token. With these, a logit's gradient needs no other logit of its row, so backward
works on columns: all tokens against a block of the vocabulary of the same number of elements. Each row of the weight
gradient is then the result of one matrix product over all tokens. Working on rows there would add up chunks into a
[vocabulary, hidden] sum: in float32 another copy of the gradient, in bfloat16 a rounding per chunk.

With the vocabulary spread over tensor-parallel ranks, each works on its own rows of the weight and all know all hidden
states. What makes one softmax of the parts is two reductions of a few numbers per token, whatever the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_ALIGNMENT = 64


class VocabularyShard(NamedTuple):
    """This rank's part of a vocabulary that is spread over a group: `weight` and `bias` are its rows of them."""

    group: dist.ProcessGroup
    first: int
    """Token id of its first row."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Union[float, Tensor],
    chunk_tokens: int,
    bias: Optional[Tensor] = None,
    with_entropy: bool = True,
    shard: Optional[VocabularyShard] = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax((hidden @ weight.T + bias) / temperature), with the entropy at temperature
    1.

    Shapes: `hidden` [T, H], `weight` [V, H], `bias` [V], all of one dtype; `targets` int64 [T], in [0, V);
    `temperature` one positive float, or a tensor [T] of them (whose values are not checked: that would wait for the
    device). With a `shard`, weight and bias are its part, V is the size of that, targets are ids of the whole
    vocabulary, and every rank of its group calls this with the same hidden states and gets the same results; the
    gradient of `hidden` is the whole one.

    Returns log-probs [T], differentiable once in `hidden`, `weight` and `bias`, and entropies [T] in nats, without
    gradient; the entropies are an empty tensor if `with_entropy` is False. Both are float32 (float64 for float64).

    Precision: matrix products run in the inputs' dtype, everything between them in float32. The weight gradient is one
    product over all tokens, whose accumulators are float32, rounded once to the weight's dtype. The hidden gradient is
    summed over blocks in float32 and rounded once.

    Memory, in elements, beyond inputs, outputs and gradients: at most 2.5 float32 buffers of chunk_tokens x V forward
    and 1.5 backward (2 and 1 for float32 inputs), and 3 of T x H backward. Time: one matrix product more than with the
    logits kept.

    Raises ValueError for shapes or dtypes that do not fit and for a temperature or chunk that is not positive.
    """
    _check_inputs(hidden, weight, targets, temperature, chunk_tokens, bias)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(_compute_dtype(hidden)).unsqueeze(1)
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature, chunk_tokens, with_entropy, shard
    )
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """`temperature` here is a float or [T, 1] in the dtype of the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        targets: Tensor,
        temperature: Union[float, Tensor],
        chunk_tokens: int,
        with_entropy: bool,
        shard: Optional[VocabularyShard],
    ) -> tuple[Tensor, Tensor]:
        num_tokens, vocabulary = len(hidden), len(weight)
        if shard is not None:
            targets = targets - shard.first
        dtype = _compute_dtype(hidden)
        rows = min(chunk_tokens, num_tokens)
        product = hidden.new_empty(rows, vocabulary)
        first = product if product.dtype == dtype else hidden.new_empty(rows, vocabulary, dtype=dtype)
        second = torch.empty_like(first)
        logprobs, normaliser = (hidden.new_empty(num_tokens, dtype=dtype) for _ in range(2))
        entropy = hidden.new_empty(num_tokens if with_entropy else 0, dtype=dtype)
        entropy_normaliser = torch.empty_like(entropy) if shard is not None else None
        for begin in range(0, num_tokens, chunk_tokens):
            chunk = slice(begin, min(begin + chunk_tokens, num_tokens))
            size = chunk.stop - begin
            _logits(hidden[chunk], weight, bias, out=product[:size])
            if first is not product:
                first[:size].copy_(product[:size])
            _softmax_of_chunk(
                first[:size],
                second[:size],
                targets[chunk] if shard is None else targets[chunk].clamp(0, vocabulary - 1),
                temperature[chunk] if isinstance(temperature, Tensor) else temperature,
                logprobs[chunk],
                normaliser[chunk],
                entropy[chunk] if with_entropy else None,
                entropy_normaliser[chunk] if with_entropy and entropy_normaliser is not None else None,
            )
        if shard is not None and entropy_normaliser is not None:
            inside = (targets >= 0) & (targets < vocabulary)
            column = temperature.squeeze(1) if isinstance(temperature, Tensor) else temperature
            _combine(shard.group, inside, column, logprobs, normaliser, entropy, entropy_normaliser)
        scale = temperature if isinstance(temperature, Tensor) else None
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, normaliser, scale)
        ctx.temperature, ctx.chunk_tokens = temperature if scale is None else None, chunk_tokens
        ctx.group = shard.group if shard is not None else None
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Optional[Tensor], ...]:
        hidden, weight, bias, targets, logprobs, normaliser, scale = ctx.saved_tensors
        temperature = ctx.temperature if scale is None else scale
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        num_tokens, vocabulary = len(hidden), len(weight)
        dtype = normaliser.dtype
        # d logprob / d logit_v = (1[v = target] - p_v) / temperature. The matrix below holds p - 1[v = target]; the
        # factor of each token goes to the [T, H] side of the products, which is the smaller one.
        factor = -grad_logprobs.to(dtype).unsqueeze(1) / temperature
        scaled_hidden = (hidden * factor).to(hidden.dtype) if needs_weight else None
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        block = _vocabulary_block(num_tokens, vocabulary, ctx.chunk_tokens)
        product = hidden.new_empty(num_tokens * block)
        for begin in range(0, vocabulary, block):
            part = slice(begin, min(begin + block, vocabulary))
            width = part.stop - begin
            logits = product[: num_tokens * width].view(num_tokens, width)  # contiguous also if this is the last one
            _logits(hidden, weight[part], None if bias is None else bias[part], out=logits)
            grad_logits = _unscaled_grad(logits, targets, part, temperature, logprobs, normaliser)
            if grad_bias is not None:
                grad_bias[part] = torch.mv(grad_logits.t(), factor.squeeze(1))
            if grad_logits is not logits:
                grad_logits = logits.copy_(grad_logits)
            if grad_weight is not None and scaled_hidden is not None:
                torch.mm(grad_logits.t(), scaled_hidden, out=grad_weight[part])
            if grad_hidden is not None and grad_hidden.dtype == hidden.dtype:
                grad_hidden.addmm_(grad_logits, weight[part])
            elif grad_hidden is not None:
                grad_hidden += grad_logits @ weight[part]
        if grad_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.mul_(factor).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _combine(
    group: dist.ProcessGroup,
    inside: Tensor,
    temperature: Union[float, Tensor],
    logprobs: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    entropy_normaliser: Tensor,
) -> None:
    """From what holds for this rank's part of the vocabulary to what holds for all of it, in place; all are [T].

    The parts' log-sum-exps L_l make the whole one, L = log sum_l exp(L_l), and the weight exp(L_l - L) of each part.
    The entropy is L - sum_l exp(L_l - L) x (mean logit of part l), and the mean logit of a part is L_l - entropy_l.
    """
    own = torch.stack([normaliser / temperature, entropy_normaliser if len(entropy) else normaliser])
    largest = own.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    weights = torch.exp(own - largest)
    at_target = torch.where(inside, logprobs + own[0] - largest[0], 0.0)
    mean = weights[1] * (own[1] - entropy - largest[1]) if len(entropy) else torch.zeros_like(logprobs)
    sums = torch.stack([*weights, at_target, mean])
    dist.all_reduce(sums, group=group)
    logs = torch.log(sums[:2])
    logprobs.copy_(sums[2] - logs[0])
    normaliser.copy_((largest[0] + logs[0]) * temperature)
    if len(entropy):
        entropy.copy_(logs[1] - sums[3] / sums[1])


def _softmax_of_chunk(
    logits: Tensor,
    work: Tensor,
    targets: Tensor,
    temperature: Union[float, Tensor],
    logprobs: Tensor,
    normaliser: Tensor,
    entropy: Optional[Tensor],
    entropy_normaliser: Optional[Tensor] = None,
) -> None:
    """Fill the chunk's `logprobs`, `normaliser` = temperature x log-sum-exp(logits / temperature), and `entropy`, which
    is that of the unscaled logits, as `entropy_normaliser` is their log-sum-exp.

    `logits` [N, V] and `work` (same shape) are overwritten: V is long, so buffers are few and reused.
    """
    columns = targets.unsqueeze(1)
    largest_logit = logits.amax(dim=1, keepdim=True)
    if entropy is not None:
        torch.log_softmax(logits, dim=1, out=work)
        if entropy_normaliser is not None:
            entropy_normaliser.copy_((largest_logit - work.amax(dim=1, keepdim=True)).squeeze(1))
        torch.exp(work, out=logits)
        torch.sum(logits.mul_(work), dim=1, out=entropy).neg_()
        # Shifting a row changes no softmax of it, so from here log-softmax stands in for the logits.
        logits, work = work, logits
    log_softmax = logits
    if entropy is None or not _is_one(temperature):
        torch.log_softmax(logits.div_(temperature), dim=1, out=work)
        log_softmax = work
    logprobs.copy_(log_softmax.gather(1, columns).squeeze(1))
    # By the largest entry, whose log-prob is at least -log V: that of the target may be large and round accordingly.
    normaliser.copy_((largest_logit - temperature * log_softmax.amax(dim=1, keepdim=True)).squeeze(1))


def _unscaled_grad(
    logits: Tensor,
    targets: Tensor,
    part: slice,
    temperature: Union[float, Tensor],
    logprobs: Tensor,
    normaliser: Tensor,
) -> Tensor:
    """p - 1[v = target] for the columns `part` of the vocabulary, in the dtype of the softmax; overwrites `logits` if
    that is theirs."""
    probs = logits.to(normaliser.dtype)
    # Subtracting first is exact for the likely tokens; dividing first would round at the size of the logits.
    probs.sub_(normaliser.unsqueeze(1))
    if not _is_one(temperature):
        probs.div_(temperature)
    probs.exp_()
    columns = (targets - part.start).clamp(0, part.stop - part.start - 1).unsqueeze(1)
    inside = ((targets >= part.start) & (targets < part.stop)).unsqueeze(1)
    # One column per row, and expm1 of the log-prob instead of p - 1, which cancels for likely tokens.
    values = torch.where(inside, torch.expm1(logprobs).unsqueeze(1), probs.gather(1, columns))
    return probs.scatter_(1, columns, values)


def _logits(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor) -> None:
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _is_one(temperature: Union[float, Tensor]) -> bool:
    return not isinstance(temperature, Tensor) and temperature == 1.0


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _vocabulary_block(num_tokens: int, vocabulary: int, chunk_tokens: int) -> int:
    """Columns for which all tokens together have no more logits than `chunk_tokens` rows have."""
    block = min(vocabulary, max(1, chunk_tokens * vocabulary // max(1, num_tokens)))
    if _BLOCK_ALIGNMENT < block < vocabulary:
        block -= block % _BLOCK_ALIGNMENT
    return block


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Union[float, Tensor],
    chunk_tokens: int,
    bias: Optional[Tensor],
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [T, H] and weight [V, H] do not fit: {list(hidden.shape)}, {list(weight.shape)}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{len(hidden)}], not {targets.dtype} {list(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape [{len(weight)}], not {list(bias.shape)}")
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise ValueError(f"hidden, weight and bias must have one dtype, not {hidden.dtype} and {weight.dtype}")
    if isinstance(temperature, Tensor):
        if temperature.shape != targets.shape:
            raise ValueError(f"temperature must be a number or [{len(hidden)}], not {list(temperature.shape)}")
    elif not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
