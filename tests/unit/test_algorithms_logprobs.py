from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zbgrpo.algorithms.logprobs import token_logprobs

NUM_TOKENS, VOCABULARY, HIDDEN = 37, 211, 16


def make_inputs(dtype: torch.dtype = torch.float64, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, ...]:
    """hidden, weight, bias, targets, upstream gradient, temperatures. Logits have a standard deviation of 2."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    if num_tokens > 2:
        targets[:2] = torch.tensor([0, VOCABULARY - 1])
    temperatures = torch.linspace(0.5, 1.5, num_tokens, dtype=torch.float64)
    return (
        normal(num_tokens, HIDDEN),
        normal(VOCABULARY, HIDDEN).div_(2),
        normal(VOCABULARY),
        targets,
        normal(num_tokens),
        temperatures,
    )


def full_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, in float64, with all logits at once."""
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    if isinstance(temperature, Tensor):
        temperature = temperature.double().unsqueeze(1)
    chosen = torch.log_softmax(logits / temperature, dim=1)[torch.arange(len(targets)), targets]
    return chosen, torch.distributions.Categorical(logits=logits.detach()).entropy()


def gradients(logprobs: Tensor, upstream: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    wanted = [tensor for tensor in inputs if tensor is not None]
    return [g.double() for g in torch.autograd.grad(logprobs, wanted, upstream.to(logprobs.dtype))]


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float(((got.double() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_values_and_gradients_are_those_of_full_logits(
    dtype: torch.dtype, tolerance: float, temperature: float | str, with_bias: bool, chunk_tokens: int
) -> None:
    hidden, weight, bias, targets, upstream, temperatures = make_inputs(dtype)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    used = temperatures if isinstance(temperature, str) else temperature
    used_bias = bias if with_bias else None
    logprobs, entropy = token_logprobs(hidden, weight, targets, used, chunk_tokens, bias=used_bias)
    expected, expected_entropy = full_logits(hidden, weight, used_bias, targets, used)
    assert logprobs.dtype == entropy.dtype == dtype
    assert logprobs.shape == entropy.shape == (NUM_TOKENS,)
    assert relative_error(logprobs, expected) < tolerance
    assert relative_error(entropy, expected_entropy) < tolerance
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    used_inputs = inputs if with_bias else inputs[:2]
    for got, want in zip(
        gradients(logprobs, upstream, *used_inputs), gradients(expected, upstream, *used_inputs), strict=True
    ):
        assert got.shape == want.shape
        assert relative_error(got, want) < tolerance


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(temperature: float) -> None:
    hidden, weight, bias, targets, _, _ = make_inputs(num_tokens=5)
    weight, bias = weight[:9], bias[:9]
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    torch.autograd.gradcheck(lambda h, w, b: token_logprobs(h, w, targets % 9, temperature, 2, b)[0], inputs)


def test_temperature_changes_the_log_probs_but_not_the_entropy() -> None:
    hidden, weight, _, targets, _, temperatures = make_inputs()
    warm, entropy = token_logprobs(hidden, weight, targets, 1.0, 8)
    cold, entropy_cold = token_logprobs(hidden, weight, targets, 0.25, 8)
    assert (warm - cold).abs().max() > 0.1
    assert torch.allclose(entropy, entropy_cold, rtol=1e-12)
    mixed, _ = token_logprobs(hidden, weight, targets, torch.where(temperatures < 1, 1.0, 0.25), 8)
    assert torch.allclose(mixed, torch.where(temperatures < 1, warm, cold), rtol=1e-12)


def test_entropy_can_be_left_out() -> None:
    hidden, weight, _, targets, upstream, _ = make_inputs()
    weight.requires_grad_()
    for temperature in (1.0, 0.6):
        expected, _ = token_logprobs(hidden, weight, targets, temperature, 8)
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, 8, with_entropy=False)
        assert torch.allclose(logprobs, expected, rtol=1e-13)
        assert entropy.shape == (0,)
        got, want = (gradients(values, upstream, weight)[0] for values in (logprobs, expected))
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_bfloat16_is_as_close_as_its_logits_allow(temperature: float, chunk_tokens: int) -> None:
    hidden, weight, bias, targets, upstream, _ = make_inputs(torch.bfloat16)
    inputs = [tensor.mul_(0.5).requires_grad_() for tensor in (hidden, weight, bias)]
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, chunk_tokens, bias=bias)
    expected, expected_entropy = full_logits(hidden, weight, bias, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert relative_error(logprobs, expected) < 5e-3
    assert relative_error(entropy, expected_entropy) < 5e-3
    grads = torch.autograd.grad(logprobs, inputs, upstream.float())
    for got, want in zip(grads, gradients(expected, upstream, *inputs), strict=True):
        assert got.dtype == torch.bfloat16
        assert relative_error(got, want) < 1e-2


def test_bfloat16_weight_gradient_does_not_get_worse_with_more_tokens() -> None:
    """Equal contributions of 4096 tokens: a sum in bfloat16 would stand still at 256 of them."""
    num_tokens = 4096
    hidden = torch.ones(num_tokens, 2, dtype=torch.bfloat16)
    weight = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(num_tokens, dtype=torch.int64), 1.0, 8)
    (got,) = torch.autograd.grad(logprobs.sum(), [weight])
    assert got.tolist() == [[3072.0] * 2] + [[-1024.0] * 2] * 3


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_what_needs_a_gradient_gets_one(needed: tuple[bool, bool]) -> None:
    hidden, weight, _, targets, upstream, _ = make_inputs()
    inputs = [tensor.requires_grad_(flag) for tensor, flag in zip((hidden, weight), needed, strict=True)]
    logprobs, _ = token_logprobs(hidden, weight, targets, 0.8, 8)
    logprobs.backward(upstream)
    expected, _ = full_logits(hidden, weight, None, targets, 0.8)
    (wanted,) = [tensor for tensor in inputs if tensor.requires_grad]
    assert wanted.grad is not None
    assert relative_error(wanted.grad, gradients(expected, upstream, wanted)[0]) < 1e-12
    assert [tensor.grad is not None for tensor in inputs] == list(needed)


def test_nothing_is_recorded_without_gradients() -> None:
    hidden, weight, _, targets, _, _ = make_inputs()
    assert not token_logprobs(hidden, weight, targets, 1.0, 8)[0].requires_grad
    weight.requires_grad_()
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, targets, 1.0, 8)[0].requires_grad


def test_no_tokens() -> None:
    hidden, weight, _, targets, _, _ = make_inputs(torch.float32, num_tokens=0)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, targets, 0.9, 8)
    assert logprobs.shape == entropy.shape == (0,)
    grad_hidden, grad_weight = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert grad_hidden.shape == hidden.shape
    assert not grad_weight.any()


