"""Which tensors travel, in which order, in which buckets; and digests of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec
import torch
from torch import Tensor, nn

from zbgrpo.errors import WeightSyncError

_ALIGNMENT = 64  # bytes; keeps every tensor of a bucket aligned for vector instructions


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as it travels."""

    name: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: bucket and byte range."""

    spec: TensorSpec
    bucket: int
    offset: int
    num_bytes: int


class WeightManifest:
    """Names, shapes and dtypes of all tensors in the order in which they travel, and their places in flat buckets.

    Tied parameters appear once, under the first of their names. Two ranks with equal manifests have equal layouts.
    """

    def __init__(self, specs: list[TensorSpec], bucket_bytes: int) -> None:
        self.specs = specs
        self.slots: list[Slot] = []
        self.bucket_sizes: list[int] = []
        for spec in specs:
            num_bytes = _itemsize(spec.dtype)
            for size in spec.shape:
                num_bytes *= size
            padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            if not self.bucket_sizes or self.bucket_sizes[-1] + padded > max(bucket_bytes, padded):
                self.bucket_sizes.append(0)
            self.slots.append(Slot(spec, len(self.bucket_sizes) - 1, self.bucket_sizes[-1], num_bytes))
            self.bucket_sizes[-1] += padded

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, bucket_bytes: int) -> WeightManifest:
        """The manifest of a model whose floating-point parameters travel as `dtype`."""
        specs = []
        for name, tensor in named_weights(model):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            specs.append(TensorSpec(name, list(tensor.shape), str(kind).removeprefix("torch.")))
        return cls(specs, bucket_bytes)

    def encode(self) -> bytes:
        """For the rendezvous store."""
        return msgspec.json.encode(self.specs)

    @staticmethod
    def decode(encoded: bytes) -> list[TensorSpec]:
        """What `encode` wrote."""
        return msgspec.json.decode(encoded, type=list[TensorSpec])

    @property
    def num_bytes(self) -> int:
        return sum(self.bucket_sizes)

    def allocate(self, device: torch.device, pin: bool = False) -> list[Tensor]:
        """Flat uint8 buckets, zeroed (padding takes part in nothing, but travels)."""
        return [torch.zeros(n, dtype=torch.uint8, device=device, pin_memory=pin) for n in self.bucket_sizes]

    def views(self, buckets: list[Tensor]) -> dict[str, Tensor]:
        """The tensors inside flat buckets, by name; they share memory with the buckets."""
        return {
            slot.spec.name: buckets[slot.bucket][slot.offset : slot.offset + slot.num_bytes]
            .view(getattr(torch, slot.spec.dtype))
            .view(slot.spec.shape)
            for slot in self.slots
        }


def named_weights(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers of a model, in registration order."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def _itemsize(dtype: str) -> int:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise WeightSyncError(f"unknown dtype {dtype!r}")
    return kind.itemsize


# ------------------------------------------------------------------------------------------------ digests

_ROWS, _COLUMNS = 1 << 8, 1 << 10
_MODULUS = (1 << 61) - 1


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A position-sensitive 61-bit checksum of names and bytes, equal on every device. Detects accidents, not attacks.

    The bytes of a tensor are 64-bit words, in chunks of 256 rows of 1024. Of each chunk the sums of its rows and those
    of its columns are taken, which a processor does as fast as it reads; a word that changes changes one of each, and
    two that change places change different ones. Both lists are cut into 32-bit halves, multiplied by odd 32-bit
    weights and summed, modulo 2^64 (of 64-bit words, two flipped signs would cancel). These sums and the names are
    hashed as a polynomial modulo 2^61 - 1.

    Tensors are asked for one after the other, when their turn comes.
    """
    names, counts = [], []
    sums: list[Tensor] = []
    weights: dict[torch.device, Tensor] = {}
    for name, tensor in tensors.items():
        words = _words(tensor.detach())
        if words.device not in weights:
            steps = torch.arange(2 * _COLUMNS, dtype=torch.int64) * 2654435761 * 2 + 1
            weights[words.device] = (steps & 0xFFFFFFFF).to(words.device)
        parts = _chunk_sums(words, weights[words.device])
        names.append(name)
        counts.append(sum(map(len, parts)))
        sums += [part.to(sums[0].device) for part in parts] if sums else parts
    values = iter(torch.cat(sums).tolist() if sums else ())
    total = 0
    for name, count in zip(names, counts, strict=True):
        for value in (*name.encode(), *islice(values, count)):
            total = (total * 1_000_003 + value) % _MODULUS
    return f"{total:016x}"


def _chunk_sums(words: Tensor, weights: Tensor) -> list[Tensor]:
    """Weighted sums of the rows of each chunk, of its columns, and of the words behind the last whole row."""
    num_rows = len(words) // _COLUMNS
    chunks = words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS).split(_ROWS) if num_rows else ()
    rows, columns = words.new_zeros(len(chunks), _ROWS), words.new_empty(len(chunks), _COLUMNS)
    for chunk, row_sums, column_sums in zip(chunks, rows, columns, strict=True):
        torch.sum(chunk, 1, out=row_sums[: len(chunk)])
        torch.sum(chunk, 0, out=column_sums)
    rest = words[num_rows * _COLUMNS :].view(1, -1)
    parts = [part for part in (rows, columns, rest) if part.numel()]
    return [(part.view(torch.int32).to(torch.int64) * weights[: 2 * part.shape[1]]).sum(1) for part in parts]


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).clone()
    return flat.view(torch.int64)
