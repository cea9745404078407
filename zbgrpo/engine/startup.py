"""How the ranks of a run find each other: what rank 0 prepares, and the document that it leaves for the others.

Rank 0 locks the run folder, finds the state to go on from, reads the data, starts the hub, and puts one JSON document
into the rendezvous store. Every other rank waits for it. Keys of CURVE are never in it: across nodes they travel in a
file that only the user can read.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple, Optional

import msgspec

from zbgrpo import failpoints
from zbgrpo.checkpoint.folder import LOCK_NAME, MANIFEST_NAME, RunLock, verify_folder
from zbgrpo.config.load import dump_yaml
from zbgrpo.config.schema import RunConfig
from zbgrpo.config.sizes import ring_bytes
from zbgrpo.data.chat import PromptRenderer
from zbgrpo.data.rows import Row
from zbgrpo.engine import saving
from zbgrpo.engine.finished import save_folder
from zbgrpo.engine.hub_process import ChildProcess
from zbgrpo.engine.hub_spec import HubSpec, ReaderSpec
from zbgrpo.errors import ConfigError, DataError, RunFolderError
from zbgrpo.observe.events import iter_events, void_later
from zbgrpo.topology.addresses import route_to
from zbgrpo.topology.env import TorchrunEnv
from zbgrpo.topology.roles import Topology
from zbgrpo.transport.channel import Timing

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells everybody."""

    run_id: str
    usable: list[int]
    version: int
    resume_folder: Optional[str]
    hub: dict[str, str]
    ring_path: str
    ring_bytes: int
    log_dir: str
    evaluate_first: bool
    nodes: list[int]
    num_schedule_rows: int


class Prepared(NamedTuple):
    """What rank 0 keeps."""

    document: Document
    hub: ChildProcess


def claim_folders(config: RunConfig) -> RunLock:
    """Keep other runs out of the run's folders; with --resume never, move what an earlier run left in them aside."""
    lock = RunLock(save_folder(config))
    lock.acquire()
    if config.checkpoint.resume == "never":
        used = [folder for folder in run_folders(config) if _is_used(folder)]
        if save_folder(config) in used:
            lock.release()  # its file moves along
        for folder in used:
            print(f"zbgrpo: --resume never: {folder} was moved to {saving.move_aside(folder)}", flush=True)
        lock.acquire()
    return lock


def run_folders(config: RunConfig) -> list[Path]:
    """All folders that a run writes into, each once."""
    others = (config.observe.rollout_save_dir, config.evaluation.save_dir)
    return list(dict.fromkeys([save_folder(config), log_folder(config), *(Path(p) / config.project for p in others)]))


def _is_used(folder: Path) -> bool:
    return folder.is_dir() and any(entry.name != LOCK_NAME for entry in folder.iterdir())


def prepare(
    config: RunConfig,
    env: TorchrunEnv,
    topology: Topology,
    nodes: list[int],
    renderer: PromptRenderer,
    rows: list[Row],
    evaluation: dict[str, list[Row]],
    store: Any = None,
) -> Prepared:
    """Everything that rank 0 does before the others can start.

    `store`: where the ranks have left their addresses (`groups.process_groups.connect`).
    """
    log_dir = log_folder(config)
    saved = saving.find_saved(config)
    version = saved.version if saved is not None else 0
    usable = renderer.usable_rows(rows)
    if usable.num_too_long:
        logger.warning(
            "%s: %d prompts of more than %d tokens left out (-mpt)",
            config.data.path,
            usable.num_too_long,
            config.data.max_prompt_tokens,
        )
    _require_rows(config, len(usable.indices), len(rows))
    if saved is not None and saved.ledger["num_rows"] != len(usable.indices):
        raise RunFolderError(
            f"{saved.folder}: was saved with {saved.ledger['num_rows']} usable rows, {config.data.path} now has "
            f"{len(usable.indices)}; give the same data, or another -p/--project"
        )
    _write_config(config, log_dir)
    void_events(log_dir, version, saved.ledger if saved is not None else None)
    if (lost := _lost_evaluation(config, version, list(evaluation))) is not None:
        logger.warning(
            "the evaluation of step %d was cut off, and its weights are gone: it is left out (with -si/--save-interval "
            "a multiple of -ei/--eval-interval, or shorter evaluations, this cannot happen)",
            lost,
        )
    evaluate_first = bool(evaluation) and (version == 0 or version % config.evaluation.interval == 0)
    spec = _hub_spec(config, topology, nodes, log_dir, _hub_host(env, nodes, store))
    spec = msgspec.structs.replace(
        spec,
        num_rows=len(usable.indices),
        eval_rows={task: len(task_rows) for task, task_rows in evaluation.items()},
        eval_interval=config.evaluation.interval if evaluation else None,
        evaluate_first=evaluate_first,
        model_saved=saved is not None and _has_model(config, saved),
        restored=saved.ledger if saved is not None else None,
    )
    hub = ChildProcess("zbgrpo.engine.hub", spec, config.cluster.timeout_seconds)
    document = Document(
        run_id=spec.run_id,
        usable=[int(i) for i in usable.indices],
        version=version,
        resume_folder=str(saved.folder) if saved is not None else None,
        hub=hub.started.address,
        ring_path=hub.started.ring_path,
        ring_bytes=hub.started.ring_bytes,
        log_dir=str(log_dir),
        evaluate_first=evaluate_first,
        nodes=nodes,
        num_schedule_rows=len(usable.indices),
    )
    return Prepared(document, hub)


