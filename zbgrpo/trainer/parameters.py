"""What the optimizer sees of a model: this rank's part of every trained parameter, in float32.

`WholeParameters` (zero 0) holds gradient sums of all its parameters in one flat buffer and meets the other
data-parallel ranks once a step. `ShardedParameters` (zero 1 to 3) leaves both to FSDP2, whose gradients arrive summed.
Either way `masters` are plain local tensors, so that one optimizer kernel and one norm serve every layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.layout import Layout, like, local, num_replicas, sum_of_ends


class TrainedParameters:
    """Common part. `sums[name]` are this rank's gradients, from `add_up` to `discard`; `masters[name]` is what the
    optimizer changes, on the host if that is where it is to be."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        group: dist.ProcessGroup | None,
        summed_over_tp: frozenset[str] = frozenset(),
        tied_over_pp: str | None = None,
        on_host: bool = False,
    ) -> None:
        """`parameters` by Hugging Face names, tied ones once; `group`: all consumers, None for this rank alone.
        `tied_over_pp`: the one that both the first and the last stage hold."""
        self.parameters, self.layout, self._group = dict(parameters), layout, group
        self._summed_over_tp = [name for name in self.parameters if name in summed_over_tp]
        self._tied = tied_over_pp if tied_over_pp in self.parameters else None
        self.masters: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self._on_host = on_host
        self._replicas = {name: num_replicas(p, layout) for name, p in self.parameters.items()}
        self._spread = layout.mesh.pp > 1 or len(set(self._replicas.values())) > 1 or self._is_sharded()
        self._prepare()

    def _prepare(self) -> None:
        """Fill `masters`, and see to where gradients go."""
        raise NotImplementedError

    def _is_sharded(self) -> bool:
        everywhere = self.layout.mesh.dp * self.layout.mesh.tp
        return any(number != everywhere for number in self._replicas.values())

    def add_up(self) -> None:
        """Make the gradients of the whole step, summed over all ranks that saw a part of it."""
        tp = self.layout.group("tp")
        if tp is not None:
            with collective("adding up gradients"):
                for name in self._summed_over_tp:
                    dist.all_reduce(self.sums[name], group=tp)
        if self._tied is not None:
            sum_of_ends(self.sums[self._tied], self.layout)

    def discard(self) -> None:
        """Forget the gradients."""
        raise NotImplementedError

    def hand_over(self) -> None:
        """Give the optimizer its gradients, where its masters are."""
        for name, master in self.masters.items():
            master.grad = self.sums[name].to(master.device)

    def wrote_masters(self) -> None:
        """Bring what the optimizer wrote to the model."""
        for name, parameter in self.parameters.items():
            own, master = local(parameter.detach()), self.masters[name]
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for gradient in self.sums.values():
            gradient.mul_(factor)

    def norm(self) -> float:
        """Global norm of all gradients, the same on every rank: each element counts once, wherever copies of it are."""
        total = 0.0
        for name, gradient in self.sums.items():
            if name == self._tied and self.layout.pp_index > 0:
                continue  # counted on the first stage
            total += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 / self._replicas[name]
        if self._group is None:
            return math.sqrt(total)
        value = torch.tensor(total, dtype=torch.float64)
        with collective("adding up the gradient's norm"):
            dist.all_reduce(value, group=self._group)
        return math.sqrt(float(value))

    def spread_as(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Local tensors in the shape of the masters, as a checkpoint of any other layout can read them."""
        return {name: like(self.parameters[name], tensor) for name, tensor in tensors.items()}


class WholeParameters(TrainedParameters):
    """zero 0: every data-parallel rank has all of it. One flat float32 buffer for all gradients of this rank."""

    def _prepare(self) -> None:
        first = next(iter(self.parameters.values()))
        parts = {name: local(p.detach()) for name, p in self.parameters.items()}
        self.gradients = torch.zeros(sum(part.numel() for part in parts.values()), device=local(first).device)
        offset = 0
        for name, part in parts.items():
            view = self.gradients[offset : offset + part.numel()].view_as(part)
            offset += part.numel()
            self.sums[name] = view
            parameter = self.parameters[name]
            if part.dtype == torch.float32 and not isinstance(parameter, DTensor):
                parameter.grad = view  # autograd adds into it in place
            else:
                parameter.register_post_accumulate_grad_hook(_AddInto(view))
            if self._on_host:
                self.masters[name] = part.to("cpu", torch.float32, copy=True).requires_grad_()
            elif part.dtype == torch.float32:
                self.masters[name] = part.requires_grad_() if isinstance(parameter, DTensor) else parameter
            else:
                self.masters[name] = part.float().requires_grad_()

    def add_up(self) -> None:
        super().add_up()
        dp = self.layout.group("dp")
        if dp is not None:
            with collective("adding up gradients"):
                dist.all_reduce(self.gradients, group=dp)

    def discard(self) -> None:
        self.gradients.zero_()

    def scale(self, factor: float) -> None:
        self.gradients.mul_(factor)

    def norm(self) -> float:
        if self._spread:
            return super().norm()
        return float(torch.linalg.vector_norm(self.gradients))


class ShardedParameters(TrainedParameters):
    """zero 1 to 3, after `shard_data_parallel`: the parameters are DTensors over (at least) the dp axis."""

    def _prepare(self) -> None:
        for name, parameter in self.parameters.items():
            assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32, name
            self.masters[name] = local(parameter.detach()).requires_grad_()

    def add_up(self) -> None:
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                self.sums[name] = torch.zeros_like(self.masters[name])
            else:
                self.sums[name] = own_share(parameter, gradient).float()
        super().add_up()

    def discard(self) -> None:
        self.sums = {}
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None


class _AddInto:
    """Hook: move a parameter's fresh gradient into a float32 buffer and drop it."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def __call__(self, parameter: Tensor) -> None:
        gradient: Any = parameter.grad
        assert gradient is not None
        self._buffer.add_(own_share(parameter, gradient))
        parameter.grad = None


def own_share(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, spread as its parameter is."""
    gradient = gradient.detach()
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)
