"""What a scoring request and its outcome are, and how they travel between the pool and its workers.

A frame is a 4-byte big-endian length and that many bytes. Requests are JSON, because rows of a data set are JSON and
may hold integers of any size; a worker answers in msgpack, because a reward may be infinite or not a number.
"""

from __future__ import annotations

import difflib
import struct
from typing import Any, Optional

import msgspec

from zbgrpo.config.schema import RewardConfig
from zbgrpo.errors import ConfigError, ProtocolError
from zbgrpo.rewards.sandbox.base import Isolation

ANSWER_TYPES = ("think_answer_tags", "boxed")
"""Reward types that compare an extracted answer with `gt_answer`."""

CODE_TYPE = "code"
"""The reward type that runs programs and looks at `test_cases`."""

FULL_REWARD = 10.0
"""What a right answer in a valid format is paid by the built-in types."""

MAX_FRAME_BYTES = 256 * 1024 * 1024

_LENGTH = struct.Struct(">I")


class RewardSpec(msgspec.Struct, frozen=True):
    """Which reward is computed, and within which limits.

    `time_limit_seconds` of a response is kept by the pool, and for code by the scorer: its programs, all together, may
    run for so long. What follows it is for code alone; `config.schema.RewardConfig` says what it means.
    """

    type: str
    time_limit_seconds: float = 10.0
    code_memory_bytes: int = 1024**3
    code_sandbox_url: Optional[str] = None
    min_isolation: int = 1
    allow_unsafe_code: bool = False

    @classmethod
    def of(cls, config: RewardConfig) -> RewardSpec:
        """As configured."""
        return cls(
            config.type,
            config.time_limit_seconds,
            config.code_memory_bytes,
            config.code_sandbox_url,
            config.min_isolation,
            config.allow_unsafe_code,
        )


class ScoreRequest(msgspec.Struct):
    """One response and what the data set says about its prompt.

    `prompt` is the rendered prompt as text; only whether it ends in an open `<think>` matters to the built-in rewards.
    `row` holds the other fields of the data row, as JSON values.
    """

    response: str
    gt_answer: Optional[str] = None
    test_cases: Optional[dict[str, Any]] = None
    prompt: str = ""
    row: dict[str, Any] = {}


class ScoreOutcome(msgspec.Struct):
    """Score of one response, or the reason why there is none.

    When `error` is set the three numbers mean nothing and must not be used. `infrastructure` then says whose fault it
    was: False, the reward function raised or returned nonsense; True, the scoring process was lost.
    """

    reward: float
    format_acc: float
    ans_acc: float
    error: Optional[str] = None
    infrastructure: bool = False
    gold_unparsable: bool = False
    timed_out: bool = False

    @classmethod
    def failed(cls, error: str, infrastructure: bool) -> ScoreOutcome:
        return cls(reward=0.0, format_acc=0.0, ans_acc=0.0, error=error, infrastructure=infrastructure)


class WorkerReady(msgspec.Struct):
    """First frame of a worker: it can score now, or the message of a `UserError` that says why it never will.

    `isolation` is what its programs are kept in, if it runs any.
    """

    user_error: Optional[str] = None
    isolation: Optional[Isolation] = None


def check_reward_type(reward_type: str) -> None:
    """Raise `ConfigError` unless `reward_type` names a built-in reward or has the form `module:function`."""
    built_in = (*ANSWER_TYPES, CODE_TYPE)
    if reward_type in built_in:
        return
    module, colon, function = reward_type.rpartition(":")
    if colon and module and function.isidentifier():
        return
    near = difflib.get_close_matches(reward_type, built_in, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"unknown reward type {reward_type!r}{hint} Use one of {', '.join(built_in)}, "
        "or module:function, or path/to/file.py:function"
    )


def encode_frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a reward message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def take_frame(buffer: bytearray) -> Optional[bytes]:
    """Remove the first complete frame from `buffer` and return its payload; None if there is none yet."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a reward message announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return payload
