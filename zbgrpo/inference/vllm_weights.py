"""Weights on their way from this process to the workers of an engine: one file in memory, mapped by all."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType

import msgspec
from torch import Tensor

from zbgrpo.errors import WeightSyncError
from zbgrpo.weights.manifest import TensorSpec, WeightManifest
from zbgrpo.weights.shared import MemoryFile, map_file

_ONE_BUCKET = 1 << 62


class EngineWeights:
    """Which tensors an engine is fed with, and their places in the file."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self.manifest = WeightManifest(specs, _ONE_BUCKET)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> EngineWeights:
        """For tensors like these."""
        return cls([_spec(name, tensor) for name, tensor in tensors.items()])

    @classmethod
    def decode(cls, text: str) -> EngineWeights:
        return cls(msgspec.json.decode(text, type=list[TensorSpec]))

    def encode(self) -> str:
        return self.manifest.encode().decode()

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `WeightSyncError`, which names the tensor, unless these are all tensors in their shapes and dtypes."""
        expected = {spec.name: spec for spec in self.manifest.specs}
        missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        if missing or unknown:
            raise WeightSyncError(f"weights for the engine: missing {missing[:5]}, not known {unknown[:5]}")
        for name, tensor in tensors.items():
            if (found := _spec(name, tensor)) != expected[name]:
                raise WeightSyncError(
                    f"weights for the engine: {name} is {found.dtype}{found.shape}, "
                    f"not {expected[name].dtype}{expected[name].shape}"
                )

    def open(self, path: str) -> dict[str, Tensor]:
        """The tensors in the file at this path, mapped. Raises `WeightSyncError` if it has another size."""
        return self.manifest.views([map_file(path, self.num_bytes)])


class WeightFile:
    """The file, filled; a context manager. What a worker has mapped stays with it after the end."""

    def __init__(self, weights: EngineWeights, tensors: Mapping[str, Tensor]) -> None:
        """Raises `WeightSyncError` as `EngineWeights.check`, `ResourceError` if there is no memory for it."""
        weights.check(tensors)
        self.weights = weights
        self._file = MemoryFile("engine", weights.num_bytes)
        self.path = self._file.path
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._file.close)
            views = weights.manifest.views([self._file.map()])
            for name, tensor in tensors.items():
                views[name].copy_(tensor.detach())
            on_error.pop_all()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
