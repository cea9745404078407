"""Groups to microbatches: a group's prompt once, its responses behind it, each seeing the prompt and itself only.

A row of a microbatch is one group, or the part of it that falls into the microbatch:

    [ prompt | response 0 | response 1 | ... | padding ]

Positions restart behind the prompt for each response, so every token gets the same hidden state as in a sequence of
its own (exactly the same attention set and positions; only the order of floating-point sums may differ).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zbgrpo.algorithms.advantages import group_advantages
from zbgrpo.types import FinishReason, GroupPayload

STATISTICS = (
    "responses", "truncated", "tokens", "lag", "lag_max", "lag_left_out", "reward", "format_acc", "ans_acc", "groups",
    "zero_variance",
)  # fmt: skip
"""Sums over a microbatch that need no model: over responses (responses, truncated, reward, format_acc, ans_acc), over
tokens (tokens, lag, lag_left_out: older than the bound; lag_max is a maximum), over groups whose first response is in
it (groups, zero_variance)."""


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
    advantages: Tensor  # float32 [R]
    on_policy: Tensor  # bool [T], tokens of responses sampled wholly with the trained version
    stats: dict[str, float]
    """Keys of STATISTICS."""

    @property
    def num_responses(self) -> int:
        return len(self.advantages)

    def to(self, device: torch.device) -> Microbatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return Microbatch(**moved, stats=self.stats)

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


def pack(groups: Sequence[GroupPayload], version: int, rules: PackingRules) -> Iterator[Microbatch]:
    """Microbatches of a minibatch that trains `version`, of at most `responses_per_microbatch` responses each.

    Responses are never split. Advantages are those of the whole group, whatever the split. A token older than
    `max_token_lag` versions is masked; so is a truncated response if `mask_truncated`.
    """
    rows: list[_Row] = []
    room = rules.responses_per_microbatch
    for group in groups:
        prepared = _Group(group, version, rules)
        first = 0
        while first < group.num_responses:
            count = min(room, group.num_responses - first)
            rows.append(_Row(prepared, range(first, first + count)))
            first, room = first + count, room - count
            if room == 0:
                yield _assemble(rows)
                rows, room = [], rules.responses_per_microbatch
    if rows:
        yield _assemble(rows)


class _Group:
    """A group with everything about it that does not depend on the split."""

    def __init__(self, payload: GroupPayload, version: int, rules: PackingRules) -> None:
        self.payload, self.rules = payload, rules
        self.starts = np.concatenate([[0], np.cumsum(payload.lengths)])
        self.advantages = group_advantages(torch.from_numpy(payload.rewards.copy())).float()
        self.lag = version - payload.token_versions()
        self.truncated = payload.finish == FinishReason.LENGTH
        self.mask = self.lag <= rules.max_token_lag
        if rules.mask_truncated:
            self.mask &= ~np.repeat(self.truncated, payload.lengths)


@dataclass
class _Row:
    group: _Group
    responses: range

    @property
    def tokens(self) -> slice:
        """Its part of the group's response tokens."""
        starts = self.group.starts
        return slice(int(starts[self.responses.start]), int(starts[self.responses.stop]))

    @property
    def length(self) -> int:
        return len(self.group.payload.prompt_ids) + self.tokens.stop - self.tokens.start


def _assemble(rows: Sequence[_Row]) -> Microbatch:
    width = max(row.length for row in rows)
    shape = (len(rows), width)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    predictors, targets, old, index, mask, on_policy = [], [], [], [], [], []
    advantages: list[float] = []
    stats = dict.fromkeys(STATISTICS, 0.0)
    for number, row in enumerate(rows):
        group, payload, tokens = row.group, row.group.payload, row.tokens
        num_prompt, lengths = len(payload.prompt_ids), payload.lengths[row.responses.start : row.responses.stop]
        end = row.length
        ids[number, :num_prompt], ids[number, num_prompt:end] = payload.prompt_ids, payload.response_ids[tokens]
        positions[number, :num_prompt] = np.arange(num_prompt)
        within = np.concatenate([np.arange(n) for n in lengths])
        positions[number, num_prompt:end] = num_prompt + within
        segments[number, :num_prompt] = 0
        segments[number, num_prompt:end] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        # The first token of a response is predicted by the prompt's last position, the others by their neighbour.
        own = np.arange(num_prompt, end)
        predictors.append(number * width + np.where(within == 0, num_prompt - 1, own - 1))
        targets.append(payload.response_ids[tokens])
        old.append(payload.logprobs[tokens])
        index.append(len(advantages) + np.repeat(np.arange(len(lengths)), lengths))
        mask.append(group.mask[tokens])
        lag = group.lag[tokens]
        newest = np.array([(lag[index[-1] - len(advantages) == i] == 0).all() for i in range(len(lengths))])
        on_policy.append(np.repeat(newest, lengths))
        advantages.extend(group.advantages[row.responses.start : row.responses.stop].tolist())
        stats["responses"] += len(lengths)
        stats["truncated"] += float(group.truncated[row.responses.start : row.responses.stop].sum())
        stats["tokens"] += float(lengths.sum())
        stats["lag"] += float(lag.sum())
        stats["lag_max"] = max(stats["lag_max"], float(lag.max()))
        stats["lag_left_out"] += float((lag > group.rules.max_token_lag).sum())
        part = slice(row.responses.start, row.responses.stop)
        stats["reward"] += float(payload.rewards[part].sum())
        stats["format_acc"] += float(payload.format_acc[part].sum())
        stats["ans_acc"] += float(payload.ans_acc[part].sum())
        if row.responses.start == 0:
            stats["groups"] += 1.0
            stats["zero_variance"] += float((payload.rewards == payload.rewards[0]).all())
    return Microbatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(segments),
        torch.from_numpy(np.concatenate(predictors)),
        torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        torch.from_numpy(np.concatenate(old).astype(np.float32)),
        torch.from_numpy(np.concatenate(index).astype(np.int64)),
        torch.from_numpy(np.concatenate(mask)),
        torch.tensor(advantages, dtype=torch.float32),
        torch.from_numpy(np.concatenate(on_policy)),
        stats,
    )
