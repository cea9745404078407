"""A scoring process: `python -m zbgrpo.rewards.worker CHANNEL_FD PARENT_PID FAILPOINTS`, started by `pool.py` only.

The channel is a socket that nobody else holds, so whatever a reward function prints (stdout is stderr here) or reads
(stdin is empty) stays clear of it. Its first frame is the `RewardSpec`; the worker answers `WorkerReady`, then one
`ScoreOutcome` per `ScoreRequest`. It ends when the channel closes, and is killed when its parent dies.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Optional

import msgspec

from zbgrpo import failpoints
from zbgrpo.errors import UserError
from zbgrpo.rewards.code import CodeScorer
from zbgrpo.rewards.messages import (
    ANSWER_TYPES,
    RewardSpec,
    ScoreRequest,
    WorkerReady,
    encode_frame,
    take_frame,
)
from zbgrpo.rewards.score import Scorer, build_scorer

ANSWER_MEMORY_BYTES = 4 * 1024**3
"""Address space of a worker that compares answers: a tower of powers must not take the machine's memory with it."""

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


def main() -> int:
    channel_fd, parent_pid = (int(argument) for argument in sys.argv[1:3])
    failpoints.arm(sys.argv[3], "reward")
    _die_with_parent(parent_pid)
    os.set_inheritable(channel_fd, False)
    with socket.socket(fileno=channel_fd) as channel:
        return _serve(channel)


def _serve(channel: socket.socket) -> int:
    buffer = bytearray()
    first = _receive(channel, buffer)
    if first is None:
        return 0
    spec = msgspec.json.decode(first, type=RewardSpec)
    if spec.type in ANSWER_TYPES:
        _limit_memory(ANSWER_MEMORY_BYTES)
    scorer = _build_or_report(channel, spec)
    if scorer is None:
        return 1
    _send(channel, WorkerReady(isolation=scorer.isolation if isinstance(scorer, CodeScorer) else None))
    decoder = msgspec.json.Decoder(ScoreRequest)
    while (payload := _receive(channel, buffer)) is not None:
        failpoints.fire("reward.score")
        _send(channel, scorer.score(decoder.decode(payload)))
    return 0


def _build_or_report(channel: socket.socket, spec: RewardSpec) -> Optional[Scorer]:
    """Scorer of `spec`; None after its error was reported, and then the process ends."""
    try:
        return build_scorer(spec)
    except UserError as error:
        _send(channel, WorkerReady(user_error=str(error)))
    except Exception as error:
        traceback.print_exc()
        message = f"reward type {spec.type!r} cannot be loaded: {type(error).__name__}: {error}"
        _send(channel, WorkerReady(user_error=message))
    return None


def _die_with_parent(parent_pid: int) -> None:
    """Be killed when the thread that started this process ends; leave at once if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _limit_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _receive(channel: socket.socket, buffer: bytearray) -> Optional[bytes]:
    while (payload := take_frame(buffer)) is None:
        received = channel.recv(_READ_BYTES)
        if not received:
            return None
        buffer += received
    return payload


def _send(channel: socket.socket, message: msgspec.Struct) -> None:
    channel.sendall(encode_frame(msgspec.msgpack.encode(message)))


if __name__ == "__main__":
    sys.exit(main())
