"""Log-probs, entropy, the loss and their gradients on the device, against plain float64 on the CPU.

The reference gets the same numbers, rounded to the dtype before. Errors are the largest one of a tensor by the largest
element of the reference; that of the loss is by the sum of its terms' magnitudes, for they cancel.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from report import Report, part_options
from torch import Tensor

from zbgrpo.algorithms.logprobs import token_logprobs
from zbgrpo.algorithms.losses import LossConfig, policy_loss

# Tokens, hidden size, vocabulary, responses, tokens per chunk.
_SHAPES = {"135m": (768, 576, 49_152, 24, 200), "tiny": (60, 48, 517, 6, 17)}
_LIMITS = {
    torch.float32: {"logprobs": 1e-5, "entropy": 1e-5, "loss": 1e-5, "hidden": 1e-4, "weight": 1e-4},
    torch.bfloat16: {"logprobs": 1e-2, "entropy": 1e-2, "loss": 1e-2, "hidden": 3e-2, "weight": 3e-2},
}
"""bfloat16 has 8 bits: one rounding is 2^-9 = 0.002, and products round once at their end."""
_TEMPERATURE = 0.9
_LOSS = LossConfig(0.2, 0.28, 0.05, True, 10.0)


def inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """On the CPU; float tensors in float64, with hidden states and weights already rounded to `dtype`."""
    tokens, hidden_size, vocabulary, responses, _ = shape
    generator = torch.Generator().manual_seed(7)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    # Log-ratios stay away from where the clip acts, for there a rounding turns a gradient on or off.
    ratios = torch.tensor([-0.5, -0.05, 0.05, 0.5], dtype=torch.float64)
    return {
        "hidden": normal(tokens, hidden_size).to(dtype).double(),
        "weight": (normal(vocabulary, hidden_size) * 2 / hidden_size**0.5).to(dtype).double(),
        "targets": torch.randint(vocabulary, (tokens,), generator=generator),
        "ratio": ratios[torch.randint(4, (tokens,), generator=generator)],
        "to_reference": 0.1 * normal(tokens),
        "advantages": normal(responses),
        "response": torch.arange(tokens) * responses // tokens,
        "mask": torch.rand(tokens, generator=generator) < 0.9,
    }


def reference(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """By definition. The old and the reference model's log-probs are made here, from the new ones."""
    hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
    logits = hidden @ weight.t()
    full = torch.log_softmax(logits.detach(), 1)
    new = torch.log_softmax(logits / _TEMPERATURE, 1).gather(1, given["targets"][:, None])[:, 0]
    old, base = new.detach() - given["ratio"], new.detach() + given["to_reference"]
    ratio, advantage = (new - old).exp(), given["advantages"][given["response"]]
    clipped = ratio.clamp(1 - _LOSS.clip_low, 1 + _LOSS.clip_high)
    distance = base - new
    terms = -torch.minimum(ratio * advantage, clipped * advantage)
    terms = terms + _LOSS.kl_coeff * (distance.exp() - distance - 1)
    terms = terms[given["mask"]]
    loss = terms.sum() / len(terms)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "logprobs": new.detach(), "entropy": -(full.exp() * full).sum(1), "loss": loss.detach(),
        "hidden": hidden.grad, "weight": weight.grad,
        "old": old, "base": base, "loss_scale": terms.detach().abs().mean(),
    }  # fmt: skip


def on_device(
    given: dict[str, Tensor], expected: dict[str, Tensor], chunk: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The same by the package."""
    hidden, weight = (given[name].to(device, dtype).requires_grad_() for name in ("hidden", "weight"))
    logprobs, entropy = token_logprobs(hidden, weight, given["targets"].to(device), _TEMPERATURE, chunk)
    sums = policy_loss(
        logprobs,
        expected["old"].to(device),
        given["advantages"].to(device),
        given["response"].to(device),
        given["mask"].to(device),
        len(given["advantages"]),
        _LOSS,
        expected["base"].to(device),
    )
    loss = sums.loss / sums.denominator
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    found = {"logprobs": logprobs, "entropy": entropy, "loss": loss, "hidden": hidden.grad, "weight": weight.grad}
    return {name: tensor.detach().double().cpu() for name, tensor in found.items()}


def main() -> int:
    options = part_options(__doc__).parse_args()
    report, shape, device = Report(), _SHAPES[options.size], torch.device(options.device)
    for dtype, limits in _LIMITS.items():
        given = inputs(shape, dtype)
        expected = reference(given)
        found: dict[str, Any] = on_device(given, expected, shape[4], device, dtype)
        for name, limit in limits.items():
            scale = expected["loss_scale"] if name == "loss" else expected[name].abs().max()
            error = float((found[name] - expected[name]).abs().max() / scale)
            report.within(f"numerics.{str(dtype).removeprefix('torch.')}.{name}", error, limit)
    report.write(options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
