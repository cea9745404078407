"""Attention over packed rows, [prompt | response 0 | response 1 | ... | padding]: each response sees the prompt and
itself. How it is computed is chosen once for a run:

    masked    one product of all positions with all, under a mask: right for any row, wasteful for many responses
    grouped   responses as a batch, each against the prompt's keys and its own; where that is less work than `masked`
    flash     the same without padding, by flash-attn's kernels for sequences of different lengths (GPU)
    flex      torch's FlexAttention, which leaves out the blocks that a mask hides (GPU)

The queries that share a key head become the rows of one matrix, so keys and values are not repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zbgrpo.algorithms.packing import Microbatch
from zbgrpo.errors import ConfigError

ATTENTION = "zbgrpo_packed"
_ARGUMENT = "packed_rows"
_GROUPED_GAIN = 0.8  # of the products that `masked` makes: gathering costs something too


def choose_kernel(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """`sdpa`, `flash` or `flex`: what `wanted` (one of these, or auto) means here. Raises ConfigError for one that this
    machine cannot run."""
    on_gpu, has_flash = device.type == "cuda", _has_flash_attn()
    half = dtype in (torch.bfloat16, torch.float16)
    if wanted == "auto":
        return "flash" if on_gpu and has_flash and half else "sdpa"
    if wanted != "sdpa" and not on_gpu:
        raise ConfigError(f"trainer.attention: {wanted} needs a GPU; sdpa, or auto, runs everywhere")
    if wanted == "flash" and not (has_flash and half):
        reason = "the package flash-attn is not installed" if not has_flash else "it computes in bf16 only"
        raise ConfigError(f"trainer.attention: flash cannot be used: {reason}; use sdpa, or auto")
    return wanted


def _has_flash_attn() -> bool:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return False
    return True


def install(model: Any) -> None:
    """Let a Hugging Face model's layers compute attention here; without `attention_arguments` they use SDPA as ever."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    except ImportError:  # transformers 4 builds masks inside its models, and leaves a given one as it is
        pass
    else:
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    model.config._attn_implementation = ATTENTION


