"""Groups to microbatches: nothing about a response may change because of what is packed beside it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import logprobs_of, random_group, responses_of, tiny_model
from zbgrpo.algorithms.packing import STATISTICS, Microbatch, PackingRules, pack
from zbgrpo.types import FinishReason, GroupPayload

VERSION = 12
EVERYTHING = PackingRules(responses_per_microbatch=1000, max_token_lag=1000, mask_truncated=False)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, tied=request.param == "qwen2", seed=2)


@pytest.fixture(scope="module")
def groups() -> list[GroupPayload]:
    plain, generator = tiny_model(), np.random.default_rng(0)
    return [
        random_group(plain, generator, num_responses=num, temperature=1.0, version=VERSION, oldest_lag=6)
        for num in (4, 2, 5, 3)
    ]


def group_of(lengths: list[int], spans: list[tuple[int, int, int]], finish: list[FinishReason]) -> GroupPayload:
    num, total = len(lengths), sum(lengths)
    return GroupPayload(
        np.array([7, 8, 9], np.int32),
        np.arange(10, 10 + total, dtype=np.int32),
        -np.arange(total, dtype=np.float32),
        np.array(lengths, np.int32),
        np.arange(num, dtype=np.float32),
        np.ones(num, np.float32),
        (np.arange(num) % 2).astype(np.float32),
        np.array(finish, np.int32),
        np.array(spans, np.int32),
    )


def split(values: torch.Tensor, batch: Microbatch) -> list[torch.Tensor]:
    """Tokens' values by response."""
    return [values[batch.response_index == i] for i in range(batch.num_responses)]


def packed_logprobs(model: Any, batch: Microbatch) -> torch.Tensor:
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask(model.dtype),
        use_cache=False,
    ).logits
    full = torch.log_softmax(logits.flatten(0, 1)[batch.rows], -1)
    return full[torch.arange(len(batch.targets)), batch.targets]


def padded_logprobs(model: Any, sequences: list[tuple[np.ndarray, np.ndarray]]) -> list[torch.Tensor]:
    """Each response behind its own copy of the prompt, padded on the right to one batch."""
    width = max(len(prompt) + len(response) for prompt, response in sequences)
    ids, mask = torch.zeros(len(sequences), width, dtype=torch.int64), torch.zeros(len(sequences), width)
    for row, (prompt, response) in enumerate(sequences):
        num = len(prompt) + len(response)
        ids[row, :num] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        mask[row, :num] = 1
    full = torch.log_softmax(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, -1)
    return [
        full[row, torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1), torch.as_tensor(response).long()]
        for row, (prompt, response) in enumerate(sequences)
    ]


