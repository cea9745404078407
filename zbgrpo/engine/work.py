"""What a producer has in hand for one lease, and the group that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zbgrpo.config.schema import RunConfig
from zbgrpo.data.rows import Row
from zbgrpo.inference.base import Response
from zbgrpo.ledger.evaluation import EvaluationLease
from zbgrpo.ledger.records import Lease
from zbgrpo.rewards.messages import ANSWER_TYPES, CODE_TYPE, ScoreOutcome
from zbgrpo.rewards.overlong import final_reward
from zbgrpo.types import FinishReason, GroupPayload


@dataclass
class Work:
    """A lease with what is known of it so far."""

    lease: Lease | EvaluationLease
    row: Row
    prompt_ids: list[int]
    num_responses: int
    responses: dict[int, Response] = field(default_factory=dict)
    complete_at: float = 0.0
    """Monotonic time at which the last response was there and scoring began."""

    def costs(self) -> dict[str, Any]:
        """What the group took, for the event log: tokens of the prompt and of each response, seconds of scoring."""
        return {
            "prompt_tokens": len(self.prompt_ids),
            "lengths": [len(self.responses[n].token_ids) for n in range(self.num_responses)],
            "scoring_seconds": round(time.monotonic() - self.complete_at, 6),
        }


@dataclass(frozen=True)
class PromptSource:
    """Rows and how they become token ids; `usable` maps a lease's row to the data set's."""

    rows: list[Row]
    usable: list[int]
    render: Callable[[Any], list[int]]
    decode: Callable[[list[int]], str]
    evaluation: dict[str, list[Row]]


def make_payload(config: RunConfig, work: Work, outcomes: list[ScoreOutcome]) -> GroupPayload:
    """A finished group as training needs it, with the rewards that it is trained on."""
    responses = [work.responses[n] for n in range(work.num_responses)]
    algorithm, limit = config.algorithm, config.inference.max_new_tokens
    # A verifier's verdict on half an answer is worth nothing; a user's own function judges what there is.
    verified = config.reward.type in (*ANSWER_TYPES, CODE_TYPE)
    cut_off = [verified and response.finish is FinishReason.LENGTH for response in responses]
    rewards = [
        final_reward(
            outcome.reward,
            cut,
            len(response.token_ids),
            limit,
            algorithm.overlong_cache_tokens,
            bool(algorithm.overlong_penalty),
        )
        for outcome, response, cut in zip(outcomes, responses, cut_off, strict=True)
    ]
    spans = [(n, start, version) for n, r in enumerate(responses) for start, version in r.spans]
    return GroupPayload(
        np.array(work.prompt_ids, np.int32),
        np.concatenate([r.token_ids for r in responses]).astype(np.int32),
        np.concatenate([r.logprobs for r in responses]).astype(np.float32),
        np.array([len(r.token_ids) for r in responses], np.int32),
        np.array(rewards, np.float32),
        np.array([o.format_acc for o in outcomes], np.float32),
        # What is not paid for being cut off is not right either: the filter looks for groups whose rewards differ.
        np.array([0.0 if cut else o.ans_acc for o, cut in zip(outcomes, cut_off, strict=True)], np.float32),
        np.array([int(r.finish) for r in responses], np.int32),
        np.array(spans, np.int32),
    )
