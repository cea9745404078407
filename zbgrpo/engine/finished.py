"""The mark of a finished run. Read before torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from zbgrpo.checkpoint.durable import disk_full_named, sync_folder, write_durably
from zbgrpo.config.load import compare_fingerprints, fingerprint
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import RunFolderError

MARK_NAME = "finished.json"


class _Mark(msgspec.Struct, frozen=True):
    version: int
    data_used_up: bool
    fingerprint: dict[str, Any]


def save_folder(config: RunConfig) -> Path:
    """Where models and states of the project go."""
    return Path(config.checkpoint.save_dir) / config.project


def mark_finished(config: RunConfig, version: int, data_used_up: bool) -> None:
    """Leave the mark that `finished_at` reads, atomically and durably; an earlier one is replaced."""
    path = save_folder(config) / MARK_NAME
    mark = msgspec.json.format(msgspec.json.encode(_Mark(version, data_used_up, fingerprint(config))), indent=1)
    temporary = path.with_name(f"{MARK_NAME}.tmp")  # one name: the run has the folder locked
    with disk_full_named(path):
        temporary.unlink(missing_ok=True)
        write_durably(temporary, mark)
        os.replace(temporary, path)
        sync_folder(path.parent)


def finished_at(config: RunConfig) -> int | None:
    """The last step of a run that has finished and has nothing left to do; None if there is something to do.

    Raises `RunFolderError` when that run had another configuration, or the mark is not one that `mark_finished` wrote.
    """
    path = save_folder(config) / MARK_NAME
    if config.checkpoint.resume == "never":
        return None
    try:
        mark = msgspec.json.decode(path.read_bytes(), type=_Mark)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise RunFolderError(
            f"{path}: not the mark of a finished run: {error}; remove the file to go on from the newest state, use "
            "another -p/--project, or --resume never to start over"
        ) from error
    limit = config.ledger.max_steps
    if not mark.data_used_up and (limit is None or mark.version < limit):
        return None
    difference = compare_fingerprints(mark.fingerprint, fingerprint(config))
    if difference is not None:
        raise RunFolderError(
            f"{path}: the run has finished with another configuration: {difference}; use another -p/--project, or "
            "--resume never to move the old run aside and start over"
        )
    return mark.version
