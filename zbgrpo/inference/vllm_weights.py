"""Weights on their way from this process to the workers of an engine: one anonymous file in memory, mapped by all.

The file has no name anywhere, so nothing is left behind however the processes end; workers open it through the
descriptor of the process that made it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from types import TracebackType

import msgspec
import torch
from torch import Tensor

from zbgrpo.errors import ResourceError, WeightSyncError
from zbgrpo.weights.manifest import TensorSpec, WeightManifest

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
        if (size := os.stat(path).st_size) != self.num_bytes:
            raise WeightSyncError(f"weights for the engine: {size} bytes are there, not {self.num_bytes}")
        flat = torch.from_file(path, shared=True, size=self.num_bytes, dtype=torch.uint8)
        return self.manifest.views([flat])


class WeightFile:
    """The file, filled; a context manager. What a worker has mapped stays with it after the end."""

    def __init__(self, weights: EngineWeights, tensors: Mapping[str, Tensor]) -> None:
        """Raises `WeightSyncError` as `EngineWeights.check`, `ResourceError` if there is no memory for it."""
        weights.check(tensors)
        self.weights = weights
        self._descriptor = os.memfd_create("zbgrpo-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        filled = False
        try:
            self._reserve(weights.num_bytes)
            views = weights.open(self.path)
            for name, tensor in tensors.items():
                views[name].copy_(tensor.detach())
            filled = True
        finally:
            if not filled:
                os.close(self._descriptor)

    def _reserve(self, num_bytes: int) -> None:
        # A file that only grows with its first write would end this process by SIGBUS where memory runs out.
        try:
            os.posix_fallocate(self._descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ResourceError(f"no memory for {num_bytes} bytes of weights for the engine") from error
            raise

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