def _lost_evaluation(config: RunConfig, version: int, tasks: list[str]) -> int | None:
    """The step before `version` whose evaluation was due and is not there; None when there is none."""
    due = version - version % config.evaluation.interval
    folder = Path(config.evaluation.save_dir) / config.project
    missing = [task for task in tasks if not (folder / task / f"step-{due}.jsonl").exists()]
    return due if missing and due < version else None


def _require_rows(config: RunConfig, num_usable: int, num_rows: int) -> None:
    needed, episodes = config.groups_per_step, config.data.num_episodes
    if num_usable * episodes < needed:
        raise DataError(
            f"{config.data.path}: too few rows: {num_usable} usable of {num_rows}, x {episodes} episodes = "
            f"{num_usable * episodes} groups; one optimizer step needs {needed} "
            f"(-tbs {config.trainer.train_batch_size} x {config.dp_size} data-parallel ranks)"
        )


def _has_model(config: RunConfig, saved: saving.SavedRun) -> bool:
    """Whether the model folder of the restored version is complete, and was written after this very state."""
    model = save_folder(config) / f"step-{saved.version}"
    if saved.folder.parent.resolve() != save_folder(config).resolve():
        return False
    try:
        verify_folder(model, checksums=False)
        # An older one can be of another history: of a run that had come this far before it went back to resume.
        return (model / MANIFEST_NAME).stat().st_mtime_ns >= (saved.folder / MANIFEST_NAME).stat().st_mtime_ns
    except (RunFolderError, OSError):
        return False


def _hub_host(env: TorchrunEnv, nodes: list[int], store: Any) -> str | None:
    """The one address that the hub listens on; None when all ranks are on one node.

    It is what MASTER_ADDR means here. A machine often has its own name as a loopback address in /etc/hosts, where
    other nodes cannot reach it: then it is its address on the route to the first node that is another machine. Raises
    `ConfigError`, naming MASTER_ADDR, when there is none that can be listened on.
    """
    if len(set(nodes)) == 1:
        return None
    name = env.master_addr
    try:
        found = ipaddress.ip_address(socket.gethostbyname(name))
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR: {name!r} is not known here: {error}; {_ADVICE}") from error
    host = str(found)
    if found.is_loopback and not _is_literally_loopback(name) and store is not None:
        others = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
        addresses = [store.get(f"address/{rank}").decode() for rank in others]
        routes = [route_to(address, env.master_port) for address in addresses if address]
        # Loopback on both sides is right when the nodes are launchers on one machine.
        outward = [route for route in routes if route and not ipaddress.ip_address(route).is_loopback]
        host = next(iter([*outward, *filter(None, routes)]), host)
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR: {name!r} means {host} here, where the hub cannot listen: {error.strerror}; {_ADVICE}"
        ) from error
    return host


_ADVICE = "set it (torchrun --master-addr) to an address of the first node that the other nodes reach"


def _is_literally_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _hub_spec(config: RunConfig, topology: Topology, nodes: list[int], log_dir: Path, host: str | None) -> HubSpec:
    several_nodes = len(set(nodes)) > 1
    security = config.transport.security
    return HubSpec(
        run_id=secrets.token_hex(8),
        node=nodes[0],
        host=host,
        curve=security == "curve" or (security == "auto" and several_nodes),
        timing=Timing(
            config.transport.heartbeat_seconds,
            config.transport.peer_timeout_seconds,
            config.transport.resend_seconds,
            config.cluster.progress_timeout_seconds,
        ),
        ring_bytes=ring_bytes(config),
        max_message_bytes=MAX_MESSAGE_BYTES,
        readers=[ReaderSpec(rank, nodes[rank], topology[rank].dp_index) for rank in topology.consumer_ranks],
        events_path=str(log_dir / "events" / "hub.jsonl"),
        failpoints=failpoints.armed_text(),
        trace_limit=config.observe.trace_limit if config.observe.trace else 0,
        num_episodes=config.data.num_episodes,
        seed=config.seed,
        groups_per_step=config.groups_per_step,
        groups_per_minibatch=config.groups_per_minibatch,
        dp_size=config.dp_size,
        num_producers=topology.num_producers,
        producer_ranks=[topology.ranks_of_producer(producer)[0] for producer in range(topology.num_producers)],
        leases_per_producer=config.inference.inference_batch_size,
        buffer_limit=config.buffer_limit,
        max_staleness=config.ledger.max_staleness,
        stale=config.ledger.stale,
        max_steps=config.ledger.max_steps,
        save_interval=config.checkpoint.save_interval,
    )


