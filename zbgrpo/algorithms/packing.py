"""Groups to microbatches: a group's prompt once, its responses behind it, each seeing the prompt and itself only.

A row of a microbatch is one group, or the part of it that falls into the microbatch:

    [ prompt | response 0 | response 1 | ... | padding ]

Positions restart behind the prompt for each response, so every token gets the same hidden state as in a sequence of
its own (exactly the same attention set and positions; only the order of floating-point sums may differ).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zbgrpo.algorithms.advantages import group_advantages
from zbgrpo.types import FinishReason, GroupPayload

STATISTICS = (
    "responses", "truncated", "tokens", "lag", "lag_max", "lag_left_out", "reward", "format_acc", "ans_acc",
    "temperature", "groups", "zero_variance",
)  # fmt: skip
"""Sums over a microbatch that need no model: over responses (responses, truncated, reward, format_acc, ans_acc,
temperature), over tokens (tokens, lag, lag_left_out: older than the bound; lag_max is a maximum), over groups whose
first response is in it (groups, zero_variance)."""


@dataclass
class Microbatch:
    """B rows of N positions; T response tokens; R responses."""

    input_ids: Tensor  # int64 [B, N], padding is 0
    position_ids: Tensor  # int64 [B, N]
    segments: Tensor  # int64 [B, N]: 0 prompt, 1.. responses, -1 padding
    rows: Tensor  # int64 [T], flat index (row x N + column) of the position that predicts each response token
    targets: Tensor  # int64 [T]
    old_logprobs: Tensor  # float32 [T]
    response_index: Tensor  # int64 [T]
    mask: Tensor  # bool [T], tokens that count
    temperature: float | Tensor  # that all tokens were sampled at, or float32 [T] where groups differ
    advantages: Tensor  # float32 [R]
    on_policy: Tensor  # bool [T], tokens of responses sampled wholly with the trained version
    prompt_lengths: np.ndarray  # int64 [B], tokens of each row's prompt; on the host, as `places`
    places: np.ndarray  # int64 [R, 3]: row, first column and length of each response
    stats: dict[str, float]
    """Keys of STATISTICS."""

    @property
    def num_responses(self) -> int:
        return len(self.advantages)

    def to(self, device: torch.device) -> Microbatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **moved)

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, N, N]: 0 where position i may see position j, else the lowest number of the dtype.

        i sees j <= i of the prompt, and of its own response.
        """
        segment = self.segments
        order = torch.arange(segment.shape[1], device=segment.device)
        visible = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
        visible &= order[None, None, :] <= order[None, :, None]
        mask = torch.zeros(visible.shape, dtype=dtype, device=segment.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


@dataclass(frozen=True)
class PackingRules:
    """What counts in the loss, beside the algorithm's own rules."""

    responses_per_microbatch: int
    max_token_lag: int
    mask_truncated: bool


def pack(
    groups: Sequence[GroupPayload], version: int, rules: PackingRules, temperatures: Sequence[float] | None = None
) -> Iterator[Microbatch]:
    """Microbatches of a minibatch that trains `version`, of at most `responses_per_microbatch` responses each.

    Responses are never split. Advantages are those of the whole group, whatever the split. A token older than
    `max_token_lag` versions is masked; so is a truncated response if `mask_truncated`. `temperatures`
    are those that the groups were sampled at, 1 if left out.
    """
    if temperatures is None:
        temperatures = [1.0] * len(groups)
    rows: list[_Row] = []
    room = rules.responses_per_microbatch
    for group, temperature in zip(groups, temperatures, strict=True):
        prepared = _Group(group, version, rules, temperature)
        first = 0
        while first < group.num_responses:
            count = min(room, group.num_responses - first)
            rows.append(_Row(prepared, slice(first, first + count)))
            first, room = first + count, room - count
            if room == 0:
                yield _assemble(rows)
                rows, room = [], rules.responses_per_microbatch
    if rows:
        yield _assemble(rows)


class _Group:
    """A group with everything about it that does not depend on the split. T = its response tokens."""

    def __init__(self, payload: GroupPayload, version: int, rules: PackingRules, temperature: float) -> None:
        self.payload, self.rules, self.temperature = payload, rules, temperature
        self.starts = np.concatenate([[0], np.cumsum(payload.lengths)])  # int64 [R + 1]
        self.response = np.repeat(np.arange(payload.num_responses), payload.lengths)  # int64 [T]
        self.within = np.arange(self.starts[-1]) - self.starts[self.response]  # int64 [T], place in the response
        self.advantages = group_advantages(torch.from_numpy(payload.rewards.copy())).float()
        self.truncated = payload.finish == FinishReason.LENGTH
        self.lag = version - payload.token_versions()
        self.mask = self.lag <= rules.max_token_lag
        if rules.mask_truncated:
            self.mask &= ~self.truncated[self.response]
        num_older = np.bincount(self.response, self.lag != 0, minlength=payload.num_responses)
        self.on_policy = num_older[self.response] == 0


class _Row:
    """Consecutive responses of a group."""

    def __init__(self, group: _Group, responses: slice) -> None:
        self.group, self.responses = group, responses
        self.num_responses = responses.stop - responses.start
        self.tokens = slice(int(group.starts[responses.start]), int(group.starts[responses.stop]))
        """Its part of the group's response tokens."""
        self.length = len(group.payload.prompt_ids) + self.tokens.stop - self.tokens.start


def _assemble(rows: Sequence[_Row]) -> Microbatch:
    ids, positions, segments, predictors = _layout(rows)
    firsts = np.cumsum([0, *(row.num_responses for row in rows[:-1])])  # of each row, counted through the microbatch
    index = [
        row.group.response[row.tokens] + (first - row.responses.start) for row, first in zip(rows, firsts, strict=True)
    ]
    return Microbatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        rows=torch.from_numpy(predictors),
        targets=_joined([row.group.payload.response_ids[row.tokens] for row in rows], np.int64),
        old_logprobs=_joined([row.group.payload.logprobs[row.tokens] for row in rows], np.float32),
        response_index=_joined(index, np.int64),
        mask=_joined([row.group.mask[row.tokens] for row in rows], np.bool_),
        temperature=_temperature(rows),
        advantages=torch.cat([row.group.advantages[row.responses] for row in rows]),
        on_policy=_joined([row.group.on_policy[row.tokens] for row in rows], np.bool_),
        prompt_lengths=np.array([len(row.group.payload.prompt_ids) for row in rows], np.int64),
        places=np.concatenate([_places(number, row) for number, row in enumerate(rows)]),
        stats=_statistics(rows),
    )


