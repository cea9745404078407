"""The mark of a finished run. Read before torch is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from zbgrpo.config.schema import RunConfig


def save_folder(config: RunConfig) -> Path:
    """Where models and states of the project go."""
    return Path(config.checkpoint.save_dir) / config.project


def mark_finished(config: RunConfig, version: int, data_used_up: bool) -> None:
    """Leave the mark that `finished_at` reads."""
    mark = {"version": version, "data_used_up": data_used_up}
    (save_folder(config) / "finished.json").write_text(json.dumps(mark))


def finished_at(config: RunConfig) -> int | None:
    """The last step of a run that has finished and has nothing left to do; None if there is something to do."""
    path = save_folder(config) / "finished.json"
    if config.checkpoint.resume == "never" or not path.exists():
        return None
    mark = json.loads(path.read_text())
    limit = config.ledger.max_steps
    done = mark["data_used_up"] or (limit is not None and mark["version"] >= limit)
    return int(mark["version"]) if done else None
