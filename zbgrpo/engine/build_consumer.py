"""A consumer rank from configuration to the end of its loop."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbgrpo import failpoints
from zbgrpo.algorithms.temperature import TemperatureSchedule
from zbgrpo.checkpoint.model_folder import load_tokenizer
from zbgrpo.config.load import to_tree
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine import startup
from zbgrpo.engine.build_trainer import build_trainer
from zbgrpo.engine.common import (
    DRAIN_SECONDS,
    connect_to_hub,
    device_of,
    gather_nodes,
    log_start,
    make_channel,
    make_profiler,
    say_hello,
)
from zbgrpo.engine.consumer import Consumer
from zbgrpo.engine.finished import mark_finished, save_folder
from zbgrpo.engine.inputs import load_data, load_evaluation, make_renderer
from zbgrpo.engine.rank import Rank
from zbgrpo.engine.recorder import Recorder
from zbgrpo.engine.steplog import open_step_log
from zbgrpo.errors import ConfigError, NoEffectiveGroupsError
from zbgrpo.groups.process_groups import ProcessGroups, connect, disconnect, make_groups
from zbgrpo.observe.events import EventLog
from zbgrpo.observe.logs import setup_rank_logging
from zbgrpo.observe.metrics import MetricsWriter
from zbgrpo.observe.progress import Progress, print_closing_table
from zbgrpo.observe.timeledger import IMBALANCE, SHUTDOWN, STARTUP, TimeLedger
from zbgrpo.observe.wandb_sink import require_wandb
from zbgrpo.trainer.base import TrainerBackend
from zbgrpo.transport import messages as m
from zbgrpo.transport.plan_stream import PlanReader
from zbgrpo.transport.ring import RingReader
from zbgrpo.weights.manifest import WeightManifest
from zbgrpo.weights.publisher import Sent, WeightPublisher

logger = logging.getLogger(__name__)


@dataclass
class _Parts:
    """What a consumer has made on its way, for the end to undo."""

    document: startup.Document
    lock: Any = None
    recorder: Recorder | None = None
    progress: Progress | None = None
    writer: MetricsWriter | None = None


def run_consumer(rank: Rank) -> str:
    """Start, train, end. Returns why the run ended."""
    ledger = rank.time = TimeLedger(started=rank.started, on_span=rank.trace.on_span)
    with ledger.phase(STARTUP):
        consumer, parts = _start(rank, ledger)
    reason = consumer.run()
    failpoints.fire("shutdown.consumer")
    with ledger.phase(SHUTDOWN):
        consumer.profiler.close()
        final = consumer.finish()
        # Goodbyes are what the hub waits for before it gives rank 0 the totals, and before it ends.
        consumer.reader.close()
        consumer.channel.close(DRAIN_SECONDS)
        if final is not None:
            _close_books(rank, parts, consumer, final, reason)
        consumer.events.close()
        if consumer.steps is not None:
            consumer.steps.close()
        for child in rank.children:
            child.close(timeout_seconds=30.0)
        disconnect()
    return reason


def _start(rank: Rank, ledger: TimeLedger) -> tuple[Consumer, _Parts]:
    """Everything up to the point where all ranks are ready."""
    config, env = rank.config, rank.env
    lock = None
    if env.rank == 0:
        lock = startup.claim_folders(config)
        setup_rank_logging(startup.log_folder(config), 0, "consumer 0", console=True)
    tokenizer, renderer, rows, evaluation = _read_inputs(rank)
    store = connect(env, config)
    failpoints.fire("init.world")
    nodes = gather_nodes(store, rank)
    if env.rank == 0:
        prepared = startup.prepare(config, env, rank.topology, nodes, renderer, rows, evaluation, store)
        rank.children.append(prepared.hub)
        startup.publish(store, prepared.document)
        parts = _Parts(prepared.document, lock)
    else:
        parts = _Parts(startup.receive(store))
        setup_rank_logging(parts.document.log_dir, env.rank, f"consumer {rank.info.index}")
    log_start(rank, device_of(rank))
    document = parts.document
    channel = connect_to_hub(rank, document)
    address, ring_path, ring_bytes = _plan_address(rank, store, document, nodes)
    groups = make_groups(store, rank.topology, config)
    trainer = build_trainer(
        rank, groups.consumers, groups.mesh, document.num_schedule_rows, lambda: ledger.phase(IMBALANCE)
    )
    failpoints.fire("init.model")
    if document.resume_folder is not None:
        trainer.load_state(Path(document.resume_folder) / "trainer", document.version)
    events = EventLog(Path(document.log_dir) / "events" / f"rank-{env.rank}.jsonl")
    steps = open_step_log(config, Path(document.log_dir), env.rank, document.version, document.num_schedule_rows)
    publisher = _build_publisher(rank, store, groups, trainer, events)
    ring = RingReader.attach(ring_path, ring_bytes)
    reader_channel = make_channel(config, document, address, f"reader:{env.rank}")
    reader = PlanReader(reader_channel, ring).start()
    for each in (channel, reader_channel):
        say_hello(each, rank, nodes[env.rank])
    failpoints.fire("init.ready")
    dist.barrier()
    rank.stop.install()
    if env.rank == 0:
        _open_books(config, parts)
    consumer = Consumer(
        config,
        rank=env.rank,
        run_id=document.run_id,
        trainer=trainer,
        tokenizer=tokenizer,
        group=groups.consumers,
        reader=reader,
        channel=channel,
        publisher=publisher,
        recorder=parts.recorder,
        ledger=ledger,
        events=events,
        steps=steps,
        profiler=make_profiler(rank, document.log_dir),
        trace=rank.trace,
        temperatures=TemperatureSchedule(config.inference, len(document.usable), config.seed),
        version=document.version,
        evaluating=document.evaluate_first,
        check_alive=rank.check_children,
        stop_requested=rank.stop.requested,
    )
    return consumer, parts


def _read_inputs(rank: Rank) -> tuple[Any, Any, Any, Any]:
    """Rank 0 reads what a user can get wrong first, before anything else is started."""
    if rank.env.rank != 0:
        return None, None, None, None
    config = rank.config
    if config.observe.wandb:
        require_wandb()
    function_file, colon, _ = config.reward.type.rpartition(".py:")
    if colon and not Path(f"{function_file}.py").is_file():
        raise ConfigError(f"-rt/--reward-type: {function_file}.py: no such file")
    rows = load_data(config)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    renderer = make_renderer(config, tokenizer)
    return tokenizer, renderer, rows, load_evaluation(config, renderer)


def _plan_address(
    rank: Rank, store: Any, document: startup.Document, nodes: list[int]
) -> tuple[dict[str, str], str, int]:
    """Where this rank's plan comes from: address, ring path and size of the hub, or of its node's relay."""
    node = nodes[rank.env.rank]
    if node == nodes[0]:
        return document.hub, document.ring_path, document.ring_bytes
    key = f"relay/{node}"
    if rank.env.rank == min(r for r in rank.topology.consumer_ranks if nodes[r] == node):
        relay = startup.start_relay(rank.config, rank.env, rank.topology, document, rank.env.rank)
        rank.children.append(relay)
        store.set(f"{key}/endpoint", relay.started.address["endpoint"])
        store.set(f"{key}/ring", f"{relay.started.ring_bytes} {relay.started.ring_path}")
    size, path = store.get(f"{key}/ring").decode().split(" ", 1)
    return {"endpoint": store.get(f"{key}/endpoint").decode()}, path, int(size)


def _build_publisher(
    rank: Rank, store: Any, groups: ProcessGroups, trainer: TrainerBackend, events: EventLog
) -> WeightPublisher | None:
    stage = rank.info.pp_index
    if rank.env.rank != rank.topology.source_rank(stage):
        return None
    config, channel = rank.config, rank.channel
    assert channel is not None
    manifest = WeightManifest(trainer.weight_specs(), config.weights.bucket_bytes)

    def sent(done: Sent) -> None:
        events.append("published", version=done.version, digest=done.digest, seconds=done.seconds, stage=stage)
        events.flush()
        rank.trace.ended("broadcast", done.seconds, "broadcast", version=done.version, stage=stage)

    publisher = WeightPublisher(
        groups.weights[stage],
        rank.env.rank,
        manifest,
        lambda broadcast, version: channel.send(m.WeightsStart(broadcast, version, stage=stage)),
        device=device_of(rank) if config.weights.staging == "device" else torch.device("cpu"),
        timeout_seconds=config.weights.timeout_seconds,
        shared=groups.weights_transport == "ipc",
        on_sent=sent,
    )
    if publisher.shared:
        store.set(f"staging/{stage}", publisher.shared.handles)
    store.set(f"manifest/{stage}", manifest.encode())
    return publisher


def _open_books(config: RunConfig, parts: _Parts) -> None:
    document = parts.document
    log_dir = Path(document.log_dir)
    parts.writer = MetricsWriter(
        log_dir,
        tensorboard=config.observe.tensorboard,
        wandb=config.observe.wandb,
        project=config.project,
        config_dict=to_tree(config),
        first_step=document.version + 1,
    )
    total = config.data.num_episodes * len(document.usable) // config.groups_per_step
    if config.ledger.max_steps is not None:
        total = min(total, config.ledger.max_steps)
    parts.progress = Progress(total, config.observe.progress, sys.stdout, done_steps=document.version)
    if document.version:
        parts.progress.note(f"zbgrpo: going on from {document.resume_folder}")
    parts.recorder = Recorder(config, parts.writer, parts.progress, log_dir)


def _close_books(rank: Rank, parts: _Parts, consumer: Consumer, final: m.FinalReport, reason: str) -> None:
    config, document = rank.config, parts.document
    assert parts.recorder is not None and parts.progress is not None and parts.writer is not None
    limit = config.ledger.max_steps
    data_used_up = reason == "end" and (limit is None or consumer.version < limit)
    if reason == "end" and consumer.version:
        mark_finished(config, consumer.version, data_used_up)
    saved = save_folder(config)
    paths = {
        "model": saved / f"step-{consumer.version}",
        "state": saved / f"state-{consumer.version}",
        "logs": Path(document.log_dir),
        "rollouts": Path(config.observe.rollout_save_dir) / config.project,
    }
    if reason != "end":
        del paths["model"]
    names = {f"{info.role.value}:{info.index}": info.rank for info in rank.topology.ranks if info.tp_index == 0}
    exit_reason = {"end": "finished", "stop": f"stopped by {rank.stop.requested() or 'request'}"}[reason]
    summary = parts.recorder.summary(document.run_id, final, consumer.version, exit_reason, names, paths)
    parts.progress.close()
    parts.writer.close()
    startup.keys_path(Path(document.log_dir)).unlink(missing_ok=True)
    parts.lock.release()
    if consumer.version == 0 and reason == "end":
        raise NoEffectiveGroupsError(_why_nothing_was_trained(config, final))
    if data_used_up:
        print(f"zbgrpo: the data is used up after {consumer.version} steps")
    print_closing_table(summary, sys.stdout)
    if reason == "stop":
        print("zbgrpo: stopped and saved; the same command goes on from here", flush=True)


def _why_nothing_was_trained(config: RunConfig, final: m.FinalReport) -> str:
    counts, text = final.counts, "no group was effective, so nothing was trained: "
    if counts["filtered"]:
        text += (
            f"{counts['filtered']} groups were filtered ({counts['all_right']} all right, {counts['all_wrong']} all "
            f"wrong): the task is too hard or too easy for the model, or filter_range {config.algorithm.filter_range} "
            "is too narrow; "
        )
    reasons = ", ".join(f"{number} {reason}" for reason, number in final.dropped_by_reason.items() if number)
    if reasons:
        text += f"dropped: {reasons}; "
    if final.last_drop:
        text += f"the last one: {final.last_drop}"
    return text.rstrip("; ")
