"""Weights that change in a running engine: what it says afterwards is what the plain model with these weights says."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import (
    Endless,
    Setup,
    by_hand,
    drain,
    load,
    no_end,
    prompts_of,
    request_of,
    run,
    take,
    vllm_backend,
)
from tests.support.launching import run as launch
from tests.support.models import log_softmax_of, perturbed, tiny_tokenizer
from tests.support.models import tiny_model as tiny_model_of
from zbgrpo.errors import WeightSyncError
from zbgrpo.inference.base import Response
from zbgrpo.inference.vllm_weights import EngineWeights, WeightFile

tiny_model = partial(tiny_model_of, hidden_size=128)
TOLERANCE = 1e-3


def backend_of(model: Any, max_new_tokens: int = 24, slots: int = 8, **changes: Any) -> Any:
    setup = Setup(no_end(model), Endless(tiny_tokenizer()), slots=slots, max_new_tokens=max_new_tokens)
    backend = vllm_backend(setup, **changes)
    backend.weights_changed(0)
    return backend


def expected_logprobs(model: Any, prompt: list[int], response: Response, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        full = log_softmax_of(model, prompt, response.token_ids, temperature)
    return full[torch.arange(len(full)), torch.as_tensor(response.token_ids).long()].numpy()


def distance(model: Any, prompt: list[int], response: Response, temperature: float = 1.0) -> float:
    """Largest difference of a log-prob from that of the plain model."""
    return float(np.abs(response.logprobs - expected_logprobs(model, prompt, response, temperature)).max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("running_cache", ["keep", "recompute"])
def test_five_updates(tied: bool, running_cache: str) -> None:
    """Greedy, after each: a prompt that every version has had in its prefix cache, a new one, one that was running."""
    models = [tiny_model("qwen2", tied, seed=2)]
    backend = backend_of(models[0], running_cache=running_cache)
    cached, long = prompts_of([100, 70], seed=3)
    run(backend, [request_of(0, cached, 2, 0.0)])
    for version in range(1, 6):
        models.append(perturbed(models[-1], seed=version, scale=0.03))
        backend.submit(request_of(99, long, 1, 0.0))
        while backend.num_unstarted:
            backend.step()
        load(backend, models[version], version)
        fresh = prompts_of([50], seed=100 + version)[0]
        done = run(backend, [request_of(0, cached, 2, 0.0), request_of(1, fresh, 1, 0.0)])
        for name, prompt in [((0, 0), cached), ((0, 1), cached), ((1, 0), fresh)]:
            response = done[name]
            assert response.spans == [(0, version)]
            assert distance(models[version], prompt, response) < TOLERANCE
            assert distance(models[version - 1], prompt, response) > 10 * TOLERANCE
        assert done[99, 0].token_ids.shape == (24,)
    assert backend.stalled_seconds > 0


@pytest.mark.parametrize("running_cache", ["keep", "recompute"])
def test_each_side_of_a_span_is_of_its_own_version(running_cache: str) -> None:
    models = {0: no_end(tiny_model("qwen2", tied=True, seed=2))}
    models |= {version: perturbed(models[0], seed=version, scale=0.05) for version in (1, 2)}
    prompts = prompts_of([40, 9, 65])
    backend, done = backend_of(models[0], max_new_tokens=150, running_cache=running_cache), {}
    for key, prompt in enumerate(prompts):
        backend.submit(request_of(key, prompt, 2, 0.8))
    for version in (1, 2):
        take(backend, done)
        take(backend, done)
        load(backend, models[version], version)
    drain(backend, done)
    assert len(done) == 6 and all(len(r.token_ids) == 150 for r in done.values()), "an update gave up a response"
    assert sum(len(r.spans) > 1 for r in done.values()) >= 4
    for (key, _), response in done.items():
        ends = [start for start, _ in response.spans[1:]] + [150]
        for (start, version), end in zip(response.spans, ends, strict=True):
            part = slice(start, end)
            exact = {
                v: expected_logprobs(models[v], prompts[key], response, 0.8)[part] - response.logprobs[part]
                for v in models
            }
            if running_cache == "recompute":
                assert np.abs(exact[version]).max() < TOLERANCE
            if end - start > 5:
                assert min(np.abs(exact[v]).max() for v in models if v != version) > 10 * TOLERANCE
        if running_cache == "keep":  # the tokens before were computed by the weights of their time
            full = by_hand(models, prompts[key], response, 0.8)
            expected = full[torch.arange(150), torch.as_tensor(response.token_ids).long()].numpy()
            assert np.abs(response.logprobs - expected).max() < TOLERANCE


def test_first_ratio_at_another_temperature_is_one() -> None:
    model = tiny_model("qwen2", tied=True, seed=7)
    backend = backend_of(model)
    prompts = prompts_of([12, 33])
    for (key, _), response in run(backend, [request_of(k, p, 4, 0.7) for k, p in enumerate(prompts)]).items():
        ratio = np.exp(expected_logprobs(model, prompts[key], response, 0.7) - response.logprobs)
        np.testing.assert_allclose(ratio, 1.0, atol=1e-2)


def test_a_restarted_group_shares_nothing_with_old_weights() -> None:
    """More responses than slots: those that start after the update prefill their prompt again."""
    models = [tiny_model("qwen2", tied=True, seed=1)]
    models.append(perturbed(models[0], seed=1, scale=0.05))
    prompt = prompts_of([96])[0]
    backend, done = backend_of(models[0], slots=2), {}
    backend.submit(request_of(0, prompt, 6))
    take(backend, done)
    load(backend, models[1], 1)
    drain(backend, done)
    late = [r for r in done.values() if r.spans == [(0, 1)]]
    assert len(late) >= 2
    assert all(distance(models[1], prompt, response) < TOLERANCE for response in late)


def test_responses_that_wait_in_the_engine_at_an_update_begin_again() -> None:
    """More prompts than one batch takes. Behind them come some of them again, which the prefix cache knows: of what the
    old weights made of them, nothing may be used."""
    models = {0: no_end(tiny_model("qwen2", tied=True, seed=1))}
    models[1] = perturbed(models[0], seed=1, scale=0.05)
    prompts = prompts_of([200] * 12, seed=8)
    prompts += prompts[:4]
    backend = backend_of(models[0], slots=16)
    for key, prompt in enumerate(prompts):
        backend.submit(request_of(key, prompt))
    backend._fill()
    load(backend, models[1], 1)
    done = drain(backend, {})
    assert len(done) == 16 and backend.take_lost() == []
    for (key, _), response in done.items():
        full = by_hand(models, prompts[key], response, 1.0)
        expected = full[torch.arange(24), torch.as_tensor(response.token_ids).long()].numpy()
        assert np.abs(response.logprobs - expected).max() < TOLERANCE


def test_a_seeded_prompt_longer_than_what_is_left_of_a_batch() -> None:
    """vLLM on a CPU dies of half a prompt with a seed."""
    model = tiny_model("qwen2", tied=True)
    backend = backend_of(model, slots=16)
    prompts = prompts_of([190] * 16, seed=4)
    done = run(backend, [request_of(key, prompt) for key, prompt in enumerate(prompts)])
    assert len(done) == 16 and backend.take_lost() == []
    assert all(distance(model, prompts[key], response) < TOLERANCE for (key, _), response in done.items())


# ------------------------------------------------------------------------------------------------ refusals


def assert_as_before(backend: Any, model: Any, version: int) -> None:
    prompt = prompts_of([20])[0]
    response = run(backend, [request_of(5, prompt)])[5, 0]
    assert response.spans == [(0, version)] and distance(model, prompt, response) < TOLERANCE


def test_a_misshapen_tensor_is_refused_before_anything_has_changed() -> None:
    model = tiny_model("qwen2", tied=True)
    backend = backend_of(model)
    name = "model.layers.1.mlp.up_proj.weight"
    live = backend.live_weights()
    before = {n: t.detach().clone() for n, t in live.items()}
    for tensor in live.values():
        tensor.data = torch.zeros_like(tensor)
    for wrong in (before[name].t().contiguous(), before[name].half()):
        live[name].data = wrong
        with pytest.raises(WeightSyncError, match=name):
            backend.weights_changed(1)
        assert_as_before(backend, model, 0)
    for n, tensor in live.items():
        tensor.data = before[n]
    backend.weights_changed(1)
    assert_as_before(backend, model, 1)


def test_a_missing_or_unknown_tensor_is_refused() -> None:
    model = tiny_model("qwen2", tied=True)
    weights = EngineWeights.of(dict(model.named_parameters()))
    tensors = dict(model.named_parameters())
    lost = tensors.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"missing \['model.norm.weight'\]"):
        WeightFile(weights, tensors)
    with pytest.raises(WeightSyncError, match=r"not known \['extra'\]"):
        WeightFile(weights, tensors | {"model.norm.weight": lost, "extra": lost})


def test_workers_refuse_a_file_that_does_not_fit() -> None:
    model = tiny_model("qwen2", tied=True)
    backend = backend_of(model)
    weights = EngineWeights.of(dict(model.named_parameters()))
    with WeightFile(weights, dict(model.named_parameters())) as file:
        file.weights = EngineWeights.of(dict(perturbed(model, 1).named_parameters()) | {"more": torch.zeros(3)})
        with pytest.raises(WeightSyncError, match="bytes are there"):
            backend._engine.update(file, 1)
    assert backend._engine.failure is None
    assert_as_before(backend, model, 0)


def test_weights_that_do_not_reach_the_whole_model_are_an_error() -> None:
    """Left out on our side too, so that only the worker can notice: the model is broken then, and the engine dies."""
    model = tiny_model("qwen2", tied=False, num_layers=1)
    backend = backend_of(model)
    process = backend.engine_processes[0]
    partial_model = dict(model.named_parameters())
    del partial_model["lm_head.weight"]
    backend._weights, backend._live = EngineWeights.of(partial_model), partial_model
    backend._has_loaded = False
    with pytest.raises(WeightSyncError, match=r"lm_head"):
        backend.weights_changed(1)
    backend.close()
    assert not os.path.exists(f"/proc/{process}")


def test_log_probs_that_cannot_be_had_are_refused_in_one_line(tmp_path: Path) -> None:
    finished = launch(tmp_path, 2, "-b vllm -temp 0.7 -topp 0.9")
    assert finished.status != 0 and finished.first_line.startswith("zbgrpo: -topp/--top-p: at another temperature")
