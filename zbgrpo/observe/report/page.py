"""Puts the page together: one HTML file with its style, its scripts and its data inside.

Whatever a model, a data set or a configuration has written is data: it is in one block of JSON, which no browser runs,
with every `<` escaped, so that no text can end the block; the scripts put it into the page as text. The page's own
policy allows no other script than its own, by their digests, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from pathlib import Path
from typing import Any

from zbgrpo.observe.jsonl import encode_line
from zbgrpo.observe.report import contents, figures
from zbgrpo.observe.report.folder import read_run
from zbgrpo.observe.report.timeline import timelines
from zbgrpo.observe.tracemerge import merge_trace

PAGE_NAME = "report.html"
_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = ("page.js", "charts.js", "timeline.js", "tables.js", "rollouts.js", "main.js")


def write_report(log_dir: Path, target: Path | None = None) -> tuple[Path, Path | None]:
    """Write the page of a run, `report.html` in its log folder unless told otherwise, and merge its trace.

    Returns both paths, None for a run without a trace. Works on finished, stopped, killed, resumed and running runs.
    The files appear as a whole or not at all. Raises RunFolderError or ConfigError, with one line that says what is
    wrong with which file, and OSError where the page cannot be written.
    """
    run = read_run(log_dir)
    times = figures.times(run)
    data = {
        "project": run.project,
        "log_dir": str(log_dir),
        "state": figures.state_of(run),
        "description": contents.description(run),
        "headline": figures.headline(run, times),
        "notes": run.notes,
        "curves": figures.curves(run),
        "timelines": timelines(run.trace),
        "times": times,
        "groups": figures.group_table(run),
        "lags": figures.lag_histogram(run),
        "rollouts": contents.rollouts(run),
        "settings": contents.settings(run),
        "config": run.config_text,
    }
    path = target or log_dir / PAGE_NAME
    _replace(path, render(data).encode("utf-8"))
    return path, merge_trace(log_dir, run.trace) if run.trace else None


def render(data: dict[str, Any]) -> str:
    """The page, from its data."""
    style = _asset("style.css")
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; {_allowed(style, script)}"
    parts = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(f"{data['project']} - zbgrpo"),
        "style": style,
        "script": script,
        "data": json_for_script(data),
    }
    page = _asset("page.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"[[{name}]]")
        assert mark, f"page.html has no place for {name}"
        page = before + text + after
    return page


def json_for_script(data: Any) -> str:
    """JSON that may stand in a `<script type="application/json">`: without any `<`, so without `</script>`."""
    return encode_line(data).decode("utf-8").rstrip("\n").replace("<", "\\u003c")


def _allowed(style: str, script: str) -> str:
    kinds = (("style-src", style), ("script-src", script))
    return "; ".join(f"{kind} 'sha256-{_digest(text)}'" for kind, text in kinds)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
