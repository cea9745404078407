"""Trainers under ColossalAI's layouts, and what five of their steps give."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.support.training import MAX_TOKEN_LAG, reference_of
from zbgrpo.algorithms.packing import PackingRules
from zbgrpo.config.schema import AlgorithmConfig, TrainerConfig
from zbgrpo.groups.process_groups import make_mesh
from zbgrpo.trainer.colossalai_backend import ColossalaiTrainer
from zbgrpo.trainer.layout import Layout
from zbgrpo.types import GroupPayload


class Case(NamedTuple):
    """Sizes of the axes, the zero stage, and the precision."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    precision: str = "fp32"

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.tp

    def layout(self) -> Layout:
        """This rank's place. All ranks of the world call this."""
        return Layout.of(make_mesh((self.dp, self.pp, self.tp), timedelta(seconds=120), "gloo"))


def make_colossalai(
    model: Any,
    algorithm: AlgorithmConfig,
    case: Case,
    layout: Layout,
    group: Any = None,
    *,
    microbatch: int = 8,
    **settings: Any,
) -> ColossalaiTrainer:
    """The counterpart of `make_trainer`."""
    model, reference = copy.deepcopy(model), None
    if case.precision == "bf16":
        model = model.bfloat16()
    if algorithm.kl_coeff:
        reference = reference_of(model).requires_grad_(False)
    defaults = {"max_grad_norm": 1e9, "learning_rate": 1e-3, "logprob_chunk_tokens": 16}
    return ColossalaiTrainer(
        model,
        reference,
        TrainerConfig(**{**defaults, "precision": case.precision, "zero_stage": case.zero, **settings}),
        algorithm,
        rules=PackingRules(microbatch, MAX_TOKEN_LAG, bool(algorithm.mask_truncated)),
        num_schedule_steps=10,
        group=group or dist.group.WORLD,
        wait=nullcontext,
        layout=layout,
    )


def share(groups: list[GroupPayload], layout: Layout) -> list[GroupPayload]:
    """What this rank's dp index trains."""
    return groups[layout.dp_index :: layout.mesh.dp]
