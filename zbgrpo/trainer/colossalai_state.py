"""Master weights and moments of a model that ColossalAI has spread, as checkpoints of any layout and trainer hold them:
by Hugging Face names, whole over dp, and over tp as tensors that know which part of the whole they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from zbgrpo.checkpoint.tensors import load_tensors, save_tensors
from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.colossalai_model import Spread
from zbgrpo.trainer.layout import Layout

_MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """Reads and writes the state of a `Spread`'s optimizer. A zero stage leaves each rank a slice of every flattened
    tensor: these are put together one by one, and the first dp rank, which writes them, holds all of its stage's in
    host memory until they are written."""

    def __init__(
        self, spread: Spread, parameters: Mapping[str, nn.Parameter], layout: Layout, group: dist.ProcessGroup
    ) -> None:
        """`parameters` are those of this stage by names, a tied head by that of the embedding."""
        self._spread, self._parameters, self._layout, self._group = spread, dict(parameters), layout, group
        masters = spread.optimizer.get_working_to_master_map() or {}
        self._masters = {name: masters.get(id(p), p.detach()) for name, p in self._parameters.items()}
        self._keys = {name: masters.get(id(p), p) for name, p in self._parameters.items()}

    def save(self, folder: Path, counters: tuple[int, int]) -> None:
        """Write everything, with two numbers of the caller's; all ranks take part."""
        updates = int(self._states()[0]["step"])
        state: dict[str, Any] = {"counters": torch.tensor([*counters, updates], dtype=torch.int64)}
        for kind in (_MASTER, *_MOMENTS):
            whole = self._whole(kind)
            if self._layout.dp_index == 0 or not self._spread.zero_stage:
                state[kind] = {name: self._placed(name, tensor) for name, tensor in whole.items()}
        save_tensors(state, folder, self._group)

    def load(self, folder: Path) -> tuple[int, int]:
        """Take over what `save` wrote, under whatever layout; all ranks take part. Returns the caller's numbers."""
        counters = torch.zeros(3, dtype=torch.int64)
        for kind in (_MASTER, *_MOMENTS):  # one after the other: each is whole in memory for a while
            whole = {name: torch.empty_like(p, dtype=torch.float32) for name, p in self._local_parameters()}
            state: dict[str, Any] = {kind: {name: self._placed(name, tensor) for name, tensor in whole.items()}}
            if kind == _MASTER:
                state["counters"] = counters
            load_tensors(state, folder, self._group)
            self._take(kind, whole)
        step, skipped, updates = counters.tolist()
        for own in self._states():
            own["step"].fill_(updates)
        return step, skipped

    def _local_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self._parameters.items()]

    def _states(self) -> list[dict[str, Tensor]]:
        """The optimizer's own, of every parameter; made where it has made no step yet."""
        found = []
        for name, key in self._keys.items():
            state = self._spread.optimizer.optim.state.setdefault(key, {})
            if not state:
                master = self._masters[name]
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state.update({moment: torch.zeros_like(master) for moment in _MOMENTS})
            found.append(state)
        return found

    def _own(self, kind: str) -> dict[str, Tensor]:
        if kind == _MASTER:
            return self._masters
        return {name: state[kind] for name, state in zip(self._keys, self._states(), strict=True)}

    def _whole(self, kind: str) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes; with a zero stage on the first dp rank only."""
        own = self._own(kind)
        if not self._spread.zero_stage:
            return own
        whole = {}
        with collective("gathering the optimizer's state"):
            for name, part in own.items():
                parts = [torch.empty_like(part) for _ in range(self._layout.mesh.dp)]
                dist.all_gather(parts, part.contiguous(), group=self._spread.dp_group)
                if self._layout.dp_index == 0:
                    shape = self._parameters[name].shape
                    whole[name] = torch.cat(parts)[: shape.numel()].view(shape).cpu()
        return whole

    def _take(self, kind: str, whole: dict[str, Tensor]) -> None:
        own, dp = self._own(kind), self._layout.mesh.dp
        with torch.no_grad():
            for name, tensor in whole.items():
                part = tensor
                if self._spread.zero_stage:
                    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % dp))
                    part = flat.chunk(dp)[self._layout.dp_index]
                own[name].copy_(part)
                if kind == _MASTER:
                    self._parameters[name].data.copy_(tensor)

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor`, this tp rank's part of something of the parameter's shape, as one that knows its place."""
        dimension = self._spread.sharded_dimension(self._parameters[name])
        if dimension is None:
            return tensor
        mesh = self._layout.device_mesh["tp"]
        return DTensor.from_local(tensor, mesh, [Shard(dimension)], run_check=False)
