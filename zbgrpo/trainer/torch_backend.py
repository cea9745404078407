"""The `torch` trainer: data parallel, packed sequences, float32 gradients and master weights.

One optimizer step: `train_minibatch` adds gradient sums into one flat float32 buffer; `commit` adds the buffers of
all ranks, divides once by the step's denominator, clips, and lets AdamW change the master weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo.algorithms.logprobs import token_logprobs
from zbgrpo.algorithms.losses import LOSS_STATISTICS, LossConfig, policy_loss
from zbgrpo.algorithms.packing import STATISTICS, Microbatch, PackingRules, pack
from zbgrpo.checkpoint import model_folder
from zbgrpo.config.schema import AlgorithmConfig, TrainerConfig
from zbgrpo.errors import NonFiniteError
from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.base import Mesh, StepResult
from zbgrpo.trainer.schedule import learning_rate
from zbgrpo.types import GroupPayload
from zbgrpo.weights.manifest import named_weights

MAX_SKIPPED_STEPS = 5
_DEVICE_SUMS = (*LOSS_STATISTICS, "loss", "denominator", "entropy", "gap", "gap_tokens")
_ABANDONED = "abandoned"  # ranks that have left out work of the step, because a stop is due
_MAXIMA = ("lag_max",)  # statistics that are not summed over ranks but maximised


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
    ) -> None:
        """`model` and `reference` (with KL only) are on this rank's device; `wait()` is a context manager around
        waiting for other ranks; `group` None means this rank alone."""
        self.mesh = Mesh(dist.get_world_size(group) if group is not None else 1, 1, 1)
        self.model, self._reference, self._config = model.train(), reference, config
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._device = next(model.parameters()).device
        self._rules, self._group, self._wait = rules, group, wait
        self._num_schedule_steps = num_schedule_steps
        self._loss = _loss_config(algorithm)
        self._step = self._skipped_in_a_row = 0
        self._host_sums = dict.fromkeys(STATISTICS, 0.0)
        self._device_sums = torch.zeros(len(_DEVICE_SUMS), dtype=torch.float64, device=self._device)
        self._prepare_gradients()
        # The fused kernel reads and writes each value once; it exists for float32 on CPU and CUDA.
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )

    def _prepare_gradients(self) -> None:
        """One flat float32 buffer for all gradients, and a float32 master of every trained parameter."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._gradients = torch.zeros(sum(p.numel() for p in parameters.values()), device=self._device)
        self._masters: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in parameters.items():
            view = self._gradients[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if parameter.dtype == torch.float32:
                self._masters[name] = parameter
                parameter.grad = view  # autograd adds into it in place
            else:
                master = parameter.detach().float().clone().requires_grad_()
                master.grad = view
                self._masters[name] = master
                parameter.register_post_accumulate_grad_hook(_AddInto(view))
        self._parameters = parameters

    # ------------------------------------------------------------------------------------------ one step

    def train_minibatch(self, groups: Sequence[GroupPayload], version: int, temperatures: Sequence[float]) -> None:
        for microbatch in pack(groups, version, self._rules, temperatures):
            self._train_microbatch(microbatch.to(self._device))

    def _train_microbatch(self, batch: Microbatch) -> None:
        logprobs, entropy = self._logprobs(self.model, batch, with_entropy=True)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference, batch, with_entropy=False)
        sums = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.response_index,
            batch.mask,
            batch.num_responses,
            self._loss,
            reference,
        )
        sums.loss.backward()  # type: ignore[no-untyped-call]
        # Nothing is read here: the host goes on to the next microbatch while the device works on this one.
        gap = torch.where(batch.on_policy, (logprobs.detach() - batch.old_logprobs).abs(), 0.0)
        values = sums.stats | {
            "loss": sums.loss.detach(),
            "denominator": sums.denominator,
            "entropy": entropy.sum(dtype=torch.float64),
            "gap": gap.sum(dtype=torch.float64),
            "gap_tokens": batch.on_policy.sum(dtype=torch.float64),
        }
        self._device_sums += torch.stack([values[name] for name in _DEVICE_SUMS])
        for name, value in batch.stats.items():
            old = self._host_sums[name]
            self._host_sums[name] = max(old, value) if name in _MAXIMA else old + value

    def _logprobs(self, model: Any, batch: Microbatch, with_entropy: bool) -> tuple[Tensor, Tensor]:
        head = model.get_output_embeddings()
        hidden = model.get_decoder()(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask(head.weight.dtype),
            use_cache=False,
        ).last_hidden_state
        return token_logprobs(
            hidden.flatten(0, 1)[batch.rows],
            head.weight,
            batch.targets,
            batch.temperature,
            self._config.logprob_chunk_tokens,
            head.bias,
            with_entropy,
        )

    def commit(self, abandon: bool = False) -> StepResult | None:
        sums = self._reduce_sums(abandon)
        if sums.pop(_ABANDONED) > 0:
            self.discard()
            return None
        if self._group is not None and self.mesh.dp > 1:
            with collective("adding up gradients"):
                dist.all_reduce(self._gradients, group=self._group)
        denominator = sums["denominator"]
        rate = learning_rate(self._config.learning_rate, self._step, self._num_schedule_steps, self._config.schedule)
        norm = float("nan")
        if denominator > 0:
            self._gradients.div_(denominator)
            norm = float(torch.linalg.vector_norm(self._gradients))
        self._step += 1
        finite = math.isfinite(norm) and math.isfinite(sums["loss"])
        if finite:
            self._skipped_in_a_row = 0
            if norm > self._config.max_grad_norm:
                self._gradients.mul_(self._config.max_grad_norm / norm)
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

    def _reduce_sums(self, abandon: bool) -> dict[str, float]:
        """Sums over all ranks. The first thing that ranks do together in a step: waiting here is imbalance."""
        sums = self._host_sums | dict(zip(_DEVICE_SUMS, self._device_sums.tolist(), strict=True))
        sums[_ABANDONED] = float(abandon)
        if self._group is None or self.mesh.dp == 1:
            return sums
        names = sorted(sums)
        added = torch.tensor([sums[n] for n in names], dtype=torch.float64)
        largest = torch.tensor([sums[n] for n in _MAXIMA], dtype=torch.float64)
        with self._wait(), collective("meeting the other consumers at the end of a step"):
            dist.all_reduce(added, group=self._group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(names, added.tolist(), strict=True)) | dict(zip(_MAXIMA, largest.tolist(), strict=True))

    def _apply(self, rate: float) -> None:
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not self._masters[name]:
                    parameter.copy_(self._masters[name])

    def discard(self) -> None:
        self._gradients.zero_()
        self._host_sums = dict.fromkeys(STATISTICS, 0.0)
        self._device_sums.zero_()

    # ------------------------------------------------------------------------------------------ weights and state

    def weights(self) -> Mapping[str, Tensor]:
        return dict(named_weights(self.model))

    def _state(self) -> dict[str, Any]:
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, master in self._masters.items():
            state = self._optimizer.state.setdefault(master, {})
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            for moment, tensors in moments.items():
                tensors[name] = state[moment]
        updates = next(iter(self._optimizer.state.values()))["step"]
        counters = torch.tensor([self._step, self._skipped_in_a_row, int(updates)], dtype=torch.int64)
        return {"master": {n: m.detach() for n, m in self._masters.items()}, **moments, "counters": counters}

    def save_state(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp  # loads slowly

        dcp.save(  # type: ignore[attr-defined]
            self._state(), checkpoint_id=folder, process_group=self._group, no_dist=self._group is None
        )

    def load_state(self, folder: Path, version: int) -> None:
        import torch.distributed.checkpoint as dcp  # loads slowly

        state = self._state()
        dcp.load(  # type: ignore[attr-defined]
            state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None
        )
        self._step, self._skipped_in_a_row, updates = state["counters"].tolist()
        assert self._step == version, f"state of step {self._step} in a folder of version {version}"
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._optimizer.state[self._masters[name]]["step"].fill_(updates)
                if parameter is not self._masters[name]:
                    parameter.copy_(self._masters[name])

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        model_folder.save_model(folder, self.model, tokenizer, dict(self.weights()))


class _AddInto:
    """Hook: move a parameter's fresh gradient into a float32 buffer and drop it."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._buffer.add_(parameter.grad)
        parameter.grad = None


def _loss_config(algorithm: AlgorithmConfig) -> LossConfig:
    assert algorithm.clip_low is not None and algorithm.clip_high is not None and algorithm.kl_coeff is not None
    return LossConfig(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coeff=algorithm.kl_coeff,
        token_mean=algorithm.loss == "token_mean",
        skip_threshold=algorithm.skip_threshold,
    )
