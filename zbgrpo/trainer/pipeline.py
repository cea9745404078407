"""Pipeline parallelism: which layers a stage keeps, and one forward, one backward (1F1B) between stages.

Every stage of a line packs the same groups, so all know the shape of every microbatch and nothing about shapes travels.
A stage keeps the names of what it owns, and has something empty where the other stages' modules are.

Order of a stage with W stages behind it, for microbatches 0 .. n - 1: forward 0 .. W - 1; then forward W + k and
backward k in turns; then the last W backward passes. At most W + 1 microbatches are held. What a stage sends and what
it receives at the same time go in one batch, so that two neighbours that send to each other both get through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbgrpo.algorithms.packing import Microbatch
from zbgrpo.checkpoint.model_folder import transformers_is_4
from zbgrpo.errors import ModelError
from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.layout import Layout
from zbgrpo.trainer.policy import Policy


class _Skipped(nn.Module):
    """In the place of a decoder layer of another stage."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden,) if self._returns_tuple else hidden


class _Elsewhere(nn.Module):
    """In the place of an embedding or head of another stage; never called."""


def check_pipeline_parallel(model: Any, num_stages: int, path: str) -> None:
    """Raise `ModelError` unless the decoder has a layer for every stage, and the parts that stages are made of."""
    decoder = model.get_decoder()
    if not all(hasattr(decoder, part) for part in ("embed_tokens", "layers", "norm")):
        raise ModelError(
            f"model {path}: {type(model).__name__} is not made of embed_tokens, layers and norm; use -pp 1"
        )
    if len(decoder.layers) < num_stages:
        raise ModelError(
            f"-pp/--pipeline-parallel-size: {num_stages} stages, but {path} has {len(decoder.layers)} layers"
        )


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Layers of a stage. The first ones of a number that does not divide go to the middle stages: the first and the
    last have the embedding and the head."""
    counts = [num_layers // num_stages] * num_stages
    order = sorted(range(num_stages), key=lambda s: (s in (0, num_stages - 1), s))
    for place in range(num_layers % num_stages):
        counts[order[place]] += 1
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))


def keep_stage(model: Any, layout: Layout) -> None:
    """Leave to `model` what this stage owns. Where embedding and head are tied, both ends hold a copy."""
    stage, num_stages = layout.pp_index, layout.mesh.pp
    decoder, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    own = layers_of(stage, num_stages, len(decoder.layers))
    returns_tuple = transformers_is_4()
    for number in range(len(decoder.layers)):
        if number not in own:
            decoder.layers[number] = _Skipped(returns_tuple)
    if stage > 0:
        decoder.embed_tokens = _Elsewhere()
    if stage < num_stages - 1:
        decoder.norm = nn.Identity()
        model.set_output_embeddings(_Elsewhere())
    elif tied:
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)


def own_layers(model: Any) -> dict[str, nn.Module]:
    """The decoder layers that this rank computes, by their names in the model."""
    layers = model.get_decoder().layers
    name = next(name for name, module in model.named_modules() if module is layers)
    return {f"{name}.{number}": layer for number, layer in enumerate(layers) if not isinstance(layer, _Skipped)}


def own_ends(model: Any) -> tuple[Any, Any]:
    """Embedding and head, each None where another stage has it."""
    ends = (model.get_decoder().embed_tokens, model.get_output_embeddings())
    return tuple(None if isinstance(end, _Elsewhere) else end for end in ends)  # type: ignore[return-value]


def stage_of(name: str, model: Any, num_stages: int) -> int:
    """The stage that owns the parameter or buffer `name` of a whole model; a tied head is the embedding's."""
    decoder = model.get_decoder()
    prefix = next((n for n, module in model.named_modules() if module is decoder), "")
    part, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    if part == "layers":
        number = int(rest.partition(".")[0])
        return next(s for s in range(num_stages) if number in layers_of(s, num_stages, len(decoder.layers)))
    return 0 if part == "embed_tokens" else num_stages - 1


class Pipeline:
    """This rank's stage of one line of stages."""

    def __init__(self, layout: Layout, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = layout.group("pp")
        assert self._group is not None
        ranks = dist.get_process_group_ranks(self._group)
        self._before = ranks[layout.pp_index - 1] if layout.pp_index else None
        self._behind = None if layout.is_last_stage else ranks[layout.pp_index + 1]
        self._num_behind = layout.mesh.pp - 1 - layout.pp_index
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    def forward(self, policy: Policy, batches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probs of every microbatch without gradients; on the last stage, empty on the others."""
        results: list[Tensor] = []
        with torch.no_grad():
            for batch in batches:
                received, _ = self._exchange(forward_from=batch)
                output = policy(batch, with_entropy=False, received=received)
                if self._behind is None:
                    results.append(output[0])
                else:
                    self._exchange(forward=output)
        return results

    def train(
        self,
        policy: Policy,
        batches: Sequence[Microbatch],
        loss: Callable[[int, Tensor, Tensor], Tensor],
        before_backward: Callable[[int], None],
    ) -> None:
        """Add the gradients of all microbatches. `loss(number, log-probs, entropies)` is asked on the last stage,
        `before_backward(number)` on every one."""
        held: dict[int, tuple[Tensor | None, Tensor]] = {}

        def forward(number: int, received: Tensor | None) -> Tensor | None:
            if received is not None:
                received.requires_grad_()
            output = policy(batches[number], received=received)
            if self._behind is None:
                output = loss(number, *output)
            held[number] = (received, output)
            return None if self._behind is None else output.detach()

        def backward(number: int, gradient: Tensor | None) -> Tensor | None:
            received, output = held.pop(number)
            before_backward(number)
            output.backward(gradient)  # type: ignore[no-untyped-call]
            return None if received is None else received.grad

        count = len(batches)
        warm_up = min(self._num_behind, count)
        for number in range(warm_up):
            received, _ = self._exchange(forward_from=batches[number])
            self._exchange(forward=forward(number, received))
        received = self._exchange(forward_from=batches[warm_up])[0] if warm_up < count else None
        for number in range(count - warm_up):
            sent = forward(warm_up + number, received)
            _, gradient = self._exchange(forward=sent, backward_from=batches[number])
            upstream, following = backward(number, gradient), warm_up + number + 1
            received, _ = self._exchange(
                backward=upstream, forward_from=batches[following] if following < count else None
            )
        for number in range(count - warm_up, count):
            _, gradient = self._exchange(backward_from=batches[number])
            self._exchange(backward=backward(number, gradient))

    def _exchange(
        self,
        *,
        forward: Tensor | None = None,
        backward: Tensor | None = None,
        forward_from: Microbatch | None = None,
        backward_from: Microbatch | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send activations on and gradients back, and receive those of the given microbatches, all at once. What has
        no neighbour to go to or to come from is left out."""
        operations: list[dist.P2POp] = []
        received: list[Tensor | None] = [None, None]
        for place, (batch, peer) in enumerate(((forward_from, self._before), (backward_from, self._behind))):
            if batch is not None and peer is not None:
                shape = (*batch.input_ids.shape, self._hidden_size)
                tensor = received[place] = torch.empty(shape, dtype=self._dtype, device=self._device)
                operations.append(dist.P2POp(dist.irecv, tensor, peer, self._group))
        for outgoing, peer in ((forward, self._behind), (backward, self._before)):
            if outgoing is not None and peer is not None:
                operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), peer, self._group))
        if operations:
            with collective("passing activations between pipeline stages"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return received[0], received[1]
