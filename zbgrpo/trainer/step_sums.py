"""The loss of microbatches, and what is summed with it over an optimizer step and over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo.algorithms.losses import LOSS_STATISTICS, LossConfig, policy_loss
from zbgrpo.algorithms.packing import STATISTICS, Microbatch
from zbgrpo.config.schema import AlgorithmConfig
from zbgrpo.groups.process_groups import collective

ABANDONED = "abandoned"
"""Key of the number of ranks that have left out work of the step, because a stop is due."""
_DEVICE_SUMS = (*LOSS_STATISTICS, "loss", "denominator", "entropy", "gap", "gap_tokens")
_MAXIMA = ("lag_max",)  # statistics that are not summed over ranks but maximised


class StepSums:
    """Sums of the open step; see `StepResult.sums`."""

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        self._config = config
        self._host = dict.fromkeys(STATISTICS, 0.0)
        self._device = torch.zeros(len(_DEVICE_SUMS), dtype=torch.float64, device=device)

    def loss(self, batch: Microbatch, logprobs: Tensor, entropy: Tensor, reference: Tensor | None) -> Tensor:
        """Sum of the loss over a microbatch, whose statistics are added to those of the step.

        Nothing is read here: the host goes on to the next microbatch while the device works on this one."""
        sums = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.response_index,
            batch.mask,
            batch.num_responses,
            self._config,
            reference,
        )
        gap = torch.where(batch.on_policy, (logprobs.detach() - batch.old_logprobs).abs(), 0.0)
        values = sums.stats | {
            "loss": sums.loss.detach(),
            "denominator": sums.denominator,
            "entropy": entropy.sum(dtype=torch.float64),
            "gap": gap.sum(dtype=torch.float64),
            "gap_tokens": batch.on_policy.sum(dtype=torch.float64),
        }
        self._device += torch.stack([values[name] for name in _DEVICE_SUMS])
        for name, value in batch.stats.items():
            old = self._host[name]
            self._host[name] = max(old, value) if name in _MAXIMA else old + value
        return sums.loss

    def reduce(
        self, abandon: bool, counts: bool, group: dist.ProcessGroup | None, wait: Callable[[], Any]
    ) -> dict[str, float]:
        """Sums over all ranks of the group, under the keys of the statistics and `ABANDONED`; those of a rank that
        does not count are left out. The first thing that ranks do together in a step: waiting here is imbalance."""
        sums = self._host | dict(zip(_DEVICE_SUMS, self._device.tolist(), strict=True))
        if not counts:
            sums = dict.fromkeys(sums, 0.0)
        sums[ABANDONED] = float(abandon)
        if group is None:
            return sums
        names = sorted(sums)
        added = torch.tensor([sums[n] for n in names], dtype=torch.float64)
        largest = torch.tensor([sums[n] for n in _MAXIMA], dtype=torch.float64)
        with wait(), collective("meeting the other consumers at the end of a step"):
            dist.all_reduce(added, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return dict(zip(names, added.tolist(), strict=True)) | dict(zip(_MAXIMA, largest.tolist(), strict=True))

    def clear(self) -> None:
        """Begin anew."""
        self._host = dict.fromkeys(STATISTICS, 0.0)
        self._device.zero_()


def loss_config(algorithm: AlgorithmConfig) -> LossConfig:
    """The settings of the loss of an algorithm whose preset has been applied."""
    assert algorithm.clip_low is not None and algorithm.clip_high is not None and algorithm.kl_coeff is not None
    return LossConfig(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coeff=algorithm.kl_coeff,
        token_mean=algorithm.loss == "token_mean",
        skip_threshold=algorithm.skip_threshold,
    )