def test_certain_and_impossible_tokens_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 1, 2]), 0.5, 2)
    assert logprobs.tolist() == pytest.approx([0.0, -4e4, -math.log(3)])
    assert entropy.tolist() == pytest.approx([0.0, 0.0, math.log(3)], abs=1e-6)
    for gradient in torch.autograd.grad(logprobs.sum(), [hidden, weight]):
        assert bool(torch.isfinite(gradient).all())


class LargeAllocations(TorchDispatchMode):
    """Numbers of elements of all new storages of at least `limit` elements; views and `out=` results are not new."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.sizes += [tensor.numel()] if tensor.numel() >= self.limit else []
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_never_exist_whole(temperature: float) -> None:
    """In float32: two buffers of chunk x V forward and one backward, however many chunks there are."""
    num_tokens, vocabulary, chunk_tokens = 64, 1024, 8
    chunk_elements = chunk_tokens * vocabulary
    hidden = torch.randn(num_tokens, 2, requires_grad=True)  # so narrow that nothing else reaches the limit
    weight = torch.randn(vocabulary, 2, requires_grad=True)
    targets = torch.arange(num_tokens)
    with LargeAllocations(chunk_elements // 2) as forward:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature, chunk_tokens)
    assert forward.sizes == [chunk_elements] * 2
    with LargeAllocations(chunk_elements // 2) as backward:
        logprobs.sum().backward()
    assert backward.sizes == [chunk_elements]
    with LargeAllocations(chunk_elements // 2) as full:
        full_logits(hidden, weight, None, targets, temperature)
    assert max(full.sizes) == num_tokens * vocabulary  # the instrument does see whole logits


def test_wrong_inputs_are_errors() -> None:
    hidden, weight, bias, targets, _, temperatures = make_inputs(torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(hidden[:, :3], weight, targets, 1.0, 8)
    with pytest.raises(ValueError, match="int64"):
        token_logprobs(hidden, weight, targets.int(), 1.0, 8)
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(hidden, weight, targets[:3], 1.0, 8)
    with pytest.raises(ValueError, match="one dtype"):
        token_logprobs(hidden, weight.bfloat16(), targets, 1.0, 8)
    with pytest.raises(ValueError, match="bias"):
        token_logprobs(hidden, weight, targets, 1.0, 8, bias=bias[:3])
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, weight, targets, temperatures[:3], 8)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            token_logprobs(hidden, weight, targets, temperature, 8)
    with pytest.raises(ValueError, match="chunk_tokens"):
        token_logprobs(hidden, weight, targets, 1.0, 0)
