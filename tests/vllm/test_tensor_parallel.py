"""One engine over two workers: each gets all weights and takes its part."""

from __future__ import annotations

from functools import partial

from tests.support.engines import Endless, Setup, assert_logprobs, load, no_end, prompts_of, request_of, run
from tests.support.engines import vllm_backend as vllm_backend_of
from tests.support.models import perturbed, tiny_model, tiny_tokenizer
from zbgrpo.weights.manifest import digest

vllm_backend = partial(vllm_backend_of, tensor_parallel_size=2)


def test_two_workers_say_what_the_plain_model_says() -> None:
    model = no_end(tiny_model("qwen2", num_layers=3, hidden_size=128))
    backend = vllm_backend(Setup(model, Endless(tiny_tokenizer())))
    backend.weights_changed(0)
    assert len(backend.engine_processes) == 3, "the engine core and two workers"
    prompts = prompts_of([6, 70])
    for version in (0, 1, 2):
        assert backend.last_update.digests == [digest(dict(model.named_parameters()))] * 2
        for (key, _), response in run(backend, [request_of(k, p, 2, 0.9) for k, p in enumerate(prompts)]).items():
            assert_logprobs(model, prompts[key], response, 0.9)
            assert response.spans == [(0, version)]
        model = perturbed(model, seed=version, scale=0.05)
        load(backend, model, version + 1)
