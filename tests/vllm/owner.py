"""A rank with an engine, for tests that kill it: says the engine's processes, then generates until it is killed."""

from __future__ import annotations

import sys

READY = "the engine is ready:"


def main(running_cache: str) -> None:
    from tests.support.engines import MAX_PROMPT_TOKENS, Endless, no_end, prompts_of, request_of, vllm_settings
    from tests.support.models import tiny_model, tiny_tokenizer
    from zbgrpo.config.schema import InferenceConfig
    from zbgrpo.inference.vllm_backend import VllmBackend

    model = no_end(tiny_model("qwen2", hidden_size=128))
    config = InferenceConfig(num_generations=2, inference_microbatch_size=2, max_new_tokens=250)
    settings = vllm_settings(model, running_cache=running_cache)
    backend = VllmBackend(model, Endless(tiny_tokenizer()), config, (), MAX_PROMPT_TOKENS, settings)
    backend.weights_changed(0)
    print(READY, backend._engine._owner.folder, *backend.engine_processes, flush=True)
    key = 0
    while True:
        if backend.num_unstarted < 4:
            backend.submit(request_of(key, prompts_of([5], seed=key)[0], 2))
            key += 1
        backend.step()


if __name__ == "__main__":
    main(sys.argv[1])
