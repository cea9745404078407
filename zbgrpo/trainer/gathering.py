"""The whole model on one rank, from wherever its parts are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.layout import Layout


class Origin(NamedTuple):
    """Where a tensor of the model comes from, and what it is there."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype


def names_of_tied(model: Any) -> Optional[tuple[str, str]]:
    """Names of the weights of embedding and head, where they are one; None where they are two."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        return None
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is embedding]
    return names[0], names[-1]


def gather_stages(
    weights: Iterable[tuple[str, Tensor]],
    origins: Mapping[str, Origin],
    layout: Layout,
    group: Optional[dist.ProcessGroup],
    device: torch.device,
) -> Optional[dict[str, Tensor]]:
    """Copies on the host of all tensors in the order of `origins`, on the first rank; None on the others.

    `weights` are those of this rank's stage, and may themselves be gathered while they are gone through, so every rank
    that takes part in that calls this.
    """
    is_first = group is None or dist.get_rank(group) == 0
    line = layout.group("pp") if layout.dp_index == layout.tp_index == 0 else None
    found: dict[str, Tensor] = {}
    with collective("gathering the model"):
        for name, tensor in weights:
            if is_first:
                found[name] = tensor.to("cpu", copy=True)
            elif line is not None:
                dist.send(tensor.contiguous(), group=line, group_dst=0)
        if not is_first:
            return None
        for name, origin in origins.items():
            if origin.stage > 0:
                received = torch.empty(origin.shape, dtype=origin.dtype, device=device)
                dist.recv(received, group=line, group_src=origin.stage)
                found[name] = received.cpu()
    return {name: found[name] for name in origins}
