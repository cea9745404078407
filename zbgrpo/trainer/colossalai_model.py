"""A model and its optimizer as ColossalAI spreads them over the consumers' (dp, pp, tp) mesh.

The output head is never called: a model's `logits` are its hidden states, and log-probs come from these and from this
rank's rows of the head's weight. So the [tokens, vocabulary] logits, which shardformer leaves spread over the tp axis,
never exist, and one way serves every layout and family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbgrpo.algorithms.logprobs import VocabularyShard, token_logprobs
from zbgrpo.algorithms.packing import Microbatch
from zbgrpo.config.schema import TrainerConfig
from zbgrpo.errors import ConfigError, ModelError
from zbgrpo.trainer.base import Mesh
from zbgrpo.trainer.colossalai_repairs import library
from zbgrpo.trainer.layout import Layout

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
"""Models that were tried under every layout."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check_settings(config: TrainerConfig, mesh: Mesh) -> None:
    """Raise `ConfigError` for what ColossalAI does not do."""
    zero = zero_stage_of(config, mesh)
    if config.zero_stage == 3:
        raise ConfigError("-zero 3: --trainer colossalai has stages 0, 1 and 2; use --trainer torch")
    if zero == 2 and mesh.pp > 1:
        raise ConfigError("-zero 2: ColossalAI has no stage 2 with a pipeline (-pp); use -zero 1 or --trainer torch")
    if zero and config.precision == "fp32" and (mesh.tp > 1 or mesh.pp > 1):
        raise ConfigError(
            f"-zero {zero}: ColossalAI has no zero stage in float32 with -tp or -pp; use --precision bf16, -zero 0 or "
            "--trainer torch"
        )
    if config.offload_optimizer and not zero:
        raise ConfigError("offload_optimizer: ColossalAI keeps it on the host with -zero 1 or 2 only")
    if config.offload_reference:
        raise ConfigError("offload_reference: --trainer colossalai keeps the reference model on the device")


def check_model(model: Any, mesh: Mesh, path: str) -> None:
    """Raise `ModelError`, naming what is in the way, unless the model can be spread over the mesh."""
    config = model.config.get_text_config()
    if type(model).__name__ not in FAMILIES:
        raise ModelError(
            f"model {path}: --trainer colossalai trains {' and '.join(FAMILIES)}, not {type(model).__name__}; use "
            "--trainer torch"
        )
    divided = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "tokens of the vocabulary": len(model.get_output_embeddings().weight),
    }
    for what, number in divided.items():
        if number % mesh.tp:
            raise ModelError(f"-tp/--tensor-parallel-size: {mesh.tp} does not divide the {number} {what} of {path}")
    if config.num_hidden_layers < mesh.pp:
        raise ModelError(
            f"-pp/--pipeline-parallel-size: {mesh.pp} stages, but {path} has {config.num_hidden_layers} layers"
        )


def zero_stage_of(config: TrainerConfig, mesh: Mesh) -> int:
    """The stage that makes a difference: with a single data-parallel rank there is nothing to spread."""
    return config.zero_stage if mesh.dp > 1 else 0


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that leaves everything as it is when the norm of the gradient is not finite.

    ColossalAI's optimizers measure the norm, clip, call this, and copy master weights to the model in one go."""

    norm: Callable[[], float | None]

    def step(self, closure: Any = None) -> Any:
        norm = self.norm()
        return super().step(closure) if norm is not None and math.isfinite(norm) else None