def start_relay(config: RunConfig, env: TorchrunEnv, topology: Topology, document: Document, rank: int) -> ChildProcess:
    """The relay of this rank's node; called by the lowest consumer rank of each further node."""
    spec = _hub_spec(config, topology, document.nodes, Path(document.log_dir), None)
    spec = msgspec.structs.replace(
        spec, run_id=document.run_id, node=document.nodes[rank], curve=False, hub_address=document.hub
    )
    return ChildProcess("zbgrpo.engine.relay", spec, config.cluster.timeout_seconds)


def log_folder(config: RunConfig) -> Path:
    """Where the logs of the project go."""
    return Path(config.observe.log_dir) / config.project


def _write_config(config: RunConfig, log_dir: Path) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / "config.yaml").write_text(dump_yaml(config))


def void_events(log_dir: Path, version: int, ledger: dict[str, Any] | None) -> None:
    """Move aside all event lines that are later than the restored state, so that the logs join again.

    Of the hub's log everything behind the snapshot of that version; of a consumer's log what it trained at or after
    it; of a producer's log groups that the snapshot does not hold as settled.
    """
    folder, suffix = log_dir / "events", f"void-{version}-{secrets.token_hex(2)}"
    for path in sorted(folder.glob("*.jsonl")):
        if path.name == "hub.jsonl":
            keep = _Before(path, version) if ledger is not None else _nothing
        else:
            keep = _Settled(version, ledger) if ledger is not None else _nothing
        moved = void_later(path, keep, suffix)
        if moved:
            logger.info("%s: %d lines later than step %d moved aside", path, moved, version)


def _nothing(event: dict[str, Any]) -> bool:
    return False


class _Before:
    """Keeps the hub's lines up to the last snapshot of a version."""

    def __init__(self, path: Path, version: int) -> None:
        places = [n for n, e in enumerate(iter_events(path)) if e["kind"] == "snapshot" and e.get("version") == version]
        self._left = places[-1] + 1 if places else 0

    def __call__(self, event: dict[str, Any]) -> bool:
        self._left -= 1
        return self._left >= 0


class _Settled:
    """Keeps the lines of ranks that belong to what a ledger snapshot holds."""

    def __init__(self, version: int, ledger: dict[str, Any]) -> None:
        import numpy as np

        self._version = version
        data = ledger["data"]
        self._settled = {
            int(e): np.unpackbits(np.frombuffer(bits, np.uint8)).astype(bool) for e, bits in data["settled"].items()
        }
        self._attempts = {(e, r): a for e, r, a in data["attempts"]}

    def __call__(self, event: dict[str, Any]) -> bool:
        if "step" in event:
            return bool(event["step"] < self._version)
        if "uid" in event:
            episode, row = event["uid"]
            settled = episode in self._settled and bool(self._settled[episode][row])
            return settled or event["attempt"] < self._attempts.get((episode, row), 0)
        if "version" in event:
            return bool(event["version"] <= self._version)
        return True


def keys_path(log_dir: Path) -> Path:
    """File with the addresses and CURVE keys, readable by the user alone; on the file system that the nodes share."""
    return log_dir / ".hub-address.json"


def publish(store: Any, document: Document) -> None:
    """Rank 0: let the others go on. With CURVE the keys go into a 0600 file instead of the store."""
    hub = dict(document.hub)
    if hub.get("server_public"):
        path = keys_path(Path(document.log_dir))
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(hub, file)
        hub = {"endpoint": hub["endpoint"], "server_public": "", "client_public": "", "client_secret": ""}
        hub["keys"] = str(path.resolve())
    store.set("document", msgspec.json.encode(msgspec.structs.replace(document, hub=hub)))


def receive(store: Any) -> Document:
    """The others: wait for rank 0 (bounded by the store's timeout)."""
    document = msgspec.json.decode(store.get("document"), type=Document)
    keys = document.hub.get("keys")
    if keys is not None:
        document = msgspec.structs.replace(document, hub=json.loads(Path(keys).read_text()))
    return document
