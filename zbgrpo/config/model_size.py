"""Sizes of a model from the files of its folder, read without any library: for estimates before anything is loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from zbgrpo.errors import ModelError

_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the limit of the safetensors format
_HEAD = "lm_head.weight"


class ModelSize(NamedTuple):
    """What an estimate of memory needs. A number is 0 where the folder does not say."""

    num_parameters: int
    """Values in the safetensors files; a tied matrix counts once."""
    hidden_size: int
    intermediate_size: int
    """Width of a layer's feed-forward part."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    is_tied: bool
    """Whether embedding and head are one matrix."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it is known."""
        return all(self[:-1])

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the key-value cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


def read_model_size(path: str) -> ModelSize | None:
    """Sizes of the model in folder `path`; None if it is not a folder (a hub name). ModelError if a file is damaged."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    config = _read_config(folder / "config.json")
    shapes = _all_shapes(folder)

    def number(key: str) -> int:
        value = config.get(key)
        return value if isinstance(value, int) and value > 0 else 0

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    # Some folders hold a copy of a tied matrix; some say nothing, and what is not stored is tied.
    is_tied = config.get("tie_word_embeddings") is True or _HEAD not in shapes
    if is_tied:
        shapes.pop(_HEAD, None)
    return ModelSize(
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        vocab_size=number("vocab_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads") or heads,
        head_size=number("head_dim") or (hidden // heads if heads else 0),
        is_tied=is_tied,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return config if isinstance(config, dict) else {}


def _all_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors of the folder's safetensors files; a tied tensor is stored once."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes.update(_read_shapes(path))
    return shapes


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
