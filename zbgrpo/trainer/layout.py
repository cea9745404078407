"""How a model is spread over the consumers: a (dp, pp, tp) mesh, and what each axis does to its modules.

tp  column- and row-parallel linear layers by the model's own plan, vocabulary-parallel embedding and head (DTensor)
pp  each stage keeps its layers, and what it does not own is replaced (`pipeline.py`)
dp  zero 0: every rank has everything. 1: optimizer state and master weights are spread; gradients once a minibatch.
    2: gradients too, after every backward pass. 3: weights too, gathered layer by layer as they are needed (FSDP2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from zbgrpo.algorithms.logprobs import VocabularyShard
from zbgrpo.errors import ModelError
from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.base import Mesh


@dataclass(frozen=True)
class Layout:
    """This rank's place in the mesh. `device_mesh` has the axes dp, pp and tp; None for a single rank."""

    mesh: Mesh
    dp_index: int = 0
    pp_index: int = 0
    tp_index: int = 0
    device_mesh: Any = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group along one axis; None where it has a single rank."""
        if self.device_mesh is None or self.device_mesh[axis].size() == 1:
            return None
        group: dist.ProcessGroup = self.device_mesh[axis].get_group()
        return group

    @property
    def is_last_stage(self) -> bool:
        return self.pp_index == self.mesh.pp - 1

    @property
    def counts(self) -> bool:
        """Whether this rank's statistics count: the other tensor-parallel ranks have the same, other stages none."""
        return self.tp_index == 0 and self.is_last_stage

    @staticmethod
    def of(device_mesh: Any) -> Layout:
        """This rank's place in a mesh of `groups.process_groups.make_mesh`."""
        if device_mesh is None:
            return ALONE
        axes = [device_mesh[axis] for axis in ("dp", "pp", "tp")]
        dp, pp, tp = (axis.get_local_rank() for axis in axes)
        return Layout(Mesh(*(axis.size() for axis in axes)), dp, pp, tp, device_mesh)


ALONE = Layout(Mesh(1, 1, 1))


# ------------------------------------------------------------------------------------------------ tensor parallel

_STYLES: dict[str, type[ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
}
_GRADIENT_SUMMED = "replicated_with_grad_allreduce"


def check_tensor_parallel(model: Any, tp_size: int, path: str) -> None:
    """Raise `ModelError`, naming what is in the way, unless the model can be spread over `tp_size` ranks."""
    config = model.config.get_text_config()
    plan = _plan(model)
    if not plan:
        raise ModelError(f"model {path}: {type(model).__name__} has no tensor-parallel plan; use -tp 1")
    unknown = sorted(set(plan.values()) - set(_STYLES) - {_GRADIENT_SUMMED})
    if unknown:
        raise ModelError(f"model {path}: its tensor-parallel plan asks for {', '.join(unknown)}; use -tp 1")
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    for number, what in zip(heads, ("attention heads", "key-value heads"), strict=True):
        if number % tp_size:
            raise ModelError(f"-tp/--tensor-parallel-size: {tp_size} does not divide the {number} {what} of {path}")


def _plan(model: Any) -> dict[str, str]:
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    # Some releases list the embedding too; the vocabulary is spread here in any case.
    return {pattern: style for pattern, style in plan.items() if style != "embedding_rowwise"}


def spread_layer(model: Any, name: str, layer: nn.Module, layout: Layout) -> set[str]:
    """Spread the linear layers of a decoder layer over the tp axis; `name` is the layer's in the model.

    Returns the names of the parameters that every rank holds whole although it sees only a part of the activations:
    their gradients are to be summed over the axis.
    """
    mesh, plan, prefix = layout.device_mesh["tp"], _plan(model), model.base_model_prefix
    summed: set[str] = set()
    for own, module in layer.named_modules(prefix=name):
        style = next((s for pattern, s in plan.items() if fnmatchcase(own, f"{prefix}.{pattern}")), None)
        if style == _GRADIENT_SUMMED:
            summed.update(f"{own}.{parameter}" for parameter, _ in module.named_parameters(recurse=False))
        elif style is not None:
            parallelize_module(module, mesh, _STYLES[style](), src_data_rank=None)
    return summed


def spread_vocabulary(embedding: Any, head: Any, layout: Layout) -> None:
    """Rows of embedding and head (None on a stage without it) over the ranks of the tp axis. The head is used by its
    local rows alone, never called."""
    mesh = layout.device_mesh["tp"]
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    if embedding is not None:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if head is None:
        return
    if tied:
        head.weight = embedding.weight
    for name, parameter in list(head.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            head.register_parameter(name, nn.Parameter(part, parameter.requires_grad))


def vocabulary_shard(num_rows: int, layout: Layout) -> VocabularyShard | None:
    """This rank's rows of a head with `num_rows`; None where it has them all."""
    group = layout.group("tp")
    if group is None:
        return None
    size = -(-num_rows // layout.mesh.tp)
    return VocabularyShard(group, min(num_rows, size * layout.tp_index))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ------------------------------------------------------------------------------------------------ data parallel


def shard_data_parallel(
    module: nn.Module, layout: Layout, zero_stage: int, dtype: torch.dtype, on_host: bool = False
) -> None:
    """Spread the parameters of a module that are not spread yet over the dp axis; `on_host` keeps the shards there.
    Layer by layer and the whole last, so that gathering one layer overlaps computing another.

    Gradients are summed over the axis, not averaged: a step is divided once, by its denominator.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    spread: Any = fully_shard(
        module,
        mesh=layout.device_mesh["dp"],
        reshard_after_forward=zero_stage == 3,
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy(torch.cuda.is_available()) if on_host else OffloadPolicy(),
    )
    spread.set_gradient_divide_factor(1.0)
    spread.set_force_sum_reduction_for_comms(True)
    spread.set_reshard_after_backward(zero_stage == 3, recurse=False)


# ------------------------------------------------------------------------------------------------ gathering


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The whole of a tensor that is spread; all ranks of its mesh call it. Detached, in `dtype` if given."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """`part`, this rank's share of something of the parameter's shape, as a tensor spread as the parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    # Not `from_local`, which would move what is kept on the host to the mesh's device.
    return DTensor(part, parameter._spec, requires_grad=False)


def num_replicas(parameter: Tensor, layout: Layout) -> int:
    """How many ranks of this rank's pipeline stage hold the same elements as this one."""
    holders = layout.mesh.dp * layout.mesh.tp
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():  # strided shards are no plain shards
                holders //= parameter.device_mesh.size(axis)
    return holders


def names_once(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Tied parameters under the first of their names."""
    seen: set[int] = set()
    return {n: p for n, p in parameters.items() if id(p) not in seen and not seen.add(id(p))}  # type: ignore[func-returns-value]


def sum_of_ends(tensor: Tensor, layout: Layout) -> None:
    """Add up what the first and the last stage hold, in place; the stages between do nothing."""
    group = layout.group("pp")
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    if 0 < layout.pp_index < layout.mesh.pp - 1:
        return
    other = ranks[-1] if layout.pp_index == 0 else ranks[0]
    received = torch.empty_like(tensor)
    operations = [dist.P2POp(dist.isend, tensor, other, group), dist.P2POp(dist.irecv, received, other, group)]
    with collective("adding up the gradients of tied weights"):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    tensor.add_(received)
