"""Generation engines under test, how to drive them, and witnesses of what they should have sampled."""

from __future__ import annotations

import atexit
import copy
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support.models import BYTES, MODEL_VOCABULARY, log_softmax_of, tiny_tokenizer
from zbgrpo.config.schema import InferenceConfig
from zbgrpo.inference.base import GenerationRequest, InferenceBackend, Response
from zbgrpo.inference.sampling import stream
from zbgrpo.inference.transformers_backend import TransformersBackend
from zbgrpo.types import Uid

MAX_PROMPT_TOKENS = 200


@dataclass
class Setup:
    """What an engine is made of. The model is copied: the caller's stays the plain one."""

    model: Any
    tokenizer: Any = field(default_factory=tiny_tokenizer)
    slots: int = 6
    max_new_tokens: int = 24
    stop: Sequence[str] = ()
    top_k: int | None = None
    top_p: float = 1.0


def transformers_backend(setup: Setup) -> InferenceBackend:
    config = InferenceConfig(
        num_generations=1,
        inference_microbatch_size=setup.slots,
        max_new_tokens=setup.max_new_tokens,
        top_k=setup.top_k,
        top_p=setup.top_p,
    )
    model = copy.deepcopy(setup.model)
    return TransformersBackend(model, setup.tokenizer, config, setup.stop, MAX_PROMPT_TOKENS)


# ------------------------------------------------------------------------------------------------ vLLM

POOL: dict[Any, Any] = {}
"""Engines that are running, oldest first. Making one takes a quarter of a minute, and a new backend needs none of its
own: it gives its weights, limits and stop rules to one that fits."""

MOST_ENGINES = 2
POOL_SLOTS, POOL_TOKENS = 16, 512


