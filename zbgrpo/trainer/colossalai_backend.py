"""The `colossalai` trainer: ColossalAI's Booster spreads the model over tensor-parallel ranks, pipeline stages and zero
stages; the loss, the packing and the meaning of a step are those of the `torch` trainer.

One optimizer step: `train_minibatch` adds gradient sums (float32 where torch can, in every precision); `commit` divides
them once by the step's denominator and lets ColossalAI add up over ranks, measure the norm, clip and update.

    layout                              done by
    tp, pp (1F1B), zero 0               HybridParallelPlugin, in bf16 or float32
    zero 1 (with tp, pp), 2 (with tp)   HybridParallelPlugin, in bf16
    zero 1, 2 in float32                LowLevelZeroPlugin, without tp and pp

ColossalAI takes the world for its own, so all of its work runs `as_world` of the consumers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo.algorithms.packing import Microbatch, PackingRules, pack
from zbgrpo.checkpoint import model_folder
from zbgrpo.config.schema import AlgorithmConfig, TrainerConfig
from zbgrpo.errors import NonFiniteError
from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.base import StepResult
from zbgrpo.trainer.colossalai_model import DTYPES, Spread
from zbgrpo.trainer.colossalai_repairs import as_world
from zbgrpo.trainer.colossalai_state import OptimizerState
from zbgrpo.trainer.gathering import Origin, gather_stages, names_of_tied
from zbgrpo.trainer.layout import Layout
from zbgrpo.trainer.schedule import learning_rate
from zbgrpo.trainer.step_sums import ABANDONED, StepSums, loss_config
from zbgrpo.types import GroupPayload
from zbgrpo.weights.manifest import TensorSpec, named_weights

MAX_SKIPPED_STEPS = 5


class ColossalaiTrainer:
    """See the module's text and `TrainerBackend`."""

    def __init__(
        self,
        model: Any,
        reference: Any | None,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        rules: PackingRules,
        num_schedule_steps: int,
        group: dist.ProcessGroup,
        wait: Callable[[], Any],
        layout: Layout,
    ) -> None:
        """`model` and `reference` (with KL only) are whole, the same on every rank, and best in host memory: what this
        rank keeps of them moves to its device. `wait()` is a context manager around waiting for other ranks; `group`:
        all consumers, the lowest ranks of the world.

        Raises `ConfigError` for a layout that ColossalAI does not have, and where ColossalAI is missing."""
        self.mesh, self.layout, self._config = layout.mesh, layout, config
        self._rules, self._group, self._wait = rules, group, wait
        self._num_schedule_steps = num_schedule_steps
        self._step = self._skipped_in_a_row = 0
        self._dtype = DTYPES[config.precision]
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shapes = {name: (tensor.shape, self._travels_as(tensor)) for name, tensor in named_weights(model)}
        tied = names_of_tied(model)
        with self._as_world():
            self._spread = Spread(model.train(), reference, config, layout, group)
        self.model = self._spread.model.module
        parameters = self._spread.model.parameters()
        self._weights: dict[str, Tensor] = parameters | dict(_persistent_buffers(self.model))
        if tied is not None and self.mesh.pp > 1 and layout.is_last_stage:
            embedding, head = tied
            del self._weights[head]  # the first stage sends it
            parameters[embedding] = parameters.pop(head)
        self._origins = {name: Origin(stage, *shapes[name]) for name, stage in self._stages(list(shapes)).items()}
        self._device = next(self.model.parameters()).device
        self._state = OptimizerState(self._spread, parameters, layout, group)
        self._sums = StepSums(loss_config(algorithm), self._device)

    def _as_world(self) -> AbstractContextManager[None]:
        return as_world(self._group)

    def _travels_as(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _stages(self, names: list[str]) -> dict[str, int]:
        """The stage that owns each weight of the whole model, in the order of `names`."""
        own = torch.tensor([self.layout.pp_index if name in self._weights else 0 for name in names])
        if (line := self.layout.group("pp")) is not None:
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=line)
        return dict(zip(names, own.tolist(), strict=True))

    @property
    def lockstep(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------ one step

    def train_minibatch(self, groups: Sequence[GroupPayload], version: int, temperatures: Sequence[float]) -> None:
        batches = list(pack(groups, version, self._rules, temperatures))
        with self._as_world():
            batches += [_nothing()] * (self._num_batches(len(batches)) - len(batches))
            batches = [batch.to(self._device) for batch in batches]
            with self._spread.accumulating():
                if self.mesh.pp > 1:
                    self._train_pipeline(batches)
                    return
                for batch in batches:
                    self._train_microbatch(batch)

    def _num_batches(self, own: int) -> int:
        """How many there are to be: for a pipeline no less than stages, and for zero 2, whose backward passes add up
        over the dp axis, as many as on any rank of it."""
        if self._spread.zero_stage == 2:
            number = torch.tensor(own)
            with collective("agreeing on the number of microbatches"):
                dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._spread.dp_group)
            return int(number)
        return max(own, self.mesh.pp) if own and self.mesh.pp > 1 else own

    def _train_microbatch(self, batch: Microbatch) -> None:
        logprobs, entropy = self._spread.model.logprobs(batch)
        reference = None
        if self._spread.reference is not None:
            with torch.no_grad():
                reference, _ = self._spread.reference.logprobs(batch, with_entropy=False)
        loss = self._sums.loss(batch, logprobs, entropy, reference)
        self._spread.booster.backward(loss, self._spread.optimizer)

    def _train_pipeline(self, batches: list[Microbatch]) -> None:
        if not batches:
            return
        references: list[Tensor] = []
        if self._spread.reference is not None:
            references = self._spread.reference.pipeline_forward(batches)

        def loss(number: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return self._sums.loss(batches[number], logprobs, entropy, references[number] if references else None)

        self._spread.model.pipeline_train(batches, loss, self._spread.booster, self._spread.optimizer)

    def commit(self, abandon: bool = False) -> StepResult | None:
        sums = self._sums.reduce(abandon, self.layout.counts, self._group, self._wait)
        if sums.pop(ABANDONED) > 0:
            self.discard()
            return None
        denominator = sums["denominator"]
        rate = learning_rate(self._config.learning_rate, self._step, self._num_schedule_steps, self._config.schedule)
        norm = float("nan")
        if denominator > 0 and math.isfinite(sums["loss"]):
            with self._as_world(), collective("the optimizer step"):
                self._spread.finish_gradients(1.0 / denominator)
                norm = self._spread.step(rate)
        self._step += 1
        finite = math.isfinite(norm)
        if finite:
            self._skipped_in_a_row = 0
        elif denominator > 0:
            self._skipped_in_a_row += 1
        self.discard()
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"the gradient was not finite in {MAX_SKIPPED_STEPS} steps in a row, up to step {self._step}; "
                "lower -lr, or train in float32 (--precision fp32)"
            )
        loss = sums["loss"] / denominator if denominator > 0 else 0.0
        return StepResult(not finite, loss, norm, rate, sums)

    def discard(self) -> None:
        self._spread.optimizer.zero_grad()
        self._sums.clear()

    # ------------------------------------------------------------------------------------------ weights and state

    def weight_specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name, list(shape), str(dtype).removeprefix("torch."))
            for name, (stage, shape, dtype) in self._origins.items()
            if stage == self.layout.pp_index
        ]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, (stage, _, dtype) in self._origins.items():
            if stage == self.layout.pp_index:
                with self._as_world(), collective("gathering weights"):
                    whole = self._spread.gathered(self._weights[name])
                yield name, whole.to(dtype)

    def save_state(self, folder: Path) -> None:
        self._state.save(folder, (self._step, self._skipped_in_a_row))

    def load_state(self, folder: Path, version: int) -> None:
        self._step, self._skipped_in_a_row = self._state.load(folder)
        assert self._step == version, f"state of step {self._step} in a folder of version {version}"

    def gather_model(self) -> dict[str, Tensor] | None:
        return gather_stages(self.weights(), self._origins, self.layout, self._group, self._device)

    def save_model(self, folder: Path, tokenizer: Any, weights: dict[str, Tensor]) -> None:
        model_folder.save_model(folder, self.model, tokenizer, weights)


def _persistent_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _nothing() -> Microbatch:
    """A microbatch of one prompt token and no response: it takes part in everything and adds nothing to any sum."""
    none, row = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    return Microbatch(
        input_ids=row,
        position_ids=row,
        segments=row,
        rows=none,
        targets=none,
        old_logprobs=none.float(),
        response_index=none,
        mask=none.bool(),
        temperature=1.0,
        advantages=none.float(),
        on_policy=none.bool(),
        prompt_lengths=np.ones(1, np.int64),
        places=np.zeros((0, 3), np.int64),
        stats={},
    )
