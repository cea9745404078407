"""Weights that come from several pipeline stages: one subscriber per stage, one version for the engine.

A version is READY when every stage's part of it is. A stage whose next version has arrived before the others' may have
overwritten its part: then the version is never used, and the engine goes on to the next one that is complete.

Example with two stages: 0 has version 4, 1 still has 3: nothing is READY. 1 gets 4: 4 is. Had 0 gone on to 5 before, 5
would be the next, as soon as 1 has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from zbgrpo.errors import WeightSyncError
from zbgrpo.weights.manifest import TensorSpec, WeightManifest
from zbgrpo.weights.subscriber import Incoming, WeightSubscriber


class StagedSubscriber:
    """The stages' subscribers as one; see the module's text. For a single stage it is that one's in every respect."""

    def __init__(self, stages: Sequence[WeightSubscriber]) -> None:
        self._stages = list(stages)

    @property
    def applied_version(self) -> int:
        return self._stages[0].applied_version

    def expect(self, stage: int, version: int, keep: bool = False) -> None:
        """The source of a stage has begun to broadcast this version."""
        self._stages[stage].expect(version, keep)

    def ready(self) -> Incoming | None:
        """The version that is complete over all stages, if there is one; its digest joins the stages'."""
        parts = [stage.ready() for stage in self._stages]
        complete = [part for part in parts if part is not None]
        if len(complete) < len(parts) or len({part.version for part in complete}) > 1:
            return None
        digest = "+".join(part.digest for part in complete)
        return Incoming(complete[0].version, digest, any(part.keep for part in complete))

    def apply(self) -> Incoming | None:
        """Generate with the READY version from now on, in all its parts; None if there is none."""
        with ExitStack() as stack:
            for stage in self._stages:
                stack.enter_context(stage.held())
            if (incoming := self.ready()) is not None:
                for stage in self._stages:
                    stage.apply()
        return incoming

    def close(self) -> None:
        """Stop after the broadcasts in work."""
        for stage in self._stages:
            stage.close()


def stage_manifests(
    whole: Sequence[TensorSpec], sent: Sequence[list[TensorSpec]], bucket_bytes: int
) -> list[WeightManifest]:
    """Manifests of what the stages send, in their orders. Raises `WeightSyncError`, naming the tensors, unless they
    make up `whole`, each tensor once."""
    names = [spec.name for stage in sent for spec in stage]
    mine = {spec.name: spec for spec in whole}
    missing, unknown = sorted(mine.keys() - set(names)), sorted(set(names) - mine.keys())
    twice = sorted({name for name in names if names.count(name) > 1})
    if missing or unknown or twice:
        raise WeightSyncError(
            f"trainer and producer have different weights: not sent {missing[:5]}, not known here {unknown[:5]}, sent "
            f"by two stages {twice[:5]}"
        )
    for stage in sent:
        for spec in stage:
            if spec != mine[spec.name]:
                raise WeightSyncError(f"weight {spec.name}: producer has {mine[spec.name]}, trainer sends {spec}")
    return [WeightManifest(stage, bucket_bytes) for stage in sent]
