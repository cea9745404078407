"""Keys and values of the decode slots, and the attention that reads them.

Every slot holds one response: its prompt from position 0, then its tokens; a mask by length hides the rest. Slots
0 .. n-1 are in use, so that a decode step reads views and copies nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "zbgrpo_slots"
_GROWTH_TOKENS = 128


class Prefix:
    """Keys and values of one prompt, by layer: [kv heads, P, head size]."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class PrefillCache(Cache):
    """Collects the keys and values of a batch of prompts, padded on the right."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return 0

    def prefix(self, row: int, length: int) -> Prefix:
        """One prompt's own part. Copied, so that the padded batch can go."""
        result = Prefix()
        result.keys = [k[row, :, :length].clone() for k in self.keys]
        result.values = [v[row, :, :length].clone() for v in self.values]
        return result


class SlotCache(Cache):
    """Keys and values [slots, kv heads, capacity, head size] by layer; the capacity grows with the longest response."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._num_slots, self._max_tokens = num_slots, max_tokens
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._capacity = 0
        self._rows = torch.empty(0)
        self._positions = torch.empty(0)
        self._width = 0

    def load(self, slot: int, prefix: Prefix) -> None:
        """Put a prompt into a slot."""
        length = prefix.keys[0].shape[1]
        if not self._keys:
            shapes = [(k.shape[0], k.shape[2], k) for k in prefix.keys]
            self._capacity = min(self._max_tokens, length + _GROWTH_TOKENS)
            self._keys = [k.new_zeros(self._num_slots, h, self._capacity, d) for h, d, k in shapes]
            self._values = [v.new_zeros(self._num_slots, v.shape[0], self._capacity, v.shape[2]) for v in prefix.values]
        self._reserve(length)
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            self._keys[layer][slot, :, :length] = keys
            self._values[layer][slot, :, :length] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first `length` positions over another slot."""
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def begin_step(self, positions: Tensor, width: int) -> None:
        """The next forward pass writes slot i at positions[i], int64 [n], and reads the first `width` positions."""
        self._reserve(width)
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions, self._width = positions, width

    def _reserve(self, width: int) -> None:
        if width <= self._capacity:
            return
        capacity = min(self._max_tokens, max(width, self._capacity * 3 // 2) + _GROWTH_TOKENS)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                new[:, :, : self._capacity] = old
                tensors[layer] = new
        self._capacity = capacity

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        num = len(self._rows)
        return keys[:num, :, : self._width], values[:num, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self._width


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention for one-token queries over grouped key and value heads, without repeating them.

    query [n, heads, 1, d]; key, value [n, kv heads, T, d]. The queries that share a key head become the rows of one
    small matrix, so the cache is read once and never copied. Longer queries (prefill) go to the usual function.
    """
    num, heads, length, size = query.shape
    if length != 1:
        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return usual(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    grouped = query.view(num, key.shape[1], heads // key.shape[1], size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(num, 1, heads, value.shape[-1]), None


def install_slot_attention(model: Any) -> None:
    """Make a Hugging Face model use `slot_attention`."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    model.config._attn_implementation = ATTENTION
