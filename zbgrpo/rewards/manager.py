"""The thread that owns the workers of a reward pool: starts, feeds, times, kills and replaces them.

waits for: a message of a worker, a submitted group, the next deadline; never for one of them alone.
"""

from __future__ import annotations

import collections
import queue
import selectors
import socket
import threading
import time
from typing import Optional

import msgspec

from zbgrpo.errors import ConfigError, InfrastructureError, ProtocolError, ZbgrpoError
from zbgrpo.rewards.extract import EXTRACTORS
from zbgrpo.rewards.messages import CODE_TYPE, RewardSpec, ScoreOutcome, ScoreRequest, WorkerReady
from zbgrpo.rewards.sandbox.base import Isolation
from zbgrpo.rewards.worker_process import WorkerProcess

START_LIMIT_SECONDS = 180.0
"""Longest time from the start of a worker until it can score: it imports sympy, or the user's module."""

MAX_FAILED_STARTS = 3
"""After so many failed starts in a row the pool gives up."""

END_LIMIT_SECONDS = 5.0
"""Longest time that killed workers are waited for in the end."""

MAX_ATTEMPTS = 2
"""How many workers a response may cost before its outcome is an error."""

CODE_GRACE_SECONDS = 5.0
"""How much longer than twice its time limit a response may take for code, whose scorer keeps the limit itself."""

BREAKER_WINDOW = 200
BREAKER_LIMIT = 10
"""With more infrastructure errors than this among the last `BREAKER_WINDOW` outcomes the pool gives up."""

_START_PAUSE_SECONDS = 0.5
_REAP_SECONDS = 0.05
_IDLE_SECONDS = 5.0


class Group:
    """The outcomes of one submitted group, in request order, as they arrive."""

    def __init__(self, key: int, num_requests: int) -> None:
        self.key = key
        self.outcomes: dict[int, ScoreOutcome] = {}
        self.num_requests = num_requests

    @property
    def is_finished(self) -> bool:
        return len(self.outcomes) == self.num_requests

    def in_order(self) -> list[ScoreOutcome]:
        return [self.outcomes[index] for index in range(self.num_requests)]


class Task:
    """One response of a group; `payload` is its encoded `ScoreRequest`."""

    def __init__(self, group: Group, index: int, payload: bytes) -> None:
        self.group = group
        self.index = index
        self.payload = payload
        self.num_attempts = 0


