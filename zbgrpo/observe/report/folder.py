"""The log folder of a run, read for people: what is there, whatever state the run was left in.

A run that was killed leaves torn last lines, which are dropped. After a resume, lines that are later than what was
restored are in `.void-...` files, which are not read: the others tell one story. summary.json may be of an earlier
start; it counts only where the hub's log ends as it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from zbgrpo.config.load import load_yaml
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import RunFolderError
from zbgrpo.observe.events import iter_events
from zbgrpo.observe.metrics import read_metrics
from zbgrpo.observe.report.groups import GroupBook, Lags
from zbgrpo.observe.tracemerge import Life, read_trace

_RANK_LOG = re.compile(r"rank-(\d+)\.jsonl")


@dataclass
class RunFolder:
    """What the logs say."""

    log_dir: Path
    config: RunConfig
    config_text: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    groups: GroupBook
    lags: Lags
    rank_seconds: dict[int, dict[str, float]]
    """Seconds by account as each rank wrote them last in its event log, in its last start."""
    trace: list[Life]
    summary: dict[str, Any] | None
    """Of the last start, None if it has not ended in order."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know about the logs themselves."""

    @property
    def project(self) -> str:
        return self.config.project

    def folder(self, setting: str) -> Path:
        """A folder of the run that its configuration names, from where the logs are: both are relative to the folder
        in which the run was started."""
        path, logs = Path(setting), Path(self.config.observe.log_dir)
        here = self.log_dir.resolve()
        if path.is_absolute() or logs.is_absolute():
            return path / self.project
        tail = [part for part in (*logs.parts, self.project) if part != "."]
        base = Path(*here.parts[: -len(tail)]) if list(here.parts[-len(tail) :]) == tail else Path()
        return base / path / self.project


def read_run(log_dir: Path) -> RunFolder:
    """Read the logs of one run, `logs/<project>`.

    Raises RunFolderError when this is not the log folder of a run, or a line (named as `file:line`) is not what it
    should be; ConfigError when config.yaml is damaged.
    """
    config_path = log_dir / "config.yaml"
    if not config_path.is_file():
        raise RunFolderError(f"{config_path}: no such file; give the log folder of a run, such as logs/GRPO")
    config_text = config_path.read_text(encoding="utf-8", errors="replace")
    config = load_yaml(config_text, str(config_path))
    notes: list[str] = []
    groups, lags = GroupBook(), Lags()
    rank_seconds: dict[int, dict[str, float]] = {}
    events = log_dir / "events"
    _read(events / "hub.jsonl", groups.handle, notes)
    for path in sorted(events.glob("rank-*.jsonl")):
        if (named := _RANK_LOG.fullmatch(path.name)) is not None:
            rank = int(named[1])
            _read(path, lambda event, rank=rank: _rank_event(event, rank, lags, rank_seconds), notes)  # type: ignore[misc]
    eval_path = log_dir / "eval.jsonl"
    if num_void := len([*events.glob("*.void-*")]):
        notes.append(f"A resume has moved lines of {num_void} event logs aside: work that was done again.")
    return RunFolder(
        log_dir=log_dir,
        config=config,
        config_text=config_text,
        metrics=read_metrics(log_dir),
        evaluations=list(iter_events(eval_path)) if eval_path.exists() else [],
        groups=groups,
        lags=lags,
        rank_seconds=rank_seconds,
        trace=read_trace(log_dir),
        summary=_summary(log_dir, groups),
        notes=notes,
    )


def _read(path: Path, handle: Callable[[dict[str, Any]], None], notes: list[str]) -> None:
    if not path.exists():
        return
    torn: list[str] = []
    for number, event in enumerate(iter_events(path, torn.append), start=1):
        try:
            handle(event)
        except (LookupError, TypeError, ValueError) as error:
            raise RunFolderError(f"{path}:{number}: not an event of this program: {error!r}") from error
    if torn:
        notes.append(f"The last line of {path.name} was cut off, as by a kill, and is left out.")


def _rank_event(event: dict[str, Any], rank: int, lags: Lags, rank_seconds: dict[int, dict[str, float]]) -> None:
    if event["kind"] == "trained":
        lags.add(event["lease"], event["step"], event["oldest"], event["newest"])
    elif event["kind"] in ("commit", "decode") and "times" in event:
        rank_seconds[rank] = event["times"]


def _summary(log_dir: Path, groups: GroupBook) -> dict[str, Any] | None:
    path = log_dir / "summary.json"
    if groups.end is None or not path.exists():
        return None
    try:
        summary: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return summary if summary["run"] == groups.run else None
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise RunFolderError(f"{path}: not a summary of this program: {error!r}") from error
