"""Processes that score groups of responses beside whatever the caller does.

A response costs at most its own time limit (for code a little more, see `manager.py`). One that runs over it is killed,
with its process group, and scores 0; its worker is replaced and the next response scores as usual. A worker that dies
for another reason is replaced and its response tried once more, on a fresh one; then its outcome is an error, never a
score. When too many of the last outcomes are such errors, the pool gives up: something is broken, and a run must not
learn from what is left.

One thread (`manager.py`) owns all workers. The caller's thread only puts groups into one queue and takes them from
another.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
from types import TracebackType
from typing import Optional

import msgspec

from zbgrpo.errors import ConfigError, InfrastructureError
from zbgrpo.rewards.manager import Group, Manager, Task
from zbgrpo.rewards.messages import RewardSpec, ScoreOutcome, ScoreRequest, check_reward_type
from zbgrpo.rewards.sandbox.base import Isolation

_WAIT_SECONDS = 0.02
CLOSE_LIMIT_SECONDS = 10.0
"""Longest time that `close` takes."""


class RewardPool:
    """A pool of scoring processes; the module's text says what it guarantees.

    `submit` and `poll` belong to one thread and never wait for a worker. Use the pool as a context manager, or `close`
    it; its processes do not outlive this one in any case.
    """

    def __init__(self, spec: RewardSpec, num_workers: int) -> None:
        """Start `num_workers` processes and return at once; `ConfigError` if such a reward cannot exist."""
        check_reward_type(spec.type)
        if num_workers < 1:
            raise ConfigError(f"reward.num_workers must be at least 1, not {num_workers}")
        if not spec.time_limit_seconds > 0:
            raise ConfigError(f"reward.time_limit_seconds must be above 0, not {spec.time_limit_seconds}")
        self._submitted: queue.SimpleQueue[list[Task]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Optional[Group]] = queue.SimpleQueue()
        self._keys: set[int] = set()
        self._wake, wake_receiver = socket.socketpair()
        self._wake.setblocking(False)
        self._manager = Manager(spec, num_workers, self._submitted, self._finished, wake_receiver)
        self._manager.start()

    def submit(self, key: int, requests: list[ScoreRequest]) -> None:
        """Queue one group. `key` must not be that of a group that `poll` has not returned yet."""
        if key in self._keys:
            raise ValueError(f"group {key} is already in the pool")
        group = Group(key, len(requests))
        tasks = [Task(group, index, _encode(request)) for index, request in enumerate(requests)]
        self._keys.add(key)
        if tasks:
            self._submitted.put(tasks)
            self._wake_manager()
        else:
            self._finished.put(group)

    def poll(self, timeout_seconds: float = 0.0) -> list[tuple[int, list[ScoreOutcome]]]:
        """Groups that have finished, each once, outcomes in request order; waits up to the timeout for the first.

        Raises `ConfigError` if the reward cannot be loaded, `InfrastructureError` if workers cannot be started, too
        many responses could not be scored, or the pool is closed; groups that finished before are returned first.
        """
        deadline = time.monotonic() + timeout_seconds
        finished: list[tuple[int, list[ScoreOutcome]]] = []
        while True:
            wait_seconds = 0.0 if finished else max(0.0, deadline - time.monotonic())
            try:
                group = self._finished.get(block=wait_seconds > 0, timeout=wait_seconds)
            except queue.Empty:
                return finished
            if group is not None:
                self._keys.discard(group.key)
                finished.append((group.key, group.in_order()))
                continue
            self._finished.put(None)  # the manager has ended, and later calls must see that too
            if finished:
                return finished
            raise self._manager.failure or InfrastructureError("the reward pool is closed")

    def isolation(self) -> Optional[Isolation]:
        """What programs are kept in; None until a worker is ready, and for rewards that run none."""
        return self._manager.isolation

    def wait_for_isolation(self, timeout_seconds: float) -> Isolation:
        """`isolation` of a reward that runs programs, as soon as a worker is ready; raises what `poll` would."""
        deadline = time.monotonic() + timeout_seconds
        while (isolation := self._manager.isolation) is None:
            if self._manager.failure is not None:
                raise self._manager.failure
            if time.monotonic() > deadline:
                raise InfrastructureError(f"no reward worker was ready within {timeout_seconds:.0f} s")
            time.sleep(_WAIT_SECONDS)
        return isolation

    def close(self) -> None:
        """Kill and reap every worker, within `CLOSE_LIMIT_SECONDS`; unfinished groups are lost. May be called twice."""
        self._manager.closing.set()
        self._wake_manager()
        self._manager.join(CLOSE_LIMIT_SECONDS)
        self._wake.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def _wake_manager(self) -> None:
        # Full: the manager is about to wake anyway. Closed: it has ended, and `poll` says so.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")


def _encode(request: ScoreRequest) -> bytes:
    try:
        return msgspec.json.encode(request)
    except UnicodeEncodeError:  # half of a surrogate pair cannot travel, and is no part of any answer
        text = json.dumps(msgspec.to_builtins(request), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode("utf-8", "replace")))
