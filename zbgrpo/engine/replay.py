"""Train the recorded steps of a run again, and compare: `zbgrpo replay LOG_DIR` (needs observe.record_steps=true).

What an asynchronous run trains depends on timing; given that, training is a function. A replay makes the trainers
anew, feeds them the recorded minibatches, and after every step that sent weights compares their digest with the one in
the event log. On a CPU they are the same bits.

    consumes      the step logs of all consumer ranks, and the state or model that the recorded start went on from
    waits for     the other consumers, in the steps themselves
    unblocked by  the end of the logs

As many processes as the run had consumers, with the layout of the run; no producers and no hub.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from zbgrpo.checkpoint.folder import MANIFEST_NAME
from zbgrpo.config.load import load_config
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.steplog import Commit, Minibatch, Start, read_step_log, starts_of, step_log_path
from zbgrpo.errors import EXIT_USER_ERROR, RunFolderError, UserError, WeightSyncError, ZbgrpoError
from zbgrpo.observe.events import iter_events
from zbgrpo.topology.env import read_torchrun_env, set_thread_env


def command(log_dir: Path, version: int | None) -> list[str]:
    """The command that replays a run. Raises `RunFolderError` if there is nothing to replay."""
    starts = starts_of(log_dir)
    if version is not None and version not in starts:
        raise RunFolderError(f"{log_dir}: no start from version {version} is recorded, only from {starts}")
    config = _config_of(log_dir)
    arguments = [str(log_dir.resolve()), str(starts[-1] if version is None else version)]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(config.cluster.num_trainers)]
    return [sys.executable, "-m", *launcher, "-m", "zbgrpo.engine.replay", *arguments]


def _config_of(log_dir: Path) -> RunConfig:
    return load_config(["--config", str(log_dir / "config.yaml")]).config


def published_digests(log_dir: Path, rank: int, first: int) -> dict[int, str]:
    """Digest of every version from `first` on that a source has sent, as its event log says."""
    events = iter_events(log_dir / "events" / f"rank-{rank}.jsonl")
    return {e["version"]: e["digest"] for e in events if e["kind"] == "published" and e["version"] >= first}


def replay(log_dir: Path, version: int) -> int:
    """One rank of a replay. Prints what has been compared; raises `WeightSyncError` at the first difference."""
    env = read_torchrun_env()
    assert env is not None, "started by torchrun"
    records = read_step_log(step_log_path(log_dir, env.rank, version))
    start = next(records, None)
    if not isinstance(start, Start):
        raise RunFolderError(f"{log_dir}: the step log of rank {env.rank} from version {version} is empty")
    set_thread_env(start.num_threads)
    import torch
    import torch.distributed as dist

    from zbgrpo.engine.build_trainer import build_trainer
    from zbgrpo.engine.rank import Rank
    from zbgrpo.groups.process_groups import connect, disconnect, make_mesh
    from zbgrpo.weights.manifest import WeightManifest, digest

    torch.set_num_threads(start.num_threads)
    config = _config_of(log_dir)
    rank = Rank(config, dataclasses.replace(env, world_size=config.world_size))
    connect(env, config)
    topology, timeout = rank.topology, timedelta(seconds=config.cluster.timeout_seconds)
    mesh = make_mesh((topology.dp_size, topology.pp_size, topology.tp_size), timeout, "gloo")
    trainer = build_trainer(rank, dist.group.WORLD, mesh, start.num_schedule_rows, contextlib.nullcontext)
    if version:
        trainer.load_state(_state_folder(config, version) / "trainer", version)
    is_source = env.rank == topology.source_rank(rank.info.pp_index)
    expected = published_digests(log_dir, env.rank, version + 1) if is_source else {}
    manifest = WeightManifest(trainer.weight_specs(), config.weights.bucket_bytes)
    views = manifest.views(manifest.allocate(torch.device("cpu")))
    # What is recorded behind the state that a later start went on from did not come to count.
    last = next((other for other in starts_of(log_dir) if other > version), None)
    reached, num_same = version, 0
    for record in records:
        if reached == last:
            break
        if isinstance(record, Minibatch):
            payloads = [group.payload for group in record.groups()]
            trainer.train_minibatch(payloads, record.version, record.temperatures)
        elif isinstance(record, Commit):
            result = trainer.commit()
            assert result is not None
            for name, tensor in trainer.weights():  # all ranks take part in gathering what is spread
                views[name].copy_(tensor.detach())
            reached = record.version
            was_sent = reached in expected
            if result.skipped != record.skipped or (was_sent and digest(views) != expected[reached]):
                raise WeightSyncError(f"step {reached} of the replay differs from the run")
            num_same += was_sent
    trainer.discard()
    dist.barrier()
    disconnect()
    if is_source:
        print(f"zbgrpo: replayed steps {version + 1} to {reached}: {num_same} digests compared, all equal", flush=True)
    return 0


def _state_folder(config: RunConfig, version: int) -> Path:
    folder = Path(config.checkpoint.save_dir) / config.project / f"state-{version}"
    if not (folder / MANIFEST_NAME).is_file():
        raise RunFolderError(f"{folder}: the recorded start went on from this state, which is not there any more")
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of a rank."""
    parser = argparse.ArgumentParser(prog="zbgrpo replay")
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("version", type=int)
    options = parser.parse_args(arguments)
    try:
        return replay(options.log_dir, options.version)
    except UserError as error:
        print(f"zbgrpo: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except ZbgrpoError as error:
        print(f"zbgrpo: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
