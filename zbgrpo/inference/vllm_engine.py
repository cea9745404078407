"""One vLLM engine: its processes, and the thread of this process that talks to them.

    rank's thread --submit, update, cancel_all--> the engine's thread (an event loop) <--> engine core <--> workers
    rank's thread <------- results (queue) ------/

An engine starts, serves, and dies once: for whatever reason, an engine that has died is never used again, and whoever
owns it makes another. All calls are from one thread.

    starting -> serving -> dead      `started()`, `failure`
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zbgrpo.errors import InfrastructureError, WeightSyncError
from zbgrpo.inference import vllm_library
from zbgrpo.inference.vllm_settings import (
    EngineSize,
    SamplingRule,
    VllmSettings,
    engine_arguments,
    engine_environment,
)
from zbgrpo.inference.vllm_weights import WeightFile
from zbgrpo.topology.env import ENGINE_OWNER, EngineOwner, changed_environment, keep_to_cores, usable_cores

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1
_CALL_SECONDS = 60.0
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class EngineDiedError(InfrastructureError):
    """The engine is dead; what it had in work is lost."""


class CallFailedError(EngineDiedError):
    """Its processes answered a call with an error, after which they are not used any more."""


class Job(NamedTuple):
    """One response to generate."""

    name: str
    """The caller's, once in the life of an engine."""
    prompt_ids: Sequence[int]
    seed: int
    temperature: float


