"""Sizes of a model from the files of its folder, read without any library: for estimates before anything is loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from zbgrpo.errors import ModelError

_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the limit of the safetensors format


class ModelSize(NamedTuple):
    """What an estimate of memory needs. A field is None where the folder does not say."""

    num_parameters: int | None
    hidden_size: int | None
    vocab_size: int | None
    kv_values_per_token: int | None
    """Numbers that one token adds to the key-value cache: 2 x layers x key-value heads x head size."""


def read_model_size(path: str) -> ModelSize | None:
    """Sizes of the model in folder `path`; None if it is not a folder (a hub name). ModelError if a file is damaged."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    config = _read_config(folder / "config.json")
    heads = config.get("num_attention_heads")
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    head_dim = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = config.get("num_key_value_heads") or heads
    return ModelSize(
        num_parameters=_count_parameters(folder),
        hidden_size=hidden,
        vocab_size=config.get("vocab_size"),
        kv_values_per_token=2 * layers * kv_heads * head_dim if layers and kv_heads and head_dim else None,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return config if isinstance(config, dict) else {}


def _count_parameters(folder: Path) -> int | None:
    """Values in all tensors of the folder's safetensors files; a tied tensor is stored once and counts once."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes.update(_read_shapes(path))
    return sum(math.prod(shape) for shape in shapes.values()) or None


def _read_shapes(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor of a safetensors file: its first 8 bytes are the length of the JSON header that follows."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        return {name: list(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path}: not a complete safetensors file: {error}") from None