@pytest.mark.parametrize("per_microbatch", [1, 2, 3, 5, 1000])
@torch.no_grad()
def test_logprobs_are_those_of_each_response_alone(model: Any, groups: list[GroupPayload], per_microbatch: int) -> None:
    rules = PackingRules(per_microbatch, max_token_lag=1000, mask_truncated=False)
    packed = [v for batch in pack(groups, VERSION, rules) for v in split(packed_logprobs(model, batch), batch)]
    sequences = [(g.prompt_ids, r) for g in groups for r in responses_of(g)]
    padded = padded_logprobs(model, sequences)
    assert len(packed) == len(padded) == 14
    for got, expected in zip(packed, padded, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_in_float64_the_difference_is_rounding_only(groups: list[GroupPayload]) -> None:
    """So no position sees one token too many or too few: that would be far above 1e-12."""
    exact = tiny_model(seed=2).double()
    (batch,) = pack(groups, VERSION, EVERYTHING)
    packed = split(packed_logprobs(exact, batch), batch)
    expected = [logprobs_of(exact, g.prompt_ids, r, 1.0) for g in groups for r in responses_of(g)]
    for got, alone in zip(packed, expected, strict=True):
        torch.testing.assert_close(got, alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("per_microbatch", [1, 2, 3, 5, 14, 1000])
def test_every_response_comes_once_whole_and_in_order(groups: list[GroupPayload], per_microbatch: int) -> None:
    batches = list(pack(groups, VERSION, PackingRules(per_microbatch, 1000, False)))
    sizes = [batch.num_responses for batch in batches]
    assert sum(sizes) == 14 and all(size == per_microbatch for size in sizes[:-1]) and sizes[-1] <= per_microbatch
    targets = [t.tolist() for batch in batches for t in split(batch.targets, batch)]
    assert targets == [r.tolist() for g in groups for r in responses_of(g)]
    old = torch.cat([batch.old_logprobs for batch in batches]).numpy()
    assert np.array_equal(old, np.concatenate([g.logprobs for g in groups]))


def test_advantages_are_those_of_the_whole_group_whatever_the_split(groups: list[GroupPayload]) -> None:
    expected = []
    for group in groups:
        rewards = group.rewards.astype(np.float64)
        expected += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).tolist()
    for per_microbatch in (1, 3, 1000):
        batches = pack(groups, VERSION, PackingRules(per_microbatch, 1000, False))
        got = torch.cat([batch.advantages for batch in batches])
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_the_layout_of_a_row_by_hand() -> None:
    group = group_of([2, 3], [(0, 0, 1), (1, 0, 1)], [FinishReason.END_TOKEN] * 2)
    short = group_of([1, 1], [(0, 0, 1), (1, 0, 1)], [FinishReason.END_TOKEN] * 2)._replace(
        prompt_ids=np.array([5], np.int32)
    )
    (batch,) = pack([group, short], 1, EVERYTHING)
    assert batch.input_ids.tolist() == [[7, 8, 9, 10, 11, 12, 13, 14], [5, 10, 11, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5], [0, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, -1, -1, -1, -1, -1]]
    assert batch.rows.tolist() == [2, 3, 2, 5, 6, 8, 8]
    assert batch.targets.tolist() == [10, 11, 12, 13, 14, 10, 11]
    assert batch.response_index.tolist() == [0, 0, 1, 1, 1, 2, 3]


def test_a_position_sees_its_prompt_and_its_own_response_up_to_itself(groups: list[GroupPayload]) -> None:
    (batch,) = pack(groups, VERSION, EVERYTHING)
    for dtype in (torch.float32, torch.bfloat16):
        mask = batch.attention_mask(dtype)
        num_rows, width = batch.segments.shape
        assert mask.shape == (num_rows, 1, width, width) and mask.dtype == dtype
        for row, segment in enumerate(batch.segments.tolist()):
            for i in range(width):
                for j in range(width):
                    sees = j <= i and segment[j] in (0, segment[i])
                    assert float(mask[row, 0, i, j]) == (0.0 if sees else torch.finfo(dtype).min)


# ------------------------------------------------------------------------------------------------ what counts


def test_tokens_older_than_the_bound_are_masked_and_none_else() -> None:
    spans = [(0, 0, 4), (0, 2, 6), (0, 3, 10), (1, 0, 7), (2, 0, 3), (3, 0, 9), (3, 1, 10)]
    group = group_of([5, 2, 1, 2], spans, [FinishReason.END_TOKEN] * 4)
    lags = [6, 6, 4, 0, 0, 3, 3, 7, 1, 0]
    for bound in (0, 3, 4, 5, 6, 7):
        for per_microbatch in (1, 3, 4):
            batches = list(pack([group], 10, PackingRules(per_microbatch, bound, False)))
            mask = torch.cat([batch.mask for batch in batches])
            assert mask.tolist() == [lag <= bound for lag in lags]
            assert sum(batch.stats["lag_left_out"] for batch in batches) == sum(lag > bound for lag in lags)
            assert sum(batch.stats["lag"] for batch in batches) == sum(lags)
            assert max(batch.stats["lag_max"] for batch in batches) == 7


def test_truncated_responses_are_masked_only_if_asked_for() -> None:
    finish = [FinishReason.LENGTH, FinishReason.END_TOKEN, FinishReason.STOP_STRING, FinishReason.LENGTH]
    group = group_of([2, 1, 3, 1], [(i, 0, 5 if i < 2 else 1) for i in range(4)], finish)
    assert next(pack([group], 5, PackingRules(9, 8, False))).mask.tolist() == [True] * 7
    assert next(pack([group], 5, PackingRules(9, 8, True))).mask.tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert next(pack([group], 5, PackingRules(9, 3, True))).mask.tolist() == [0, 0, 1, 0, 0, 0, 0]
    advantages = [next(pack([group], 5, PackingRules(9, 8, masked))).advantages.tolist() for masked in (True, False)]
    assert advantages[0] == advantages[1], "a masked response stays in the group's mean and deviation"


def test_on_policy_responses_are_those_of_the_trained_version_only() -> None:
    spans = [(0, 0, 9), (0, 1, 10), (1, 0, 10), (2, 0, 9), (3, 0, 10)]
    group = group_of([3, 2, 1, 1], spans, [FinishReason.END_TOKEN] * 4)
    for per_microbatch in (1, 2, 4):
        batches = pack([group], 10, PackingRules(per_microbatch, 8, False))
        assert torch.cat([b.on_policy for b in batches]).tolist() == [0, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("per_microbatch", [1, 2, 3, 1000])
def test_statistics_add_up_whatever_the_split(groups: list[GroupPayload], per_microbatch: int) -> None:
    equal = groups[1]._replace(rewards=np.full(2, 3.5, np.float32))
    given = [groups[0], equal, *groups[2:]]
    batches = list(pack(given, VERSION, PackingRules(per_microbatch, 2, True), [0.5, 1.0, 2.0, 4.0]))
    assert all(set(batch.stats) == set(STATISTICS) for batch in batches)
    sums = {name: sum(batch.stats[name] for batch in batches) for name in STATISTICS if name != "lag_max"}
    lags = np.concatenate([VERSION - g.token_versions() for g in given])
    assert sums == pytest.approx(
        {
            "responses": 14,
            "truncated": sum(int((g.finish == FinishReason.LENGTH).sum()) for g in given),
            "tokens": len(lags),
            "lag": lags.sum(),
            "lag_left_out": (lags > 2).sum(),
            "reward": sum(float(g.rewards.sum()) for g in given),
            "format_acc": 14,
            "ans_acc": sum(float(g.ans_acc.sum()) for g in given),
            "temperature": sum(t * g.num_responses for t, g in zip([0.5, 1.0, 2.0, 4.0], given, strict=True)),
            "groups": 4,
            "zero_variance": 1,
        }
    )
    assert max(batch.stats["lag_max"] for batch in batches) == lags.max() > 2
    assert 0 < sums["lag_left_out"] < sums["tokens"]


def test_the_payload_is_not_written_to(groups: list[GroupPayload]) -> None:
    before = copy.deepcopy(groups)
    for batch in pack(groups, VERSION, PackingRules(3, 2, True)):
        batch.advantages.zero_()
        batch.old_logprobs.zero_()
        batch.input_ids.zero_()
    assert all(
        np.array_equal(a, b) for old, new in zip(before, groups, strict=True) for a, b in zip(old, new, strict=True)
    )


def test_no_groups_give_no_microbatch() -> None:
    assert list(pack([], 0, EVERYTHING)) == []