def vllm_settings(model: Any, **changes: Any) -> Any:
    """Settings for an engine with this model's configuration, which goes into a folder of its own."""
    from zbgrpo.inference.vllm_settings import VllmSettings

    folder = tempfile.mkdtemp(prefix="zbgrpo-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    plain = copy.deepcopy(model.config)
    plain.architectures = [type(model).__name__]
    plain.save_pretrained(folder)
    # Beside a configuration, it would be taken for a tokenizer of the model's family, whose decoder is another.
    tokenizer = f"{folder}/tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    return VllmSettings(folder, tokenizer, dtype="float32", **changes)


def pooled_engine(settings: Any, size: Any, model_config: Any) -> Any:
    """An engine for the model's architecture, with nothing in work."""
    from zbgrpo.inference.vllm_engine import VllmEngine

    names = ("model_type", "num_hidden_layers", "tie_word_embeddings")
    fixed = (size.full_logprobs, settings.running_cache, settings.tensor_parallel_size)
    key = (*(getattr(model_config, name) for name in names), *fixed)
    engine = POOL.pop(key, None)
    if engine is not None and engine.failure is None:
        engine.cancel_all()
    else:
        while len(POOL) >= MOST_ENGINES:
            POOL.pop(next(iter(POOL))).close()
        size = size._replace(num_slots=POOL_SLOTS, max_tokens=POOL_TOKENS)
        engine = VllmEngine(settings, size, model_config)
    POOL[key] = engine
    return engine


@atexit.register
def close_engines() -> None:
    while POOL:
        POOL.popitem()[1].close()


def vllm_backend(setup: Setup, **changes: Any) -> InferenceBackend:
    from zbgrpo.inference.vllm_backend import VllmBackend

    config = InferenceConfig(
        num_generations=1,
        inference_microbatch_size=setup.slots,
        max_new_tokens=setup.max_new_tokens,
        top_k=setup.top_k,
        top_p=setup.top_p,
    )
    model, settings = copy.deepcopy(setup.model), vllm_settings(setup.model, **changes)
    return VllmBackend(model, setup.tokenizer, config, setup.stop, MAX_PROMPT_TOKENS, settings, pooled_engine)


STEPPING: dict[str, Callable[[Setup], InferenceBackend]] = {"transformers": transformers_backend}
"""Engines that decode one token of every response in each step, and draw it with `sampling.uniforms`."""

BACKENDS = dict(STEPPING)
"""All engines. vLLM where it is installed: it decodes in processes of its own, whenever it can, with its own draws."""
if importlib.util.find_spec("vllm") is not None:
    BACKENDS["vllm"] = vllm_backend


# ------------------------------------------------------------------------------------------------ models, requests


def no_end(model: Any) -> Any:
    """A copy that names an end token it cannot sample, so that responses run to the limit."""
    result = copy.deepcopy(model)
    ids = [MODEL_VOCABULARY + 5]
    result.config.eos_token_id = result.generation_config.eos_token_id = ids
    return result


class Endless:
    """The tokenizer without an end token of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = None

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def with_ends(model: Any, ids: list[int]) -> Any:
    result = copy.deepcopy(model)
    result.config.eos_token_id = ids[0]
    result.generation_config.eos_token_id = ids
    return result


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts. None ends inside a character, as no text does: vLLM would count the end of such a prompt
    to the text of the response when it looks for stop strings."""
    generator = np.random.default_rng(seed)
    halves = tiny_tokenizer().convert_tokens_to_ids(BYTES)
    prompts = [generator.integers(0, 60, n).tolist() for n in lengths]
    return [[*prompt[:-1], 20] if prompt[-1] in halves else prompt for prompt in prompts]


def request_of(key: int, prompt: Sequence[int], num: int = 1, temperature: float = 1.0) -> GenerationRequest:
    return GenerationRequest(key, prompt, [stream(3, "train", Uid(0, key), 0, n) for n in range(num)], temperature)


# ------------------------------------------------------------------------------------------------ driving


def run(
    backend: InferenceBackend, requests: Sequence[GenerationRequest], most_steps: int = 2000
) -> dict[Any, Response]:
    """Submit, step until all is done, and give the responses by (key, index); each exactly once."""
    for request in requests:
        backend.submit(request)
    return drain(backend, {}, most_steps)


def drain(backend: InferenceBackend, done: dict[Any, Response], most_steps: int = 2000) -> dict[Any, Response]:
    for _ in range(most_steps):
        if not backend.num_active and not backend.num_unstarted:
            return done
        take(backend, done)
    raise AssertionError(f"not done after {most_steps} steps")


def take(backend: InferenceBackend, done: dict[Any, Response]) -> list[Response]:
    finished = backend.step()
    for response in finished:
        name = (response.key, response.response_index)
        assert name not in done, f"response {name} came twice"
        done[name] = response
    return finished


def load(backend: InferenceBackend, model: Any, version: int) -> None:
    """Put another model's weights in place, as an apply does: the storage changes, the tensors stay."""
    weights = dict(model.named_parameters())
    live = backend.live_weights()
    assert set(live) == set(weights)
    for name, tensor in live.items():
        tensor.data = weights[name].detach().clone()
    backend.weights_changed(version)


# ------------------------------------------------------------------------------------------------ witnesses


def assert_logprobs(model: Any, prompt: Sequence[int], response: Response, temperature: float) -> None:
    with torch.no_grad():
        full = log_softmax_of(model, prompt, response.token_ids, temperature)
    expected = full[torch.arange(len(full)), torch.as_tensor(response.token_ids).long()]
    assert response.token_ids.dtype == np.int32 and response.logprobs.dtype == np.float32
    np.testing.assert_allclose(response.logprobs, expected.numpy(), atol=1e-4, rtol=0)


def drawn(log_softmax: torch.Tensor, draws: np.ndarray) -> list[int]:
    sums = log_softmax.double().exp().cumsum(-1).numpy()
    return [int(np.searchsorted(row, draw * row[-1], side="right")) for row, draw in zip(sums, draws, strict=True)]


def expected_stop(tokenizer: Any, tokens: list[int], stops: Sequence[str]) -> int | None:
    """Number of tokens up to the first at which the text has a stop string."""
    texts = (tokenizer.decode(tokens[:n]) for n in range(1, len(tokens) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(s in text for s in stops)), None)


def by_hand(models: dict[int, Any], prompt: Sequence[int], response: Response, temperature: float) -> torch.Tensor:
    """Log-softmax at every token, [L, V]: one token at a time, one kept cache, the weights of the token's version."""
    from transformers import DynamicCache

    starts = [start for start, _ in response.spans]
    places = np.searchsorted(starts, np.arange(len(response.token_ids)), side="right") - 1
    version_of = [response.spans[place][1] for place in places]
    cache, rows, ids = DynamicCache(), [], [int(t) for t in prompt]
    with torch.no_grad():
        for version, token in zip(version_of, response.token_ids.tolist(), strict=True):
            logits = models[version](input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
            rows.append(torch.log_softmax(logits[0, -1] / temperature, -1))
            ids = [token]
    return torch.stack(rows)
