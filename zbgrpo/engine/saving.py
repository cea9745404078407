"""Saving and finding what a run can go on from: model folders, states, the mark of a finished run.

<save_dir>/<project>/step-N/     Hugging Face folder
<save_dir>/<project>/state-N/    trainer state (torch DCP), ledger.msgpack, run.json; manifest last, then `latest`
<save_dir>/<project>/finished.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from zbgrpo.checkpoint.durable import sync_files
from zbgrpo.checkpoint.folder import FolderTransaction, find_latest, remove_old, set_latest, verify_folder, write_folder
from zbgrpo.config.load import compare_fingerprints, fingerprint
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.finished import save_folder
from zbgrpo.errors import RunFolderError
from zbgrpo.groups.process_groups import collective
from zbgrpo.trainer.base import TrainerBackend

STATE_FORMAT = 1


class SavedRun(NamedTuple):
    """A state to go on from."""

    folder: Path
    version: int
    ledger: dict[str, Any]


def save_state(
    config: RunConfig,
    trainer: TrainerBackend,
    group: dist.ProcessGroup | None,
    rank: int,
    version: int,
    token: str,
    ledger: Callable[[], dict[str, Any]],
) -> None:
    """Write state-N together with all consumers; `ledger` is asked on rank 0 only. Then older ones may go.

    When it returns on rank 0, the state is complete and `latest` names it. The other ranks go on as soon as every rank
    has its part on the disk: reading all of it back for the checksums can take longer than a collective may. Their
    next save waits for rank 0 in its first barrier, so two saves never overlap.
    """
    parent = save_folder(config)
    transaction = FolderTransaction(parent / f"state-{version}", token)
    if rank == 0:
        transaction.begin()
    _barrier(group)
    trainer.save_state(transaction.path / "trainer")
    sync_files(transaction.path.glob(f"trainer/__{rank}_*"))
    _barrier(group)
    if rank == 0:
        run = {"state_format": STATE_FORMAT, "version": version, "fingerprint": fingerprint(config)}
        (transaction.path / "ledger.msgpack").write_bytes(msgspec.msgpack.encode(ledger()))
        (transaction.path / "run.json").write_text(json.dumps(run, indent=1))
        transaction.commit({"version": version})
        set_latest(parent, f"state-{version}")
        remove_old(parent, "state-", config.checkpoint.keep_states)


def save_model(config: RunConfig, trainer: TrainerBackend, tokenizer: Any, version: int) -> None:
    """Write step-N on rank 0; all consumers take part."""
    weights = trainer.gather_model()
    if weights is not None:
        final = save_folder(config) / f"step-{version}"
        write_folder(final, lambda folder: trainer.save_model(folder, tokenizer, weights))


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        with collective("saving a state"):
            dist.barrier(group=group)


def find_saved(config: RunConfig) -> SavedRun | None:
    """The state to go on from by `--resume`, checked; None for a fresh start. Raises `RunFolderError`."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        folder = find_latest(save_folder(config))
        if folder is None:
            return None
    else:
        folder = Path(resume)
        if not folder.is_dir():
            raise RunFolderError(f"--resume {resume}: no such state folder; give auto, never or a state-N folder")
        verify_folder(folder)
    try:
        run = json.loads((folder / "run.json").read_text())
        ledger = msgspec.msgpack.decode((folder / "ledger.msgpack").read_bytes())
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise RunFolderError(f"{folder}: not a state of this program: {error}") from error
    if run.get("state_format") != STATE_FORMAT:
        raise RunFolderError(f"{folder}: state format {run.get('state_format')}, this version reads {STATE_FORMAT}")
    difference = compare_fingerprints(run["fingerprint"], fingerprint(config))
    if difference is not None:
        raise RunFolderError(
            f"{folder}: belongs to another configuration: {difference}; use another -p/--project, or --resume never "
            "to move the old run aside and start over"
        )
    return SavedRun(folder, run["version"], ledger)


def move_aside(folder: Path) -> Path:
    """Rename a folder of an earlier run to the first free `<name>.old-K` and return its new path."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(target)
    return target
