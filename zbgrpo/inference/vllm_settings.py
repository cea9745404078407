"""What a vLLM engine is made of, as values; nothing here loads vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

_CPU_BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes: a prompt is shared in whole blocks only
_CPU_CACHE_BYTES = 4 << 30
_CPU_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class VllmSettings:
    """Everything that is fixed when an engine is made, without what `EngineSize` adds for one backend."""

    model_path: str
    """Folder or hub name. Only its configuration is read: the weights are always those of the run."""
    tokenizer_path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    on_cpu: bool = True
    tensor_parallel_size: int = 1
    """Workers that one engine is spread over, all on this node."""
    cores: Sequence[int] = ()
    """CPU only: the cores that the workers divide among them, one thread on each; all that the process may use when
    empty. An engine that takes more than its share slows those who train down, for its threads wait by spinning."""
    gpu_memory_utilization: float = 0.7
    """Part of a GPU's memory that vLLM may take; not used on a CPU."""
    kv_cache_bytes: int | None = None
    """Memory of each worker for keys and values. None: what gpu_memory_utilization leaves; on a CPU, what all slots
    can use at once, but at most 4 GiB."""
    enable_chunked_prefill: bool = True
    """Prompts may be computed in parts. Never on a CPU: vLLM 0.32 dies there of a part of a prompt whose request has a
    seed (it rewinds the generator by an offset that CPU generators do not have)."""
    enforce_eager: bool | None = None
    """Without compilation and graphs. None: on a CPU only, where compiling takes longer than it saves."""
    running_cache: Literal["keep", "recompute"] = "keep"
    """What happens to the keys and values of responses that are being decoded when weights change. keep: they stay, as
    in the transformers engine, and an update costs nothing but its own time. recompute: they are computed again by the
    new weights, so the next token is exactly what the new weights say, at the price of one prefill of all that is
    running. Responses that have not started never use anything of older weights."""
    compare_digests: bool = False
    """After each update every worker computes the digest of the weights that it read, which takes time; it is always
    done for more than one worker, and their digests must be equal."""
    start_timeout_seconds: float = 900.0
    update_timeout_seconds: float = 300.0
    max_restarts: int = 3
    """How often in a row, without a response finished in between, an engine that died is made again."""


class EngineSize(NamedTuple):
    """What one engine has to hold."""

    num_slots: int
    max_tokens: int
    """Prompt and response together."""
    full_logprobs: bool
    """Sampling is truncated by top-k or top-p: log-probs are taken before the truncation, and before the temperature
    too, so they are right for temperature 1 only."""


class SamplingRule(NamedTuple):
    """What holds for all responses of one backend."""

    max_new_tokens: int
    top_k: int | None
    top_p: float
    stop: Sequence[str]
    end_ids: Sequence[int]


def engine_arguments(settings: VllmSettings, size: EngineSize, model_config: Any) -> dict[str, Any]:
    """Keyword arguments of vLLM's engine. `model_config`: the Hugging Face configuration, for the size of a token's
    keys and values."""
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "tokenizer": settings.tokenizer_path,
        "dtype": settings.dtype,
        "load_format": "dummy",  # what the files say would be replaced before the first token anyway
        "generation_config": "vllm",  # not the model's: it would add top-k, penalties and more
        "max_model_len": size.max_tokens,
        "max_num_seqs": size.num_slots,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "zbgrpo.inference.vllm_worker.WorkerExtension",
        "enforce_eager": settings.on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "enable_chunked_prefill": settings.enable_chunked_prefill and not settings.on_cpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs" if size.full_logprobs else "processed_logprobs",
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "disable_log_stats": True,
    }
    cache_bytes = settings.kv_cache_bytes
    if settings.on_cpu:
        arguments["block_size"] = _CPU_BLOCK_TOKENS
        arguments["max_num_batched_tokens"] = max(_CPU_BATCH_TOKENS, size.max_tokens)  # whole prompts must fit
        if cache_bytes is None:
            cache_bytes = min(_CPU_CACHE_BYTES, _cache_bytes(settings, size, model_config))
    if cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    return arguments


def engine_environment(settings: VllmSettings, cores: Sequence[int], folder: str) -> dict[str, str]:
    """Variables for the processes of an engine. `cores`: those that they may run on, for the workers of a CPU;
    `folder`: for their sockets."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # the terminal is that of the run
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": folder,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads and perhaps a CUDA context
        "PYTHONWARNINGS": "ignore",
    }
    if settings.on_cpu:
        variables["TORCHDYNAMO_DISABLE"] = "1"  # the first log-probs would compile for a quarter of a minute
        variables["VLLM_CPU_OMP_THREADS_BIND"] = _thread_binding(
            settings.cores or cores, settings.tensor_parallel_size, bool(settings.cores)
        )
    return variables


def _thread_binding(cores: Sequence[int], num_workers: int, are_given: bool) -> str:
    """Cores of each worker: `0,1|2,3`. One worker that may use all of them finds its own."""
    each = len(cores) // num_workers
    if each == 0 or (num_workers == 1 and not are_given):
        return "auto" if num_workers == 1 else "nobind"
    return "|".join(",".join(map(str, cores[n * each : (n + 1) * each])) for n in range(num_workers))


def _cache_bytes(settings: VllmSettings, size: EngineSize, model_config: Any) -> int:
    """Keys and values of all slots at full length, on one worker, with a block to spare for each."""
    config = model_config.get_text_config()
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    num_kv_heads = -(-num_kv_heads // settings.tensor_parallel_size)
    token_bytes = 2 * config.num_hidden_layers * num_kv_heads * head_size * (4 if settings.dtype == "float32" else 2)
    blocks = -(-size.max_tokens // _CPU_BLOCK_TOKENS) + 1
    return token_bytes * _CPU_BLOCK_TOKENS * (blocks * size.num_slots + 1)