def _temperature(rows: Sequence[_Row]) -> float | Tensor:
    """One number where it will do: it costs the log-probs less than a tensor."""
    values = [row.group.temperature for row in rows]
    if len(set(values)) == 1:
        return values[0]
    return torch.from_numpy(np.repeat(np.array(values, np.float32), [r.tokens.stop - r.tokens.start for r in rows]))


def _joined(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    """The parts one after the other, copied."""
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def _layout(rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`input_ids`, `position_ids`, `segments` and `rows` of a `Microbatch`."""
    shape = (len(rows), max(row.length for row in rows))
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    predictors = []
    for number, row in enumerate(rows):
        group, tokens = row.group, row.tokens
        num_prompt, end = len(group.payload.prompt_ids), row.length
        within = group.within[tokens]
        ids[number, :num_prompt], ids[number, num_prompt:end] = (
            group.payload.prompt_ids,
            group.payload.response_ids[tokens],
        )
        positions[number, :num_prompt], positions[number, num_prompt:end] = np.arange(num_prompt), num_prompt + within
        segments[number, :num_prompt] = 0
        segments[number, num_prompt:end] = group.response[tokens] + (1 - row.responses.start)
        # The first token of a response is predicted by the prompt's last position, the others by their neighbour.
        columns = np.where(within == 0, num_prompt - 1, np.arange(num_prompt - 1, end - 1))
        predictors.append(number * shape[1] + columns)
    return ids, positions, segments, np.concatenate(predictors)


def _places(number: int, row: _Row) -> np.ndarray:
    """The part of `Microbatch.places` of one row."""
    lengths = row.group.payload.lengths[row.responses].astype(np.int64)
    ends = len(row.group.payload.prompt_ids) + np.cumsum(lengths)
    return np.stack([np.full(len(lengths), number), ends - lengths, lengths], axis=1)


def _statistics(rows: Sequence[_Row]) -> dict[str, float]:
    """The sums of `STATISTICS`."""
    stats = dict.fromkeys(STATISTICS, 0.0)
    for row in rows:
        group, payload, part = row.group, row.group.payload, row.responses
        lag = group.lag[row.tokens]
        stats["responses"] += row.num_responses
        stats["truncated"] += float(group.truncated[part].sum())
        stats["tokens"] += len(lag)
        stats["lag"] += float(lag.sum())
        stats["lag_max"] = max(stats["lag_max"], float(lag.max()))
        stats["lag_left_out"] += float((lag > group.rules.max_token_lag).sum())
        stats["reward"] += float(payload.rewards[part].sum())
        stats["format_acc"] += float(payload.format_acc[part].sum())
        stats["ans_acc"] += float(payload.ans_acc[part].sum())
        stats["temperature"] += row.num_responses * group.temperature
        if part.start == 0:
            stats["groups"] += 1.0
            stats["zero_variance"] += float((payload.rewards == payload.rewards[0]).all())
    return stats
