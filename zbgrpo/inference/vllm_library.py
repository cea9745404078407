"""Everything that is used of vLLM, so that another release of it changes this file alone. Written for 0.32.

The upper part runs in the rank, `load_weights` in the workers of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from zbgrpo.errors import ModelError, WeightSyncError
from zbgrpo.inference.vllm_settings import SamplingRule
from zbgrpo.topology.env import changed_environment

VERSION = "0.32"


class Part(NamedTuple):
    """Some tokens of one response, in order; the last part says how it ended."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, str]] | None
    """(first token, version of the weights) over the whole response; in the last part only."""
    finish: str | None
    """`stop`, `length`, or what else vLLM says; None while it goes on."""
    stop_string: bool


def create_engine(arguments: dict[str, Any]) -> Any:
    """Start the processes of an engine and wait for them; many seconds. Raises whatever vLLM raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def require_vllm() -> None:
    """Raise `ModelError` where vLLM is not installed."""
    try:
        with changed_environment({}):  # its import sets variables of this process
            import vllm  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"-b vllm: vLLM cannot be loaded ({error}); launch/README.md says how to install it"
        ) from error


def sampling_parameters(rule: SamplingRule, temperature: float, seed: int) -> Any:
    """Of one response, whose random numbers follow from the seed (64 bits, unsigned) alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        seed=seed,
        temperature=temperature,
        top_k=rule.top_k or 0,
        top_p=rule.top_p,
        max_tokens=rule.max_new_tokens,
        stop=[s for s in rule.stop if s],
        include_stop_str_in_output=True,
        # All end ids are told here, so vLLM need not look for others.
        stop_token_ids=list(rule.end_ids),
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,  # of the sampled token
        flat_logprobs=True,
        # The first token and then the rest: it is told when a response has started, and nothing else on the way.
        output_kind=RequestOutputKind.DELTA,
        stream_interval=rule.max_new_tokens + 1,
    )


def prompt(token_ids: list[int], cache_salt: str | None) -> Any:
    """A prompt whose keys and values are shared with prompts of the same salt only."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(token_ids, cache_salt=cache_salt)


def read_part(output: Any) -> Part:
    """Of what `generate` yields."""
    found = output.outputs[0]
    versions = found.weight_versions
    return Part(
        list(found.token_ids),
        list(found.logprobs.logprobs),
        None if versions is None else [(span.start, span.version) for span in versions],
        found.finish_reason,
        isinstance(found.stop_reason, str),
    )


def load_weights(model: Any, vllm_config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors with Hugging Face names into a worker's model, in place. Raises `WeightSyncError` for parameters
    that none of them reached; by then others have changed."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    expected = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(vllm_config):
        # Parameters are in the layout that the kernels want; this takes each layer through its loading again.
        initialize_layerwise_reload(model)
        loaded = model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, vllm_config.model_config)
        _repack_tied_heads(model)
    if loaded is not None and (missing := sorted(expected - set(loaded))):
        raise WeightSyncError(f"new weights did not reach {missing[:5]} of the engine's model")


def _repack_tied_heads(model: Any) -> None:
    """A head that shares its matrix with the embedding has no weights of its own to load, but on a CPU it keeps a
    packed copy of them, which the reload leaves as it is."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    heads = [module for module in modules if isinstance(module, ParallelLMHead)]
    embeddings = {id(m.weight) for m in modules if isinstance(m, VocabParallelEmbedding) and m not in heads}
    for head in heads:
        if id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)
