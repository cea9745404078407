"""Attention over packed rows: however it is computed, it is that of separate sequences."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.models import tiny_model
from zbgrpo.algorithms.packing import Microbatch, PackingRules, pack
from zbgrpo.errors import ConfigError
from zbgrpo.trainer.attention import _Groups, attention_arguments, choose_kernel
from zbgrpo.trainer.policy import Policy
from zbgrpo.types import FinishReason, GroupPayload

SHAPES = {
    "one row": [(7, [5, 3, 9])],
    "rows of other lengths": [(2, [1, 4]), (11, [6, 6, 2, 1])],
    "equal": [(4, [3, 3]), (4, [3, 3])],
}
CPU = torch.device("cpu")


def group_of(prompt: int, lengths: list[int], seed: int) -> GroupPayload:
    generator, num = np.random.default_rng(seed), len(lengths)
    return GroupPayload(
        prompt_ids=generator.integers(1, 70, prompt).astype(np.int32),
        response_ids=generator.integers(1, 70, sum(lengths)).astype(np.int32),
        logprobs=np.full(sum(lengths), -4.0, np.float32),
        lengths=np.array(lengths, np.int32),
        rewards=np.arange(num, dtype=np.float32),
        format_acc=np.ones(num, np.float32),
        ans_acc=np.ones(num, np.float32),
        finish=np.full(num, FinishReason.END_TOKEN, np.int32),
        spans=np.array([[n, 0, 0] for n in range(num)], np.int32),
    )


def microbatch(name: str) -> Microbatch:
    groups = [group_of(prompt, lengths, seed) for seed, (prompt, lengths) in enumerate(SHAPES[name])]
    (batch,) = pack(groups, 0, PackingRules(100, 8, False))
    return batch


def heads_of(batch: Microbatch, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    num_rows, length = batch.input_ids.shape

    def random(heads: int) -> Tensor:
        # As a projection leaves them: heads inside positions.
        values = torch.randn(num_rows, length, heads, 8, dtype=torch.float64, generator=generator)
        return values.transpose(1, 2).requires_grad_()

    return random(num_heads), random(num_kv_heads), random(num_kv_heads)


def by_definition(batch: Microbatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Position by position: softmax over the prompt so far, and the own response so far."""
    out = torch.zeros(query.shape[0], query.shape[2], query.shape[1], 8, dtype=torch.float64)
    sharing = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        segments = batch.segments[row].tolist()
        for i, segment in enumerate(segments):
            seen = [j for j in range(i + 1) if segments[j] in (0, segment)]
            for head in range(query.shape[1] if segment >= 0 else 0):
                keys, values = key[row, head // sharing, seen], value[row, head // sharing, seen]
                weights = torch.softmax(keys @ query[row, head, i] / 8**0.5, 0)
                out[row, i, head] = weights @ values
    return out


def real(batch: Microbatch, out: Tensor) -> Tensor:
    """Without padding, where anything may stand."""
    return out[batch.segments >= 0]


def flash_by_hand(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *longest: int, **said: Any
) -> Tensor:
    """What flash-attn's function promises: sequence by sequence, the causal mask aligned at the end."""
    assert said == {"softmax_scale": None, "causal": True}
    assert longest == (int(q_ends.diff().max()), int(k_ends.diff().max()))
    parts = []
    for n in range(len(q_ends) - 1):
        queries, keys, values = q[q_ends[n] : q_ends[n + 1]], k[k_ends[n] : k_ends[n + 1]], v[k_ends[n] : k_ends[n + 1]]
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", queries, keys) / q.shape[2] ** 0.5
        hidden = torch.ones(len(queries), len(keys)).tril(len(keys) - len(queries)) == 0
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), 2)
        parts.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(parts)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", ["grouped", "flash"])
def test_each_position_sees_its_prompt_and_its_response(
    monkeypatch: pytest.MonkeyPatch, kernel: str, name: str, heads: tuple[int, int]
) -> None:
    """Outputs and gradients."""
    batch = microbatch(name)
    if kernel == "flash":
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_by_hand))
        rows = attention_arguments(batch, "flash", torch.float64)["packed_rows"]
    else:
        monkeypatch.setattr("zbgrpo.trainer.attention._GROUPED_GAIN", 1e9)
        rows = attention_arguments(batch, "sdpa", torch.float64)["packed_rows"]
        assert isinstance(rows, _Groups)
    inputs, expected_inputs = heads_of(batch, *heads), heads_of(batch, *heads)
    out, expected = rows.attend(*inputs, None), by_definition(batch, *expected_inputs)
    torch.testing.assert_close(real(batch, out), real(batch, expected), rtol=1e-12, atol=1e-12)
    weights = torch.randn(real(batch, out).shape, dtype=torch.float64)
    (real(batch, out) * weights).sum().backward()
    (real(batch, expected) * weights).sum().backward()
    for tensor, other in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_the_cheaper_way_is_taken() -> None:
    """Many like responses go as a batch; one long response beside short ones does not."""
    alike = next(pack([group_of(100, [64] * 8, 0)], 0, PackingRules(8, 8, False)))
    assert "packed_rows" in attention_arguments(alike, "sdpa", torch.float32)
    uneven = next(pack([group_of(4, [300, 2, 2, 2], 0)], 0, PackingRules(8, 8, False)))
    assert attention_arguments(uneven, "sdpa", torch.float32).keys() == {"attention_mask"}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_gives_the_same_log_probs_either_way(
    monkeypatch: pytest.MonkeyPatch, family: str, checkpointing: bool
) -> None:
    batch = microbatch("rows of other lengths")
    found = []
    for gain in (0.0, 1e9):
        monkeypatch.setattr("zbgrpo.trainer.attention._GROUPED_GAIN", gain)
        model = tiny_model(family, dtype=torch.float64).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logprobs, _ = Policy(model, torch.float64, 16)(batch)
        logprobs.square().sum().backward()
        found.append((logprobs, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-7, atol=1e-9)


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert choose_kernel("auto", CPU, torch.bfloat16) == "sdpa" == choose_kernel("sdpa", gpu, torch.float32)
    with pytest.raises(ConfigError, match="flash needs a GPU"):
        choose_kernel("flash", CPU, torch.bfloat16)
    for installed in (True, False):
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace() if installed else None)  # type: ignore[arg-type]
        assert choose_kernel("auto", gpu, torch.bfloat16) == ("flash" if installed else "sdpa")
        assert choose_kernel("auto", gpu, torch.float32) == "sdpa"
        assert choose_kernel("flex", gpu, torch.float32) == "flex"
    with pytest.raises(ConfigError, match="flash-attn is not installed"):
        choose_kernel("flash", gpu, torch.bfloat16)
