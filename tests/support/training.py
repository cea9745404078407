"""Eight groups that exercise every rule of the loss, trainers over them, and what the gradient is by definition."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.models import logprobs_of, perturbed, random_group, responses_of, tiny_model
from zbgrpo.algorithms.packing import PackingRules
from zbgrpo.config.schema import AlgorithmConfig, TrainerConfig
from zbgrpo.groups.process_groups import make_mesh
from zbgrpo.trainer.base import StepResult
from zbgrpo.trainer.layout import ALONE, Layout
from zbgrpo.trainer.torch_backend import TorchTrainer
from zbgrpo.types import FinishReason, GroupPayload

TEMPERATURES = (0.8, 1.3)
VERSION = 10
MAX_TOKEN_LAG = 4
GRPO = AlgorithmConfig(
    name="GRPO", clip_low=0.2, clip_high=0.2, loss="response_mean", kl_coeff=0.3, mask_truncated=False
)
DAPO = AlgorithmConfig(name="DAPO", clip_low=0.2, clip_high=0.28, loss="token_mean", kl_coeff=0.0, mask_truncated=True)
ALGORITHMS = {"GRPO": GRPO, "DAPO": DAPO}


def eight_groups(model: Any, noise: float = 0.3) -> list[GroupPayload]:
    """64 responses: log-probs so far off that the clip acts, truncated responses, tokens that are too old, a response
    above the skip threshold, one without a counted token, and a group whose rewards are all equal."""
    generator = np.random.default_rng(1)
    groups = [
        random_group(
            model, generator, num_responses=8, temperature=temperature_at, version=VERSION, noise=noise, oldest_lag=8
        )
        for _ in range(8)
    ]
    assert len({temperature_of(group) for group in groups}) == 2
    groups[1].logprobs[int(groups[1].lengths[:3].sum())] -= 4.0  # response 3: a ratio of about e^4
    groups[1].spans[groups[1].spans[:, 0] == 3, 2] = VERSION
    groups[1].finish[3] = FinishReason.END_TOKEN
    groups[2].spans[groups[2].spans[:, 0] == 5, 2] = VERSION - MAX_TOKEN_LAG - 1
    groups[3].rewards[:] = 2.5
    return groups


def temperature_at(prompt_ids: np.ndarray) -> float:
    """The groups differ in it, and the prompt's first token tells."""
    return TEMPERATURES[int(prompt_ids[0]) % 2]


def temperature_of(group: GroupPayload) -> float:
    """That of one of the eight groups, whatever was done to its responses."""
    return temperature_at(group.prompt_ids)


def make_trainer(
    model: Any,
    algorithm: AlgorithmConfig,
    *,
    microbatch: int = 8,
    group: Any = None,
    num_schedule_steps: int = 10,
    layout: Layout | None = None,
    **settings: Any,
) -> TorchTrainer:
    """A trainer over a copy of the model, data parallel over `group` unless `layout` says otherwise; the reference,
    where there is one, is `reference_of(model)`."""
    reference = reference_of(model).requires_grad_(False) if algorithm.kl_coeff else None
    return TorchTrainer(
        copy.deepcopy(model),
        reference,
        TrainerConfig(**{"max_grad_norm": 1e9, "learning_rate": 1e-3, "logprob_chunk_tokens": 16, **settings}),
        algorithm,
        rules=PackingRules(microbatch, MAX_TOKEN_LAG, bool(algorithm.mask_truncated)),
        num_schedule_steps=num_schedule_steps,
        group=group,
        wait=nullcontext,
        layout=layout or (ALONE if group is None else Layout.of(mesh_of(dist.get_world_size(group), 1, 1))),
    )


def mesh_of(dp: int, pp: int, tp: int) -> Any:
    """A mesh over the whole world of a test, made anew: all ranks call this together."""
    return make_mesh((dp, pp, tp), timedelta(seconds=60), "gloo")


def reference_of(model: Any) -> Any:
    """The reference model of the KL: near the trained one."""
    return perturbed(model, seed=99)


def commit_without_update(trainer: TorchTrainer) -> tuple[Tensor, StepResult]:
    """The gradient that the optimizer would have got (float32 [parameters], in registration order), and the result."""
    seen: list[Tensor] = []
    apply, trainer._apply = trainer._apply, lambda rate: seen.append(trainer.parameters.gradients.clone())  # type: ignore[method-assign]
    result = trainer.commit()
    trainer._apply = apply  # type: ignore[method-assign]
    (gradient,) = seen
    return gradient, result