def attention_arguments(batch: Microbatch, kernel: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the decoder is to be called with for this microbatch, whose tensors are on the decoder's device."""
    device = batch.input_ids.device
    shape = _Shape.of(batch)
    # A mask of one element stands for one that nobody reads: without any, the model would make a causal one.
    unread = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    if kernel == "flash":
        return {"attention_mask": unread, _ARGUMENT: _Sequences(shape, device)}
    if kernel == "flex":
        return {"attention_mask": unread, _ARGUMENT: _Blocks(batch)}
    if shape.grouped_products < _GROUPED_GAIN * shape.masked_products:
        return {"attention_mask": unread, _ARGUMENT: _Groups(shape, device, dtype)}
    return {"attention_mask": batch.attention_mask(dtype)}


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    rows = kwargs.pop(_ARGUMENT, None)
    if rows is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return usual(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    return rows.attend(query, key, value, kwargs.get("scaling")), None


class _Shape(NamedTuple):
    """Where everything is in a microbatch, on the host. B rows of N positions, S responses."""

    num_columns: int
    prompts: np.ndarray  # int64 [B], tokens
    rows: np.ndarray  # int64 [S], row of each response
    firsts: np.ndarray  # int64 [S], its first column
    lengths: np.ndarray  # int64 [S]

    @classmethod
    def of(cls, batch: Microbatch) -> _Shape:
        rows, firsts, lengths = batch.places.T
        return cls(batch.input_ids.shape[1], batch.prompt_lengths, rows, firsts, lengths)

    @property
    def masked_products(self) -> int:
        """Of queries with keys."""
        return int(len(self.prompts) * self.num_columns**2)

    @property
    def grouped_products(self) -> int:
        prompt, longest = int(self.prompts.max()), int(self.lengths.max())
        return len(self.prompts) * prompt**2 + len(self.rows) * longest * (prompt + longest)

    def flat(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Places in the rows laid end to end."""
        return rows * self.num_columns + columns


class _Groups:
    """Prompts as one batch and responses as another, both padded; padding reads and writes nowhere.

    Example: a prompt of 100 tokens and 8 responses of 64 take 100^2 + 8 x 64 x 164 products of a query with a key
    instead of 612^2: a quarter.
    """

    def __init__(self, shape: _Shape, device: torch.device, dtype: torch.dtype) -> None:
        prompt, longest = int(shape.prompts.max()), int(shape.lengths.max())
        num_rows, num_responses = len(shape.prompts), len(shape.rows)
        p, i = np.arange(prompt), np.arange(longest)
        self._shape = num_rows, num_responses, longest
        # Padding may point anywhere: nobody sees it, so its gradient is exactly zero.
        prompts = shape.flat(np.arange(num_rows)[:, None], np.where(p < shape.prompts[:, None], p, 0))
        own = i < shape.lengths[:, None]
        responses = shape.flat(shape.rows[:, None], np.where(own, shape.firsts[:, None] + i, 0))
        back = np.zeros(num_rows * shape.num_columns, np.int64)
        is_prompt = p < shape.prompts[:, None]
        back[prompts[is_prompt]] = np.arange(num_rows * prompt).reshape(num_rows, prompt)[is_prompt]
        back[responses[own]] = num_rows * prompt + np.arange(num_responses * longest).reshape(-1, longest)[own]
        visible = np.zeros((num_responses, longest, prompt + longest), np.bool_)
        visible[:, :, :prompt] = (p < shape.prompts[shape.rows][:, None])[:, None]
        visible[:, :, prompt:] = i[None, :] <= i[:, None]
        self._prompts, self._responses, self._rows, self._back = (
            torch.from_numpy(index.reshape(-1)).to(device) for index in (prompts, responses, shape.rows, back)
        )
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(~visible).to(device), torch.finfo(dtype).min)
        self._mask = mask[:, None]
        self._repeated: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[B, heads, N, d] and [B, kv heads, N, d] to [B, N, heads, d]."""
        num_rows, num_responses, longest = self._shape
        heads, size, kv_heads = query.shape[1], value.shape[3], key.shape[1]
        sharing = heads // kv_heads
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        pq, pk, pv = (_batch(x.index_select(0, self._prompts), num_rows) for x in (q, k, v))
        out_prompts = scaled_dot_product_attention(
            pq, _repeat(pk, sharing), _repeat(pv, sharing), is_causal=True, scale=scale
        ).transpose(1, 2)

        rq = q.index_select(0, self._responses).view(num_responses, longest, kv_heads, sharing, -1)
        rq = rq.permute(0, 2, 3, 1, 4).reshape(num_responses, kv_heads, sharing * longest, -1)
        rk, rv = (
            torch.cat(
                [prompts.index_select(0, self._rows), _batch(x.index_select(0, self._responses), num_responses)], 2
            )
            for prompts, x in ((pk, k), (pv, v))
        )
        out = scaled_dot_product_attention(rq, rk, rv, attn_mask=self._mask_for(sharing), scale=scale)
        out = out.view(num_responses, kv_heads, sharing, longest, size).permute(0, 3, 1, 2, 4)
        both = torch.cat([out_prompts.reshape(-1, heads, size), out.reshape(-1, heads, size)])
        return both.index_select(0, self._back).view(num_rows, -1, heads, size)

    def _mask_for(self, sharing: int) -> Tensor:
        if self._repeated is None:  # once for all layers
            self._repeated = self._mask.repeat(1, 1, sharing, 1)
        return self._repeated


def _batch(tokens: Tensor, num: int) -> Tensor:
    """[num x length, heads, d] to [num, heads, length, d]."""
    return tokens.view(num, -1, *tokens.shape[1:]).transpose(1, 2)


def _repeat(keys: Tensor, sharing: int) -> Tensor:
    return keys.repeat_interleave(sharing, 1) if sharing > 1 else keys


class _Sequences:
    """Prompts and responses as sequences without padding; a response's keys are the prompt's and its own.

    flash-attn aligns the causal mask at the end of queries and keys, so query i of a response sees its prompt and the
    response up to i.
    """

    def __init__(self, shape: _Shape, device: torch.device) -> None:
        queries, keys = [], []
        for row, length in enumerate(shape.prompts.tolist()):
            queries.append(shape.flat(np.array(row), np.arange(length)))
            keys.append(queries[-1])
        for row, first, length in zip(shape.rows, shape.firsts, shape.lengths, strict=True):
            queries.append(shape.flat(row, np.arange(first, first + length)))
            keys.append(np.concatenate([shape.flat(row, np.arange(shape.prompts[row])), queries[-1]]))
        self._num_rows = len(shape.prompts)
        back = np.zeros(self._num_rows * shape.num_columns, np.int64)
        back[np.concatenate(queries)] = np.arange(sum(map(len, queries)))
        self._queries, self._keys, self._back = (
            torch.from_numpy(index).to(device) for index in (np.concatenate(queries), np.concatenate(keys), back)
        )
        self._ends_of_queries, self._ends_of_keys = (
            torch.from_numpy(np.cumsum([0, *map(len, parts)], dtype=np.int32)).to(device) for parts in (queries, keys)
        )
        self._longest_query, self._longest_key = max(map(len, queries)), max(map(len, keys))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """As `_Groups.attend`."""
        from flash_attn import flash_attn_varlen_func

        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = flash_attn_varlen_func(
            q.index_select(0, self._queries),
            k.index_select(0, self._keys),
            v.index_select(0, self._keys),
            self._ends_of_queries,
            self._ends_of_keys,
            self._longest_query,
            self._longest_key,
            softmax_scale=scale,
            causal=True,
        )
        return out.index_select(0, self._back).view(self._num_rows, -1, *out.shape[1:])  # type: ignore[no-any-return]


class _Blocks:
    """FlexAttention: whole blocks that nobody sees are left out."""

    def __init__(self, batch: Microbatch) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        segments, length = batch.segments, batch.input_ids.shape[1]

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ((segments[row, key] == 0) | (segments[row, key] == segments[row, query])) & (key <= query)

        self._mask = create_block_mask(visible, len(segments), None, length, length, device=segments.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """As `_Groups.attend`."""
        out = _flex()(query, key, value, block_mask=self._mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)  # type: ignore[no-any-return]


_compiled: list[Any] = []


def _flex() -> Any:
    """The compiled kernel, which is made at its first use."""
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]