class _Worker:
    """A process and what it is doing. It is starting, then idle or busy with one task."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.is_ready = False
        self.is_fresh = True  # has not scored anything yet
        self.task: Optional[Task] = None
        self.deadline: Optional[float] = time.monotonic() + START_LIMIT_SECONDS  # None while idle


class Manager(threading.Thread):
    """Takes lists of tasks from `submitted`, puts groups into `finished`, and None there once it has ended."""

    def __init__(
        self,
        spec: RewardSpec,
        num_workers: int,
        submitted: queue.SimpleQueue[list[Task]],
        finished: queue.SimpleQueue[Optional[Group]],
        wake: socket.socket,
    ) -> None:
        super().__init__(name="reward-pool", daemon=True)
        self.closing = threading.Event()
        self.failure: Optional[ZbgrpoError] = None  # why the pool gave up
        self.isolation: Optional[Isolation] = None  # of the programs that workers run, once one of them has said so
        self._spec = spec
        self._num_workers = num_workers
        self._submitted = submitted
        self._finished = finished
        self._wake = wake
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._workers: list[_Worker] = []
        self._dying: list[WorkerProcess] = []
        self._pending: collections.deque[Task] = collections.deque()
        self._retries: collections.deque[Task] = collections.deque()  # for fresh workers only
        self._num_failed_starts = 0
        self._next_start = time.monotonic()
        self._lost: collections.deque[bool] = collections.deque(maxlen=BREAKER_WINDOW)
        self._limit_seconds = spec.time_limit_seconds
        if spec.type == CODE_TYPE:
            self._limit_seconds = 2 * spec.time_limit_seconds + CODE_GRACE_SECONDS

    def run(self) -> None:
        try:
            while not self.closing.is_set():
                self._take_submitted()
                self._start_workers()
                self._hand_out()
                self._wait()
                self._check_deadlines()
                self._dying = [process for process in self._dying if not process.has_ended()]
        except ZbgrpoError as error:
            self.failure = error
        finally:
            self._end_workers()
            self._finished.put(None)

    def _take_submitted(self) -> None:
        while True:
            try:
                self._pending.extend(self._submitted.get_nowait())
            except queue.Empty:
                return

    def _start_workers(self) -> None:
        while len(self._workers) < self._num_workers and time.monotonic() >= self._next_start:
            try:
                process = WorkerProcess()
            except OSError as error:
                self._count_failed_start(str(error))
                continue
            worker = _Worker(process)
            self._workers.append(worker)
            self._selector.register(process.channel, selectors.EVENT_READ, worker)
            self._send(worker, msgspec.json.encode(self._spec))

    def _count_failed_start(self, reason: str) -> None:
        self._num_failed_starts += 1
        self._next_start = time.monotonic() + _START_PAUSE_SECONDS
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise InfrastructureError(f"reward workers cannot be started, {MAX_FAILED_STARTS} times in a row: {reason}")

    def _hand_out(self) -> None:
        for worker in list(self._workers):
            if not worker.is_ready or worker.task is not None:
                continue
            tasks = self._retries if worker.is_fresh and self._retries else self._pending
            if not tasks:
                continue
            task = worker.task = tasks.popleft()
            task.num_attempts += 1
            # An idle worker starts at once, so its time starts here.
            worker.deadline = time.monotonic() + self._limit_seconds
            self._send(worker, task.payload)

    def _send(self, worker: _Worker, payload: bytes) -> None:
        try:
            worker.process.send(payload)
        except OSError:
            return  # it is gone, and the end of its channel is about to be read
        self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        writing = selectors.EVENT_WRITE if worker.process.wants_to_write else 0
        self._selector.modify(worker.process.channel, selectors.EVENT_READ | writing, worker)

    def _wait(self) -> None:
        now = time.monotonic()
        times = [worker.deadline for worker in self._workers if worker.deadline is not None]
        if len(self._workers) < self._num_workers:
            times.append(self._next_start)
        if self._dying:
            times.append(now + _REAP_SECONDS)
        timeout_seconds = max(0.0, min(times, default=now + _IDLE_SECONDS) - now)
        for key, events in self._selector.select(timeout_seconds):
            if key.data is None:
                self._wake.recv(4096)
            else:
                self._serve(key.data, events)

    def _serve(self, worker: _Worker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                worker.process.flush()
                self._watch(worker)
            payloads, is_open = worker.process.receive()
            for payload in payloads:
                self._answer(worker, payload)
        except (OSError, ProtocolError, msgspec.DecodeError):
            is_open = False
        if not is_open:
            self._replace_lost(worker)

    def _answer(self, worker: _Worker, payload: bytes) -> None:
        if not worker.is_ready:
            ready = msgspec.msgpack.decode(payload, type=WorkerReady)
            if ready.user_error is not None:
                raise ConfigError(ready.user_error)
            worker.is_ready = True
            self.isolation = ready.isolation
            self._num_failed_starts = 0
        elif worker.task is not None:
            self._finish(worker.task, msgspec.msgpack.decode(payload, type=ScoreOutcome))
            worker.task = None
            worker.is_fresh = False
        else:
            raise ProtocolError("a reward worker sent an outcome that nobody asked for")
        worker.deadline = None

    def _finish(self, task: Task, outcome: ScoreOutcome) -> None:
        task.group.outcomes[task.index] = outcome
        if task.group.is_finished:
            self._finished.put(task.group)
        self._lost.append(outcome.infrastructure)
        if outcome.infrastructure and sum(self._lost) > BREAKER_LIMIT:
            raise InfrastructureError(
                f"{sum(self._lost)} of the last {len(self._lost)} responses could not be scored, through no fault of "
                f"theirs; the last because: {outcome.error}"
            )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline is None or worker.deadline > now:
                continue
            if worker.task is None:
                self._replace_lost(worker)
                continue
            self._finish(worker.task, self._timed_out(worker.task))
            self._remove(worker)

    def _timed_out(self, task: Task) -> ScoreOutcome:
        if self._spec.type == CODE_TYPE:
            # The scorer ends programs in time. That it did not is no fault of the response.
            return ScoreOutcome.failed(f"no outcome after {self._limit_seconds:g} seconds", infrastructure=True)
        request = msgspec.json.decode(task.payload, type=ScoreRequest)
        extract = EXTRACTORS.get(self._spec.type)
        format_valid = extract is not None and extract(request.response, request.prompt).format_valid
        return ScoreOutcome(0.0, float(format_valid), 0.0, timed_out=True)

    def _replace_lost(self, worker: _Worker) -> None:
        """Remove a worker that ended, or never got ready; its task, if any, is tried again or fails."""
        self._remove(worker)
        worker.process.has_ended(timeout_seconds=1.0)  # for its exit status
        status = worker.process.exit_status
        if not worker.is_ready:
            self._count_failed_start(f"the process ended with status {status} before it could score; see its stderr")
        task = worker.task
        if task is None:
            return
        if task.num_attempts < MAX_ATTEMPTS:
            self._retries.append(task)
            return
        message = f"{task.num_attempts} reward workers died over this response, the last with exit status {status}"
        self._finish(task, ScoreOutcome.failed(message, infrastructure=True))

    def _remove(self, worker: _Worker) -> None:
        self._selector.unregister(worker.process.channel)
        self._workers.remove(worker)
        worker.process.kill()
        self._dying.append(worker.process)

    def _end_workers(self) -> None:
        for worker in list(self._workers):
            self._remove(worker)
        deadline = time.monotonic() + END_LIMIT_SECONDS
        for process in self._dying:
            process.has_ended(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        self._wake.close()