def train(trainer: TorchTrainer, minibatches: Sequence[Sequence[GroupPayload]], version: int = VERSION) -> None:
    for minibatch in minibatches:
        trainer.train_minibatch(minibatch, version, [temperature_of(group) for group in minibatch])


NUM_STEPS = 5


def steps(trainer: Any, minibatches: list[list[GroupPayload]]) -> dict[str, Any]:
    """Five optimizer steps; what each gave, and the weights at the end (None but on the first rank)."""
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(NUM_STEPS):
        train(trainer, minibatches)
        result = trainer.commit()
        assert not result.skipped
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found["sums"] = result.sums
    return found | {"weights": trainer.gather_model()}


def differences(found: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]) -> dict[str, float]:
    """Largest relative differences of losses, norms and sums; norm of that of the update by the norm of the update."""
    assert found["weights"].keys() == expected["weights"].keys()
    moved = {n: expected["weights"][n].float() - start[n].detach().float() for n in found["weights"]}
    off = {n: found["weights"][n].float() - expected["weights"][n].float() for n in found["weights"]}
    return {
        "loss": _relative(found["losses"], expected["losses"]),
        "norm": _relative(found["norms"], expected["norms"]),
        "sums": max(abs(found["sums"][key] - value) / max(1e-3, abs(value)) for key, value in expected["sums"].items()),
        "update": float(flat(off).norm() / flat(moved).norm()),
    }


def _relative(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(found, expected, strict=True))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


MINIBATCHES: dict[str, Callable[[Sequence[GroupPayload]], list[Sequence[GroupPayload]]]] = {
    "one minibatch": lambda groups: [groups],
    "several minibatches": lambda groups: [groups[:1], groups[1:3], groups[3:]],
}


def gradient_by_definition(
    model: Any, groups: Sequence[GroupPayload], algorithm: AlgorithmConfig
) -> tuple[dict[str, Tensor], float, int]:
    """Gradients by name, loss and denominator: float64, one response after the other, plain Python sums."""
    exact, reference = copy.deepcopy(model).double(), reference_of(model).double()
    terms: list[Tensor] = []  # of the numerator
    denominator = 0
    for group in groups:
        rewards = [float(r) for r in group.rewards]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        versions = np.split(group.token_versions(), np.cumsum(group.lengths)[:-1])
        recorded = np.split(group.logprobs.astype(np.float64), np.cumsum(group.lengths)[:-1])
        for number, response in enumerate(responses_of(group)):
            if algorithm.mask_truncated and group.finish[number] == FinishReason.LENGTH:
                continue
            counted = [i for i in range(len(response)) if VERSION - versions[number][i] <= MAX_TOKEN_LAG]
            new = logprobs_of(exact, group.prompt_ids, response, temperature_of(group))
            ratios = {i: torch.exp(new[i] - recorded[number][i]) for i in counted}
            if not counted or max(float(w.detach()) for w in ratios.values()) > algorithm.skip_threshold:
                continue
            with torch.no_grad():
                ref = logprobs_of(reference, group.prompt_ids, response, temperature_of(group))
            advantage = (rewards[number] - mean) / (deviation + 1e-4)
            costs = []
            for i, w in ratios.items():
                clipped = torch.clamp(w, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
                k3 = torch.exp(ref[i] - new[i]) - (ref[i] - new[i]) - 1
                costs.append(-torch.minimum(w * advantage, clipped * advantage) + algorithm.kl_coeff * k3)
            if algorithm.loss == "token_mean":
                terms.append(sum(costs))
                denominator += len(costs)
            else:
                terms.append(sum(costs) / len(costs))
                denominator += 1
    loss = sum(terms) / denominator
    loss.backward()
    return {name: p.grad for name, p in exact.named_parameters()}, float(loss.detach()), denominator


def relative_error(got: Tensor, expected: dict[str, Tensor]) -> float:
    """The larger of: norm of the whole difference by the whole norm; a tenth of the same for any one parameter."""
    flat = torch.cat([g.flatten() for g in expected.values()])
    worst = float((got.double() - flat).norm() / flat.norm())
    parts = got.double().split([g.numel() for g in expected.values()])
    for part, gradient in zip(parts, expected.values(), strict=True):
        # Parameters with next to no gradient are measured by the whole.
        scale = max(float(gradient.norm()), 1e-2 * float(flat.norm()))
        worst = max(worst, float((part - gradient.flatten()).norm()) / scale / 10)
    return worst


def base_model() -> Any:
    """The model that the groups were nearly sampled with."""
    return tiny_model("qwen2", tied=True, seed=3)
