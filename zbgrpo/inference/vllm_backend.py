"""The `vllm` engine: one vLLM request for each response, in an engine of its own processes.

    submit -> waiting -> at most `num_slots` responses in the engine -> each leaves as soon as it has finished

New weights are put into the running engine between two tokens; no response is given up for them, and each token knows
its version. What happens to the cache of running responses is `VllmSettings.running_cache`.

An engine that dies takes with it the requests of which it had a response in work: `take_lost` names them. Another one
is made meanwhile, with the same weights; requests of which nothing had started wait for it.
"""

from __future__ import annotations

import logging
import math
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from zbgrpo.config.schema import InferenceConfig
from zbgrpo.errors import InfrastructureError, ModelError, ResourceError, WeightSyncError
from zbgrpo.inference import vllm_library
from zbgrpo.inference.base import GenerationRequest, Response
from zbgrpo.inference.stopping import model_end_ids
from zbgrpo.inference.vllm_engine import CallFailedError, EngineDiedError, Job, Result, Update, VllmEngine
from zbgrpo.inference.vllm_settings import EngineSize, SamplingRule, VllmSettings
from zbgrpo.inference.vllm_weights import EngineWeights, WeightFile
from zbgrpo.types import FinishReason
from zbgrpo.weights.manifest import named_weights

logger = logging.getLogger(__name__)

_STEP_SECONDS = 0.02

MakeEngine = Callable[[VllmSettings, EngineSize, Any], VllmEngine]


@dataclass
class _Group:
    request: GenerationRequest
    started: int = 0


