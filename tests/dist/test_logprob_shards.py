"""Log-probs with the vocabulary spread over ranks: those of the whole vocabulary, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ranks import run_ranks

NUM_TOKENS, VOCABULARY, HIDDEN = 23, 101, 8


def _share(rank: int, store: Any, num_ranks: int) -> list[float]:
    """Largest relative errors of everything, over temperatures, with and without bias and entropy."""
    import torch.distributed as dist

    from zbgrpo.algorithms.logprobs import VocabularyShard, token_logprobs

    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((NUM_TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    )
    weight[7] += 30.0  # one shard holds nearly all of the probability of some tokens
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    upstream = torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    size = -(-VOCABULARY // num_ranks)
    part = slice(rank * size, min(VOCABULARY, (rank + 1) * size))
    errors = []
    for temperature in (1.0, 0.7, torch.linspace(0.5, 1.5, NUM_TOKENS, dtype=torch.float64)):
        for with_bias in (True, False):
            for with_entropy in (True, False):
                whole = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
                own = [t.clone().requires_grad_() for t in (hidden, weight[part], bias[part])]
                expected, entropy = token_logprobs(
                    whole[0], whole[1], targets, temperature, 5, whole[2] if with_bias else None, with_entropy
                )
                got, other = token_logprobs(
                    own[0], own[1], targets, temperature, 5, own[2] if with_bias else None, with_entropy,
                    VocabularyShard(dist.group.WORLD, part.start),
                )  # fmt: skip
                expected.backward(upstream)
                got.backward(upstream)
                errors += [_error(got, expected), _error(own[0].grad, whole[0].grad)]
                errors.append(_error(own[1].grad, whole[1].grad[part]))
                if with_bias:
                    errors.append(_error(own[2].grad, whole[2].grad[part]))
                if with_entropy:
                    errors.append(_error(other, entropy))
    return errors


def _error(got: Any, expected: Any) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def test_shards_make_one_softmax() -> None:
    for num_ranks in (2, 3):
        for errors in run_ranks(num_ranks, _share, 60, num_ranks):
            assert len(errors) == 3 * 2 * 2 * 3 + 12
            assert max(errors) < 1e-11
