"""What a trainer promises to the consumer loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from zbgrpo.types import GroupPayload
from zbgrpo.weights.manifest import TensorSpec


class Mesh(NamedTuple):
    """Sizes of the trainer's axes; ranks are numbered with tp fastest, then pp, then dp."""

    dp: int
    pp: int
    tp: int


class StepResult(NamedTuple):
    """What an optimizer step did, the same on every rank."""

    skipped: bool
    """The gradient was not finite, or no token counted: weights and optimizer are as before."""
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    sums: dict[str, float]
    """Sums over the whole optimizer step and all ranks; see `LossSums.stats` and `Microbatch.stats`."""


class TrainerBackend(Protocol):
    """Trains whole minibatches. Gradients are sums until `commit` divides them once by the step's denominator, so
    that any split of the same groups into minibatches, microbatches and ranks gives the same update."""

    mesh: Mesh

    def train_minibatch(self, groups: Sequence[GroupPayload], version: int, temperatures: Sequence[float]) -> None:
        """Add the gradients of this rank's groups, which train `version`, each at the temperature that it was sampled
        at. Unless `lockstep`, no other rank is waited for."""

    def commit(self, abandon: bool = False) -> StepResult | None:
        """Finish the optimizer step together with all other ranks. Raises `NonFiniteError` after five skipped steps
        in a row.

        If any rank abandons the step (a stop is due and it has left work out), every rank forgets the gradients and
        gets None: the step has not happened."""

    def discard(self) -> None:
        """Forget the gradients of the open step."""

    @property
    def lockstep(self) -> bool:
        """Whether ranks wait for each other within a minibatch, so that none may leave one out by itself."""

    def weight_specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of `weights`, in its order."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of this rank's pipeline stage as they travel to producers: Hugging Face names, tied ones once,
        whole. Every rank goes through all of it, for tensors that are spread are gathered one by one; each is to be
        copied before the next is asked for."""

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer of the last commit; all ranks take part."""

    def load_state(self, folder: Path, version: int) -> None:
        """Go on exactly where `save_state` was called; all ranks take part."""

    def gather_model(self) -> dict[str, Tensor] | None:
        """All weights of the whole model, as `weights` names them, on the first rank; None on the others. All ranks
        take part."""

    def save_model(self, folder: Path, tokenizer: Any, weights: dict[str, Tensor]) -> None:
        """Write a Hugging Face folder with what `gather_model` gave; on the first rank only."""
