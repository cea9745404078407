"""The `torch` trainer: packed sequences, float32 gradients and master weights, spread over a (dp, pp, tp) mesh.

One optimizer step: `train_minibatch` adds gradient sums; `commit` adds those of all ranks, divides once by the step's
denominator, clips, and lets AdamW change the master weights. `layout.py` says what each axis does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo import failpoints
from zbgrpo.algorithms.packing import Microbatch, PackingRules, pack
from zbgrpo.checkpoint import model_folder
from zbgrpo.checkpoint.tensors import load_tensors, save_tensors
from zbgrpo.checkpoint.weight_files import WeightFiles
from zbgrpo.config.schema import AlgorithmConfig, TrainerConfig
from zbgrpo.errors import NonFiniteError
from zbgrpo.trainer.attention import choose_kernel
from zbgrpo.trainer.base import StepResult
from zbgrpo.trainer.gathering import Origin, gather_stages, names_of_tied
from zbgrpo.trainer.layout import (
    ALONE,
    Layout,
    full_tensor,
    names_once,
    shard_data_parallel,
    spread_layer,
    spread_vocabulary,
)
from zbgrpo.trainer.liger import use_liger
from zbgrpo.trainer.parameters import ShardedParameters, TrainedParameters, WholeParameters
from zbgrpo.trainer.pipeline import Pipeline, keep_stage, own_ends, own_layers, stage_of
from zbgrpo.trainer.policy import Policy
from zbgrpo.trainer.schedule import learning_rate
from zbgrpo.trainer.step_sums import ABANDONED, StepSums, loss_config
from zbgrpo.types import GroupPayload
from zbgrpo.weights.manifest import TensorSpec, named_weights

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TorchTrainer:
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
        group: dist.ProcessGroup | None,
        wait: Callable[[], Any],
        layout: Layout = ALONE,
        device: torch.device | None = None,
        files: WeightFiles | None = None,
    ) -> None:
        """`model` and `reference` (with KL only) are whole and on this rank's device, or without weights, which `files`
        has and `device` is to hold then; the model is in float32 if a zero stage spreads it. `wait()` is a context
        manager around waiting for other ranks; `group`: all consumers, None means this rank alone."""
        self.mesh, self.layout, self._config = layout.mesh, layout, config
        self.model = model.train()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._device = device or next(model.parameters()).device
        self._rules, self._group, self._wait = rules, group, wait
        self._num_schedule_steps = num_schedule_steps
        self._step = self._skipped_in_a_row = 0
        self._sums = StepSums(loss_config(algorithm), self._device)
        self._zero_stage = config.zero_stage if layout.mesh.dp > 1 else 0
        self._dtype = _DTYPES[config.precision] if self._zero_stage else next(model.parameters()).dtype
        self._kernel = choose_kernel(config.attention, self._device, self._dtype)
        logger.info("attention by %s", self._kernel)
        if config.liger_kernels:
            use_liger(model, self._device)
        self._origins = {
            name: Origin(stage_of(name, model, self.mesh.pp), tensor.shape, self._travels_as(tensor))
            for name, tensor in named_weights(model)
        }
        self._policy, self.parameters = self._spread(model, files)
        self._reference = self._place_reference(reference, files)
        self._pipeline = None
        if layout.mesh.pp > 1:
            width = model.config.get_text_config().hidden_size
            self._pipeline = Pipeline(layout, width, self._dtype, self._device)
        # The fused kernel reads and writes each value once; it exists for float32 on CPU and CUDA.
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )

    def _spread(self, model: Any, files: WeightFiles | None) -> tuple[Policy, TrainedParameters]:
        tied = names_of_tied(model)
        on_host = self._config.offload_optimizer
        policy, summed = self._place(model, files, self._dtype, self._zero_stage, on_host)
        # Where weights are spread, these are the tensors that stay spread; what a module shows can be gathered.
        self._weights = dict(named_weights(model))
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if tied is not None and self.mesh.pp > 1 and self.layout.is_last_stage:
            embedding, head = tied
            del self._weights[head]  # the first stage sends it
            named[embedding] = named.pop(head)
        kind = ShardedParameters if self._zero_stage else WholeParameters
        shared = tied[0] if tied is not None and self.mesh.pp > 1 else None
        return policy, kind(names_once(named), self.layout, self._group, frozenset(summed), shared, on_host)

    def _place(
        self, model: Any, files: WeightFiles | None, dtype: torch.dtype, zero_stage: int, on_host: bool
    ) -> tuple[Policy, set[str]]:
        """Leave to this rank what it keeps of a model, filled from `files` if it has no weights yet. Also the names of
        the parameters whose gradients are to be summed over the tp axis."""
        layout, summed = self.layout, set[str]()
        tied = names_of_tied(model)
        if layout.mesh.pp > 1:
            keep_stage(model, layout)
        for name, layer in own_layers(model).items():
            if files is not None:
                files.fill(layer, name, self._device)
            if layout.mesh.tp > 1:
                summed |= spread_layer(model, name, layer, layout)
            if zero_stage:
                shard_data_parallel(layer, layout, zero_stage, dtype, on_host)
        if files is not None:
            files.fill(model, "", self._device, {} if tied is None else {tied[1]: tied[0]})
        if layout.mesh.tp > 1:
            spread_vocabulary(*own_ends(model), layout)
        policy = Policy(model, dtype, self._config.logprob_chunk_tokens, layout, self._kernel)
        if zero_stage:
            shard_data_parallel(policy, layout, zero_stage, dtype, on_host)
        return policy, summed

    def _place_reference(self, reference: Any | None, files: WeightFiles | None) -> Policy | None:
        if reference is None:
            return None
        dtype = next(reference.parameters()).dtype
        zero_stage, on_host = 3 if self._zero_stage == 3 else 0, self._config.offload_reference
        policy, _ = self._place(reference, files, dtype, zero_stage, on_host)
        self._reference_moves = on_host and not zero_stage  # what is sharded moves by itself
        return policy.cpu() if self._reference_moves else policy

    def _travels_as(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    @property
    def _masters(self) -> dict[str, Tensor]:
        return self.parameters.masters

    @property
    def lockstep(self) -> bool:
        return self._zero_stage > 0 or self.mesh.tp > 1 or self.mesh.pp > 1

    # ------------------------------------------------------------------------------------------ one step

    def train_minibatch(self, groups: Sequence[GroupPayload], version: int, temperatures: Sequence[float]) -> None:
        batches = [batch.to(self._device) for batch in pack(groups, version, self._rules, temperatures)]
        references = self._references(batches)
        if self._pipeline is None:
            for number, (batch, reference) in enumerate(zip(batches, references, strict=True)):
                self._before_backward(number, len(batches))
                self._train_microbatch(batch, reference)
            return

        def loss(number: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return self._sums.loss(batches[number], logprobs, entropy, references[number])

        self._pipeline.train(self._policy, batches, loss, lambda number: self._before_backward(number, len(batches)))

    @torch.no_grad()
    def _references(self, batches: Sequence[Microbatch]) -> list[Tensor | None]:
        """Log-probs of the reference model, where there is one and this rank computes them."""
        nothing: list[Tensor | None] = [None] * len(batches)
        if self._reference is None:
            return nothing
        if self._reference_moves:
            self._reference.to(self._device)
        if self._pipeline is not None:
            found: list[Tensor] = self._pipeline.forward(self._reference, batches)
        else:
            found = [self._reference(batch, with_entropy=False)[0] for batch in batches]
        if self._reference_moves:
            self._reference.cpu()
        return [*found] or nothing

    def _before_backward(self, number: int, count: int) -> None:
        if self._zero_stage == 1:  # gradients stay whole until they are complete for this minibatch
            self._policy.set_requires_gradient_sync(number == count - 1)  # type: ignore[operator]

    def _train_microbatch(self, batch: Microbatch, reference: Tensor | None = None) -> None:
        logprobs, entropy = self._policy(batch)
        self._sums.loss(batch, logprobs, entropy, reference).backward()  # type: ignore[no-untyped-call]

    def commit(self, abandon: bool = False) -> StepResult | None:
        sums = self._sums.reduce(abandon, self.layout.counts, self._group, self._wait)
        if sums.pop(ABANDONED) > 0:
            self.discard()
            return None
        if failpoints.fire("step.gradients"):
            self.parameters.scale(math.nan)
        self.parameters.add_up()
        denominator = sums["denominator"]
        rate = learning_rate(self._config.learning_rate, self._step, self._num_schedule_steps, self._config.schedule)
        norm = float("nan")
        if denominator > 0:
            self.parameters.scale(1.0 / denominator)
            norm = self.parameters.norm()
        self._step += 1
        finite = math.isfinite(norm) and math.isfinite(sums["loss"])
        if finite:
            self._skipped_in_a_row = 0
            if norm > self._config.max_grad_norm:
                self.parameters.scale(self._config.max_grad_norm / norm)
            self._apply(rate)
        elif denominator > 0:
            self._skipped_in_a_row += 1
        loss = sums["loss"] / denominator if denominator > 0 else 0.0
        self.discard()
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"the gradient was not finite in {MAX_SKIPPED_STEPS} steps in a row, up to step {self._step}; "
                "lower -lr, or train in float32 (--precision fp32)"
            )
        return StepResult(not finite, loss, norm, rate, sums)

    def _apply(self, rate: float) -> None:
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        if self._zero_stage:
            self._reshard()
        self.parameters.hand_over()
        self._optimizer.step()
        with torch.no_grad():
            self.parameters.wrote_masters()

    def discard(self) -> None:
        self.parameters.discard()
        self._sums.clear()

    def _reshard(self) -> None:
        """Let go of gathered weights: the next forward pass gathers them anew, as the optimizer left them."""
        for module in (*own_layers(self.model).values(), self._policy):
            module.reshard()  # type: ignore[operator]

    # ------------------------------------------------------------------------------------------ weights and state

    def weight_specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name, list(tensor.shape), str(self._travels_as(tensor)).removeprefix("torch."))
            for name, tensor in self._weights.items()
        ]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights.items():
            yield name, full_tensor(tensor, self._dtype)

    def _state(self) -> dict[str, Any]:
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, master in self._masters.items():
            state = self._optimizer.state.setdefault(master, {})
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            for moment, tensors in moments.items():
                tensors[name] = state[moment]
        updates = next(iter(self._optimizer.state.values()))["step"]
        counters = torch.tensor([self._step, self._skipped_in_a_row, int(updates)], dtype=torch.int64)
        parts = {"master": {name: master.detach() for name, master in self._masters.items()}, **moments}
        return {key: self.parameters.spread_as(tensors) for key, tensors in parts.items()} | {"counters": counters}

    def save_state(self, folder: Path) -> None:
        save_tensors(self._state(), folder, self._group)

    def load_state(self, folder: Path, version: int) -> None:
        if self._zero_stage:
            self._reshard()
        state = self._state()
        load_tensors(state, folder, self._group)
        self._step, self._skipped_in_a_row, updates = state["counters"].tolist()
        assert self._step == version, f"state of step {self._step} in a folder of version {version}"
        with torch.no_grad():
            for master in self._masters.values():
                self._optimizer.state[master]["step"].fill_(updates)
            self.parameters.wrote_masters()

    def gather_model(self) -> dict[str, Tensor] | None:
        is_first = self._group is None or dist.get_rank(self._group) == 0
        if not is_first and not self.lockstep:
            return None
        return gather_stages(self.weights(), self._origins, self.layout, self._group, self._device)

    def save_model(self, folder: Path, tokenizer: Any, weights: dict[str, Tensor]) -> None:
        model_folder.save_model(folder, self.model, tokenizer, weights)