class VllmBackend:
    """See the module's text and `InferenceBackend`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: InferenceConfig,
        stop: Sequence[str],
        max_prompt_tokens: int,
        settings: VllmSettings,
        make_engine: MakeEngine = VllmEngine,
    ) -> None:
        """Start the engine and wait for it.

        Of the model only the tensors and the configuration are kept. Raises `ModelError` when vLLM is not installed or
        cannot start with this model.
        """
        vllm_library.require_vllm()
        self._settings, self._make_engine = settings, make_engine
        self._live = dict(named_weights(model))
        self._weights = EngineWeights.of(self._live)
        self._model_config = model.config
        self._end_ids = {i for i in model_end_ids(model, tokenizer) if i < model.config.get_text_config().vocab_size}
        self._rule = SamplingRule(config.max_new_tokens, config.top_k, config.top_p, stop, sorted(self._end_ids))
        self._num_slots = config.inference_microbatch_size * config.num_generations
        truncated = config.top_k is not None or config.top_p < 1
        self._size = EngineSize(self._num_slots, max_prompt_tokens + config.max_new_tokens, truncated)
        self._waiting: deque[_Group] = deque()
        self._active: dict[str, tuple[GenerationRequest, int]] = {}  # by name of the job
        self._lost: list[int] = []
        self._version: int | None = None
        self._num_jobs = 0
        self._restarts = 0  # in a row
        self.stalled_seconds = 0.0
        """How long the engine has stood still for new weights, all updates together."""
        self.last_update: Update | None = None
        self._serving, self._has_loaded = False, False
        self._engine = make_engine(settings, self._size, self._model_config)
        self._wait_for_first_start()

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_unstarted(self) -> int:
        return sum(len(group.request.streams) - group.started for group in self._waiting)

    @property
    def engine_processes(self) -> list[int]:
        """Process ids of the engine core and the workers; empty while another engine is starting."""
        return list(self._engine.processes) if self._serving and self._engine.failure is None else []

    def submit(self, request: GenerationRequest) -> None:
        if len(request.streams) == 0:
            raise ValueError(f"request {request.key} asks for no response: its streams are empty")
        self._waiting.append(_Group(request))

    def step(self) -> list[Response]:
        """Start what fits and take what has finished, waiting for it 20 ms at most."""
        if not self._is_ready():
            return []
        self._fill()
        responses: list[Response] = []
        timeout = _STEP_SECONDS if self._active else 0.0
        try:
            while True:
                responses.append(self._response(self._engine.results.get(timeout=timeout)))
                timeout = 0.0
        except queue.Empty:
            pass
        if self._engine.failure is not None:
            self._replace_engine(self._engine.failure)
        else:
            self._fill()
        return responses

    def take_lost(self) -> list[int]:
        """Keys of requests given up since the last call, because the engine died while it had some of their responses:
        nothing more comes of them."""
        lost, self._lost = self._lost, []
        return lost

    def live_weights(self) -> Mapping[str, Tensor]:
        return dict(self._live)

    def weights_changed(self, version: int) -> list[str]:
        """As `InferenceBackend`. Returns when the engine generates with them, or has died of it and is replaced.

        Raises `WeightSyncError`, which names the tensor, when the live tensors are not those of the model in their
        shapes and dtypes; then nothing has changed.
        """
        self._weights.check(self._live)
        self._version = version
        if self._serving:
            self._load_weights()
        return self.last_update.digests if self._serving and self.last_update is not None else []

    def close(self) -> None:
        self._waiting.clear()
        self._active.clear()
        self._serving = False
        self._engine.close()

    # ------------------------------------------------------------------------------------------ responses

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._num_slots:
            group = self._waiting[0]
            request, index = group.request, group.started
            name = f"{request.key}-{index}-{self._num_jobs}"
            self._num_jobs += 1
            self._active[name] = (request, index)
            job = Job(name, request.prompt_ids, int(request.streams[index]), request.temperature)
            rule = self._rule
            if request.max_new_tokens is not None:
                rule = rule._replace(max_new_tokens=min(rule.max_new_tokens, request.max_new_tokens[index]))
            self._engine.submit(job, rule)
            group.started += 1
            if group.started == len(request.streams):
                self._waiting.popleft()

    def _response(self, result: Result) -> Response:
        request, index = self._active.pop(result.name)
        self._restarts = 0
        if result.token_ids[-1] in self._end_ids:
            finish = FinishReason.END_TOKEN
        elif result.has_stop_string:
            finish = FinishReason.STOP_STRING
        else:
            finish = FinishReason.LENGTH
        logprobs = np.array(result.logprobs, np.float32)
        if self._size.full_logprobs and request.temperature not in (0.0, 1.0):
            logprobs[:] = math.nan  # they would be of temperature 1
        return Response(request.key, index, np.array(result.token_ids, np.int32), logprobs, result.spans, finish)

    # ------------------------------------------------------------------------------------------ weights

    def _load_weights(self) -> None:
        assert self._version is not None
        try:
            with WeightFile(self._weights, self._live) as file:
                self.last_update = self._engine.update(file, self._version)
        except CallFailedError as error:
            if not self._has_loaded:  # it will not be otherwise with the next engine
                raise WeightSyncError(f"the vLLM engine cannot take the weights of this model: {error}") from error
            self._replace_engine(str(error))
            return
        except EngineDiedError as error:
            self._replace_engine(str(error))
            return
        self._has_loaded = True
        self.stalled_seconds += self.last_update.stalled_seconds
        logger.info("version %d: the engine stood still for %.3f s", self._version, self.last_update.stalled_seconds)

    # ------------------------------------------------------------------------------------------ life and death

    def _wait_for_first_start(self) -> None:
        if not self._engine.wait_started(self._settings.start_timeout_seconds):
            self._engine.close()
            raise ResourceError(f"the vLLM engine did not start within {self._settings.start_timeout_seconds:.0f} s")
        if self._engine.failure is not None:
            raise ModelError(f"model {self._settings.model_path}: the vLLM engine: {self._engine.failure}")
        self._serving = True

    def _is_ready(self) -> bool:
        """Whether there is an engine that serves with the newest weights; takes a new one into service."""
        if self._version is None:
            return False
        if not self._serving:
            if not self._engine.wait_started(_STEP_SECONDS):
                return False
            if self._engine.failure is not None:
                self._replace_engine(self._engine.failure)
                return False
            self._serving = True
            self._load_weights()
        return self._serving

    def _replace_engine(self, reason: str) -> None:
        """Give up what the engine had in work and begin to start another."""
        self._restarts += 1
        if self._restarts > self._settings.max_restarts:
            raise InfrastructureError(f"the vLLM engine has died {self._restarts} times in a row; at last: {reason}")
        lost = sorted({request.key for request, _ in self._active.values()})
        logger.warning("the vLLM engine has died (%s); %d prompts are lost, starting another", reason, len(lost))
        self._active.clear()
        self._waiting = deque(group for group in self._waiting if group.request.key not in lost)
        self._lost += lost
        self._serving = False
        self._engine.close()
        self._engine = self._make_engine(self._settings, self._size, self._model_config)