class Result(NamedTuple):
    """A finished response."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    is_full: bool
    """Ended by its length alone."""
    has_stop_string: bool


class Update(NamedTuple):
    """What an update took, and what the workers say of the weights that they read."""

    stalled_seconds: float
    """How long nothing was decoded."""
    digests: list[str]


@dataclass
class _Running:
    job: Job
    rule: SamplingRule
    task: asyncio.Task[None] | None = None
    has_started: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmEngine:
    """See the module's text."""

    def __init__(self, settings: VllmSettings, size: EngineSize, model_config: Any) -> None:
        """Begin to start the engine, in the background; `wait_started` says when it serves."""
        self.settings, self.size = settings, size
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.failure: str | None = None
        """Why the engine is dead; None while it is not."""
        self.processes: list[int] = []
        """Process ids of the engine core and the workers."""
        self._arguments = engine_arguments(settings, size, model_config)
        self._owner = EngineOwner(os.getpid(), tempfile.mkdtemp(prefix="zbgrpo-vllm-"))
        self._handles: list[int] = []  # pidfds of the processes, so that no other process is ever hit
        self._handles_lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._num_requests = 0
        self._num_updates = 0
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._start_ended = threading.Event()
        self._close_requested = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    def wait_started(self, timeout_seconds: float) -> bool:
        """Whether the start has ended, well or (see `failure`) not."""
        return self._start_ended.wait(timeout_seconds)

    def submit(self, job: Job, rule: SamplingRule) -> None:
        """Start a response; its result comes to `results`."""
        self._tell(self._begin, _Running(job, rule))

    def cancel_all(self) -> None:
        """Give up everything in work and every result that was not taken."""
        if self.failure is None:
            self._call(self._forget(), _CALL_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                self.results.get_nowait()

    def update(self, file: WeightFile, version: int) -> Update:
        """Generate with these weights from the next token on.

        Raises `WeightSyncError` when the workers refuse the weights: then nothing has changed. Any other failure is
        the engine's death: `EngineDiedError`.
        """
        return self._call(self._update(file, version), self.settings.update_timeout_seconds + _CALL_SECONDS)

    def close(self) -> None:
        """End all its processes. An engine that is still starting ends as soon as it has started."""
        self._fail("it was closed")
        self._tell(self._close_requested.set)
        if self._start_ended.is_set():
            self._thread.join(10.0)
        self.kill()

    def kill(self) -> None:
        """End the processes at once; the engine is dead."""
        self._fail("it was closed")
        with self._handles_lock:
            for handle in self._handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        # Engine processes inherit this mask. A signal to the process group of this rank asks the rank to stop; it
        # decides itself when the engine ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        if self.settings.on_cpu and self.settings.cores:
            # They inherit this thread's cores too. They wait for each other by spinning, and beside two processes that
            # spin, each on a core, the system leaves a rank that trains as little as a twentieth of one.
            keep_to_cores(self.settings.cores)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._fail("its thread has ended")
            self._start_ended.set()
            self._loop.close()
            shutil.rmtree(self._owner.folder, ignore_errors=True)

    async def _serve(self) -> None:
        start = asyncio.ensure_future(self._start())
        await asyncio.wait({start})
        if (error := start.exception()) is not None:
            self._fail(f"it did not start: {_reason(error)}")
        self._start_ended.set()
        while not self._close_requested.is_set() and self.failure is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._close_requested.wait(), _WATCH_SECONDS)
            if self._llm.errored:
                self._fail("one of its processes has ended")
        if self._llm is not None:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # it would log the end of the processes as an error
            self.kill()
            self._llm.shutdown(timeout=1.0)
            self._llm = None
        await _cancelled([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
        with self._handles_lock:
            for handle in self._handles:
                os.close(handle)
            self._handles.clear()

    async def _start(self) -> None:
        variables = engine_environment(self.settings, usable_cores(), self._owner.folder)
        variables[ENGINE_OWNER] = self._owner.text
        # It changes the environment of this process, for the processes that it starts.
        with changed_environment(variables):
            self._llm = vllm_library.create_engine(self._arguments)
        found = await self._watched(self._llm.collective_rpc("zbgrpo_processes"), _CALL_SECONDS)
        self.processes = sorted({process for pair in found for process in pair} - {os.getpid()})
        with self._handles_lock:
            self._handles += [os.pidfd_open(process) for process in self.processes]

    def _tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended, and whoever waits for a result sees `failure`
            self._loop.call_soon_threadsafe(function, *arguments)

    def _fail(self, reason: str) -> None:
        """The first reason is the one that counts."""
        self.failure = self.failure or reason

    def _call(self, call: Coroutine[Any, Any, Any], timeout_seconds: float) -> Any:
        """Run in the engine's thread and wait, from another."""
        if self.failure is not None:
            call.close()
            raise EngineDiedError(self.failure)
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and self._thread.is_alive() and not future.cancelled():
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                return future.result(1.0)
        future.cancel()
        self._fail(f"it gave no answer within {timeout_seconds:.0f} s")
        raise EngineDiedError(self.failure)

    async def _watched(self, call: Coroutine[Any, Any, Any], timeout_seconds: float) -> Any:
        """A call to the engine's processes. One that is pending when they die is never answered, so look after them."""
        task = asyncio.ensure_future(call)
        deadline = time.monotonic() + timeout_seconds
        while not task.done():
            await asyncio.wait({task}, timeout=_WATCH_SECONDS)
            if task.done():
                break
            if self._llm.errored or self.failure is not None:
                self._fail("one of its processes has ended")
            elif time.monotonic() > deadline:
                self._fail(f"it gave no answer within {timeout_seconds:.0f} s")
            if self.failure is not None:
                task.cancel()
                raise EngineDiedError(self.failure)
        if (error := task.exception()) is not None:
            self._fail(_reason(error))
            raise CallFailedError(self.failure) from error
        return task.result()

    # ------------------------------------------------------------------------------------------ responses

    def _begin(self, running: _Running) -> None:
        if self.failure is not None:
            return
        self._running[running.job.name] = running
        running.has_started = False
        running.token_ids, running.logprobs = [], []
        running.task = self._loop.create_task(self._generate(running))
        running.task.add_done_callback(self._generated)

    def _generated(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"a response failed: {_reason(error)}")

    async def _generate(self, running: _Running) -> None:
        job = running.job
        self._num_requests += 1  # vLLM wants another name each time
        request = f"{job.name}/{self._num_requests}"
        # With `keep`, blocks of older weights stay in the prefix cache: the salt keeps them apart.
        salt = f"update {self._num_updates}" if self.settings.running_cache == "keep" else None
        prompt = vllm_library.prompt([int(token) for token in job.prompt_ids], salt)
        parameters = vllm_library.sampling_parameters(running.rule, job.temperature, job.seed)
        part = None
        async for output in self._llm.generate(prompt, parameters, request):
            part = vllm_library.read_part(output)
            running.has_started = True
            running.token_ids += part.token_ids
            running.logprobs += part.logprobs
        if part is None or part.finish not in ("stop", "length") or len(running.token_ids) != len(running.logprobs):
            raise EngineDiedError(f"{job.name} ended as {part}")
        del self._running[job.name]
        spans = [(start, _version(name)) for start, name in part.versions or ()]
        self.results.put(
            Result(job.name, running.token_ids, running.logprobs, spans, part.finish == "length", part.stop_string)
        )

    async def _forget(self) -> None:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        self._running.clear()
        await _cancelled(tasks)

    # ------------------------------------------------------------------------------------------ weights

    async def _update(self, file: WeightFile, version: int) -> Update:
        timeout = self.settings.update_timeout_seconds
        text = file.weights.encode()
        refusals = await self._watched(self._llm.collective_rpc("zbgrpo_map", args=(file.path, text)), timeout)
        if refusal := next(filter(None, refusals), None):
            raise WeightSyncError(refusal)
        # From here on only success keeps the engine: the model may be half old, half new. So it is resumed after
        # success and killed after anything else, and never left standing.
        started = time.monotonic()
        await self._watched(self._llm.pause_generation(mode="keep", clear_cache=False), timeout)
        compare = self.settings.compare_digests or self.settings.tensor_parallel_size > 1
        digests = await self._watched(self._llm.collective_rpc("zbgrpo_load", args=(compare,)), timeout)
        if len(set(digests)) != 1:
            self._fail(f"its workers have read different weights: digests {digests}")
            raise EngineDiedError(self.failure)
        await self._watched(self._llm.update_weight_version(str(version)), timeout)
        self._num_updates += 1
        await self._renew_caches(timeout)
        await self._watched(self._llm.resume_generation(), timeout)
        return Update(time.monotonic() - started, digests if compare else [])

    async def _renew_caches(self, timeout_seconds: float) -> None:
        """While it is paused: nothing of the old weights for responses that have not started, see `running_cache`."""
        if self.settings.running_cache == "recompute":
            # Without the flag it does nothing, and says so, while anything is running.
            reset = self._llm.reset_prefix_cache(reset_running_requests=True)
            if not await self._watched(reset, timeout_seconds):
                self._fail("its prefix cache could not be reset")
                raise EngineDiedError(self.failure)
            return
        unstarted = [running for running in self._running.values() if not running.has_started]
        await _cancelled([running.task for running in unstarted if running.task is not None])
        for running in unstarted:
            self._begin(running)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CALL_SECONDS)


def _version(name: str) -> int:
    """vLLM calls the weights `default` until they have been given a version."""
    return int(name) if name.lstrip("-").isdigit() else -1


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
