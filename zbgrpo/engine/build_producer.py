"""A producer rank from configuration to the end of its loop."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbgrpo import failpoints
from zbgrpo.checkpoint.model_folder import load_model, load_tokenizer
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine import startup
from zbgrpo.engine.common import (
    DRAIN_SECONDS,
    connect_to_hub,
    device_of,
    dtype_of,
    gather_nodes,
    log_start,
    make_profiler,
    say_hello,
)
from zbgrpo.engine.follower import run_follower, tell_end
from zbgrpo.engine.inputs import load_data, load_evaluation, make_renderer
from zbgrpo.engine.producer import Producer
from zbgrpo.engine.rank import Rank
from zbgrpo.engine.work import PromptSource
from zbgrpo.groups.process_groups import connect, disconnect, make_groups
from zbgrpo.inference.base import InferenceBackend
from zbgrpo.observe.events import EventLog
from zbgrpo.observe.logs import setup_rank_logging
from zbgrpo.observe.profiling import MAX_DECODE_STEPS
from zbgrpo.observe.timeledger import STARTUP, TimeLedger
from zbgrpo.rewards.messages import CODE_TYPE, RewardSpec
from zbgrpo.rewards.pool import RewardPool
from zbgrpo.rewards.prompts import default_stop_strings
from zbgrpo.topology.env import usable_cores
from zbgrpo.topology.roles import cores_of_ranks, threads_per_rank
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Received
from zbgrpo.weights.manifest import WeightManifest
from zbgrpo.weights.staged import StagedSubscriber, stage_manifests
from zbgrpo.weights.subscriber import WeightSubscriber

logger = logging.getLogger(__name__)


def run_producer(rank: Rank) -> str:
    """Start, generate, end. Returns why the run ended."""
    if rank.info.tp_index > 0:
        return run_follower(rank)
    ledger = rank.time = TimeLedger(started=rank.started, on_span=rank.trace.on_span)
    with ledger.phase(STARTUP):
        producer, store = _start(rank, ledger)
    reason = producer.run()
    failpoints.fire("shutdown.producer")
    producer.profiler.close()
    producer.pool.close()  # its workers also end by themselves when this process does, however it does
    producer.subscriber.close()
    producer.backend.close()
    producer.channel.close(DRAIN_SECONDS)
    producer.events.close()
    tell_end(store, rank, reason)
    disconnect()
    return reason


def _start(rank: Rank, ledger: TimeLedger) -> tuple[Producer, Any]:
    """Everything up to the point where all ranks are ready."""
    config, env = rank.config, rank.env
    store = connect(env, config)
    failpoints.fire("init.world")
    nodes = gather_nodes(store, rank)
    document = startup.receive(store)
    log_dir = Path(document.log_dir)
    setup_rank_logging(log_dir, env.rank, f"producer {rank.info.index}")
    events = EventLog(log_dir / "events" / f"rank-{env.rank}.jsonl")
    # No version is announced before everybody has said hello, so the subscriber made below is in time.
    channel = connect_to_hub(
        rank, document, lambda new: new.deliver(m.WeightsStart, lambda received: _expect(subscriber, received))
    )
    pool = RewardPool(RewardSpec.of(config.reward), config.reward.num_workers)  # its workers load beside all of this
    groups = make_groups(store, rank.topology, config)
    device, dtype = device_of(rank), dtype_of(config)
    log_start(rank, device)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    model = load_model(config.model.path, dtype, device)
    sent = [WeightManifest.decode(store.get(f"manifest/{stage}")) for stage in range(rank.topology.pp_size)]
    whole = WeightManifest.of(model, dtype, config.weights.bucket_bytes)
    manifests = stage_manifests(whole.specs, sent, config.weights.bucket_bytes)
    _tell_isolation(pool, config, events)
    backend = _build_backend(rank, model, tokenizer)
    failpoints.fire("init.model")
    live = backend.live_weights()

    def subscribe(stage: int, manifest: WeightManifest) -> WeightSubscriber:
        return WeightSubscriber(
            groups.weights[stage],
            rank.topology.source_rank(stage),
            manifest,
            {spec.name: live[spec.name] for spec in manifest.specs},
            device=device,
            handles=store.get(f"staging/{stage}") if groups.weights_transport == "ipc" else None,
            on_applied=lambda version, digest: events.append(
                "live_digest", version=version, digest=digest, stage=stage
            ),
        )

    subscriber = StagedSubscriber([subscribe(stage, manifest) for stage, manifest in enumerate(manifests)])
    say_hello(channel, rank, nodes[env.rank])
    failpoints.fire("init.ready")
    dist.barrier()
    rank.stop.install()
    producer = Producer(
        config,
        backend=backend,
        pool=pool,
        prompts=_prompt_source(rank, tokenizer, document.usable),
        channel=channel,
        subscriber=subscriber,
        ledger=ledger,
        profiler=make_profiler(rank, document.log_dir, MAX_DECODE_STEPS),
        trace=rank.trace,
        events=events,
        stop_requested=rank.stop.requested,
    )
    return producer, store


def _tell_isolation(pool: RewardPool, config: RunConfig, events: EventLog) -> None:
    """Code is run by nobody before it is known, and written down, what keeps it in. Raises `ConfigError` if that is
    less than was asked for."""
    if config.reward.type != CODE_TYPE:
        return
    isolation = pool.wait_for_isolation(config.cluster.timeout_seconds)
    logger.info("programs of responses run with %s", isolation.describe())
    if isolation.level < config.reward.min_isolation:
        text = "reward.allow_unsafe_code is on: programs of responses may reach this machine"
        logger.warning(text)
        print(f"zbgrpo: {text}; {isolation.describe()}", file=sys.stderr, flush=True)
    events.append("sandbox", level=isolation.level, mechanisms=isolation.mechanisms)


def _expect(subscriber: StagedSubscriber, received: Received) -> None:
    message = received.message
    assert isinstance(message, m.WeightsStart)
    subscriber.expect(message.stage, message.version, message.hold)


def _build_backend(rank: Rank, model: Any, tokenizer: Any) -> InferenceBackend:
    config = rank.config
    stop = config.inference.stop
    if stop is None:
        stop = default_stop_strings(config.reward.type)
    if config.inference.backend == "vllm":
        from zbgrpo.inference.vllm_backend import VllmBackend
        from zbgrpo.inference.vllm_settings import VllmSettings

        vllm = config.vllm
        settings = VllmSettings(
            config.model.path,
            config.model.tokenizer_path or config.model.path,
            dtype="bfloat16" if config.trainer.precision == "bf16" else "float32",
            on_cpu=device_of(rank).type == "cpu",
            tensor_parallel_size=rank.topology.producer_tp_size,
            cores=_engine_cores(rank),
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_cache_bytes=vllm.kv_cache_bytes,
            enable_chunked_prefill=vllm.enable_chunked_prefill,
            enforce_eager=vllm.enforce_eager,
            running_cache=vllm.running_cache,
            compare_digests=vllm.compare_digests,
            start_timeout_seconds=vllm.start_timeout_seconds,
            update_timeout_seconds=vllm.update_timeout_seconds,
            max_restarts=vllm.max_restarts,
        )
        return VllmBackend(model, tokenizer, config.inference, stop, config.data.max_prompt_tokens, settings)
    from zbgrpo.inference.transformers_backend import TransformersBackend

    return TransformersBackend(model, tokenizer, config.inference, stop, config.data.max_prompt_tokens)


def _engine_cores(rank: Rank) -> list[int]:
    """The shares of a producer's ranks; these wait for the engine and need none themselves."""
    cores, env = usable_cores(), rank.env
    threads = threads_per_rank(len(cores), env.local_world_size, rank.config.cluster.threads_per_rank)
    return cores_of_ranks(cores, env.local_rank, rank.topology.producer_tp_size, threads)


def _prompt_source(rank: Rank, tokenizer: Any, usable: list[int]) -> PromptSource:
    config = rank.config
    renderer = make_renderer(config, tokenizer)

    def decode(token_ids: list[int]) -> str:
        # Special tokens go, so that an end token is not part of the answer; stop strings are ordinary text and stay.
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    return PromptSource(load_data(config), usable, renderer.render, decode, load_evaluation(config, renderer))
