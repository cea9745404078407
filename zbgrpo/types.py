"""The vocabulary of the engine: what a group, a lease and a response are. No torch, no sockets."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np


class Role(str, enum.Enum):
    """What a rank does for the whole life of the process."""

    CONSUMER = "consumer"
    PRODUCER = "producer"


class Uid(NamedTuple):
    """One use of one dataset row. Unique in a run."""

    episode: int
    row: int

    def __str__(self) -> str:
        return f"{self.episode}:{self.row}"


class FinishReason(enum.IntEnum):
    """Why a response ended. Only LENGTH counts as truncated."""

    END_TOKEN = 0
    STOP_STRING = 1
    LENGTH = 2


class DropReason(str, enum.Enum):
    """Why a group left the run without being trained."""

    REWARD_ERROR = "reward_error"
    NON_FINITE = "non_finite"
    INFRASTRUCTURE = "infrastructure"
    END = "end"


class RewardResult(NamedTuple):
    """Score of one response. `format_acc` and `ans_acc` are 0.0 or 1.0 (a user's function may return fractions)."""

    reward: float
    format_acc: float
    ans_acc: float


class GroupPayload(NamedTuple):
    """Everything training needs of one group, unpadded. R = responses, T = sum of response lengths."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], responses one after the other
    logprobs: np.ndarray  # float32 [T], log-softmax(logits / temperature) over the full vocabulary at sampling time
    lengths: np.ndarray  # int32 [R]
    rewards: np.ndarray  # float32 [R], with length penalties
    format_acc: np.ndarray  # float32 [R]
    ans_acc: np.ndarray  # float32 [R]
    finish: np.ndarray  # int32 [R], FinishReason
    spans: np.ndarray  # int32 [K, 3], rows of (response, start, policy version), ordered

    @property
    def num_responses(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def token_versions(self) -> np.ndarray:
        """Policy version that sampled each response token: int32 [T]."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)
        versions = np.empty(len(self.response_ids), dtype=np.int32)
        for response, start, version in self.spans.tolist():
            begin = starts[response] + start
            versions[begin : starts[response] + self.lengths[response]] = version
        return versions


PAYLOAD_DTYPES: dict[str, str] = {
    "prompt_ids": "int32",
    "response_ids": "int32",
    "logprobs": "float32",
    "lengths": "int32",
    "rewards": "float32",
    "format_acc": "float32",
    "ans_acc": "float32",
    "finish": "int32",
    "spans": "int32",
}
"""Name and dtype of every tensor of a group, in the order in which they travel. All of four bytes, so that tensors that
lie one behind the other are aligned."""