class SpreadModel:
    """One model on this rank: forward, and for a trained one backward and its parameters.

    All of it is to be used inside `as_world`."""

    def __init__(self, wrapped: Any, module: Any, plugin: Any, layout: Layout, config: TrainerConfig) -> None:
        """`wrapped` is what ColossalAI made of a model, `module` the Hugging Face module in it."""
        self.wrapped, self.module, self._plugin, self._layout = wrapped, module, plugin, layout
        self._dtype, self._chunk_tokens = DTYPES[config.precision], config.logprob_chunk_tokens
        self._batches: Sequence[Microbatch] = ()
        self._number = -1  # of the microbatch that is due
        module.get_output_embeddings().forward = lambda hidden: hidden
        if layout.mesh.pp > 1:
            module.register_forward_pre_hook(self._fill_in, with_kwargs=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parts of the parameters by Hugging Face names; the head of tied ones on its own last stage."""
        return dict(self.module.named_parameters())

    def logprobs(self, batch: Microbatch, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens at their sampling temperature, and entropies: both [T]."""
        return self._logprobs_of(self.wrapped(**self._inputs(batch)), batch, with_entropy)

    def _inputs(self, batch: Microbatch) -> dict[str, Any]:
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": batch.attention_mask(self._dtype),
            "use_cache": False,
        }

    def _logprobs_of(self, output: Any, batch: Microbatch, with_entropy: bool) -> tuple[Tensor, Tensor]:
        head = self.module.get_output_embeddings()
        hidden = output.logits.flatten(0, 1)[batch.rows].to(head.weight.dtype)  # some forwards end in float32
        shard = None
        if self._layout.mesh.tp > 1:
            shard = VocabularyShard(self._plugin.tp_group, len(head.weight) * self._layout.tp_index)
        return token_logprobs(
            hidden, head.weight, batch.targets, batch.temperature, self._chunk_tokens, head.bias, with_entropy, shard
        )

    # ------------------------------------------------------------------------------------------ pipelines

    def _fill_in(self, module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The schedule cuts one batch into microbatches of one shape. Ours have a shape each, so it is given a batch
        that says only how many there are, and each stage, which computes them in order, puts in the one that is due."""
        del inputs["place"]
        self._number += 1
        return args, self._inputs(self._batches[self._number]) | inputs

    @contextmanager
    def _microbatches(self, batches: Sequence[Microbatch]) -> Iterator[Iterator[dict[str, Tensor]]]:
        self._batches, self._number = batches, -1
        scheduler = self._plugin.scheduler
        scheduler.num_microbatches = scheduler.last_batch_size = None  # it expects as many as the last time
        yield iter([{"place": torch.zeros(len(batches))}])
        self._batches = ()

    def pipeline_forward(self, batches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probs of every microbatch without gradients; on the last stage, empty on the others."""
        results: list[Tensor] = []

        def keep(output: Any, _inputs: Any) -> Tensor:
            logprobs, _ = self._logprobs_of(output, batches[self._number], with_entropy=False)
            results.append(logprobs)
            return logprobs.new_zeros(())

        # no_sync: there are no gradients to add up behind it.
        with torch.no_grad(), self.wrapped.no_sync(), self._microbatches(batches) as data:
            self._plugin.execute_pipeline(data, self.wrapped, keep, return_loss=False)
        return results

    def pipeline_train(
        self, batches: Sequence[Microbatch], loss: Callable[[int, Tensor, Tensor], Tensor], booster: Any, optimizer: Any
    ) -> None:
        """Add the gradients of all microbatches (1F1B). `loss(number, log-probs, entropies)` is asked on the last
        stage. There are to be as many microbatches as stages, or more."""

        def criterion(output: Any, _inputs: Any) -> Tensor:
            logprobs, entropy = self._logprobs_of(output, batches[self._number], with_entropy=True)
            return loss(self._number, logprobs, entropy) * len(batches)  # the schedule divides by it

        with self._microbatches(batches) as data:
            booster.execute_pipeline(data, self.wrapped, criterion, optimizer, return_loss=False)


class Spread:
    """The trained model with its optimizer, and the reference."""

    def __init__(
        self, model: Any, reference: Any | None, config: TrainerConfig, layout: Layout, group: dist.ProcessGroup
    ) -> None:
        """Spread the models, which are whole on every rank, over the ranks of `group` and make AdamW over the trained
        one. All of them call this together, inside `as_world`."""
        check_settings(config, layout.mesh)
        self.zero_stage, self._layout, self._group = zero_stage_of(config, layout.mesh), layout, group
        self._lib = library()
        self._lib.clear_layout_converter()  # it would go on with the process groups of an earlier model
        optimizer = SkippingAdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.plugin = self._make_plugin(config)
        self.booster = self._lib.Booster(plugin=self.plugin)
        wrapped, self.optimizer, *_ = self.booster.boost(model, optimizer)
        optimizer.norm = self.optimizer.get_grad_norm
        self.model = SpreadModel(wrapped, wrapped.unwrap(), self.plugin, layout, config)
        for parameter in self.model.module.parameters():
            if hasattr(parameter, "grad_dtype"):  # torch 2.10: sums of gradients stay in float32
                parameter.grad_dtype = torch.float32
        self.reference = None if reference is None else self._spread_reference(reference, config)

    def _make_plugin(self, config: TrainerConfig) -> Any:
        mesh = self._layout.mesh
        on_gpu = torch.cuda.is_available()
        if self.zero_stage and config.precision == "fp32":  # which HybridParallelPlugin refuses
            return self._lib.LowLevelZeroPlugin(
                stage=self.zero_stage,
                precision="fp32",
                max_norm=config.max_grad_norm,
                overlap_communication=on_gpu,
                cpu_offload=config.offload_optimizer,
            )
        return self._lib.HybridParallelPlugin(
            tp_size=mesh.tp,
            pp_size=mesh.pp,
            precision=config.precision,
            zero_stage=self.zero_stage,
            max_norm=config.max_grad_norm,
            microbatch_size=1,
            enable_metadata_cache=False,  # it would take all microbatches for as long as the first one
            make_vocab_size_divisible_by=1,
            broadcast_buffers=False,  # forward passes are to wait for no other data-parallel rank
            overlap_communication=on_gpu,
            cpu_offload=config.offload_optimizer,
        )

    def _spread_reference(self, reference: Any, config: TrainerConfig) -> SpreadModel:
        """Without DistributedDataParallel, which refuses a model that has no gradients."""
        if not isinstance(self.plugin, self._lib.HybridParallelPlugin):
            device = next(self.model.module.parameters()).device
            return SpreadModel(reference.to(device), reference, self.plugin, self._layout, config)
        plugin = self.plugin
        wrapped = self._lib.HybridParallelModule(
            reference, plugin.precision, plugin.shard_config, plugin.mixed_dp_group, plugin.tp_group, plugin.sp_group,
            use_ddp=False, ddp_config={}, custom_policy=None,
        )  # fmt: skip
        return SpreadModel(wrapped, wrapped.unwrap(), plugin, self._layout, config)

    @property
    def dp_group(self) -> Any:
        """The data-parallel group of this rank."""
        hybrid = isinstance(self.plugin, self._lib.HybridParallelPlugin)
        return self.plugin.mixed_dp_group if hybrid else self._group

    # ------------------------------------------------------------------------------------------ gradients

    def accumulating(self) -> AbstractContextManager[Any]:
        """Inside, backward passes add to this rank's gradients and no rank waits for another. With stage 2 there is no
        such thing: every backward pass leaves each rank its part of the sum."""
        return nullcontext() if self.zero_stage == 2 else self.booster.no_sync(self.wrapped, self.optimizer)

    @property
    def wrapped(self) -> Any:
        """What ColossalAI made of the trained model."""
        return self.model.wrapped

    def finish_gradients(self, factor: float) -> None:
        """Make `factor` x the gradients of the whole step, summed over all ranks that saw a part of it."""
        factor *= self._layout.mesh.dp  # the library averages over the dp axis
        parameters = list(self.model.module.parameters())
        if self.zero_stage == 2:
            for parameter in parameters:
                for part in self.optimizer.get_partitioned_gradients_by_param_id(0, id(parameter)):
                    part.mul_(factor)
            return
        for parameter in parameters:
            if parameter.grad is None:  # this rank had nothing to train in the step
                parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
            else:
                parameter.grad.mul_(factor)
        if self._layout.mesh.pp > 1:
            self.wrapped.sync_shared_params()  # a tied embedding and head on two stages
        if self.zero_stage == 1:
            self.optimizer._sync_grad()
        elif self._layout.mesh.dp > 1:
            self.wrapped.sync_dp_grads()

    def step(self, rate: float) -> float:
        """Clip, and update the weights unless the gradient is not finite. Returns its norm before clipping."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        return float(self.optimizer.get_grad_norm())

    # ------------------------------------------------------------------------------------------ weights

    def gathered(self, parameter: Tensor) -> Tensor:
        """The whole of a parameter, on every rank of its tp group, all of which call this."""
        parameter, dimension = parameter.detach(), self.sharded_dimension(parameter)
        if dimension is None:
            return parameter
        parts = [torch.empty_like(parameter) for _ in range(self._layout.mesh.tp)]
        dist.all_gather(parts, parameter.contiguous(), group=self.plugin.tp_group)
        return torch.cat(parts, dimension)

    def sharded_dimension(self, parameter: Tensor) -> int | None:
        """The dimension that is spread over the tp axis; None if every rank has the whole parameter."""
        if not self._lib.is_distributed_tensor(parameter):
            return None
        (dimension,) = self._lib.get_sharding_spec(parameter).dim_partition_dict
        return int(dimension)
