"""Python logging of a rank: a file with everything, and warnings on stderr where somebody looks."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

from zbgrpo.types import Role

_LINE = "%(asctime)s.%(msecs)03d {who} %(levelname)s %(name)s: %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"
_MAX_MESSAGE = 2000


class _CurrentStderr(logging.StreamHandler):
    """Looks up sys.stderr at each record, so that a live progress bar that has replaced it stays whole."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_installed: list[logging.Handler] = []


def setup_rank_logging(
    log_dir: str | Path, rank: int, role: Role | str, console: bool = False, level: int = logging.INFO
) -> Path:
    """Send the root logger of this process to `log_dir/rank-N.log` (appended) and return its path.

    Each record has local time, rank and role. `console`: warnings and worse go to stderr too. Warnings of the
    `warnings` module are captured. Calling again replaces what the earlier call installed.
    """
    path = Path(log_dir) / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    who = f"rank {rank} ({_role_text(role)})"
    root = logging.getLogger()
    for handler in _installed:
        root.removeHandler(handler)
        handler.close()
    file_handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file_handler.setFormatter(logging.Formatter(_LINE.format(who=who), _DATE))
    _installed[:] = [file_handler]
    if console:
        console_handler = _CurrentStderr()
        console_handler.setFormatter(logging.Formatter(f"zbgrpo: {who} %(levelname)s: %(message)s"))
        _installed.append(console_handler)
    for handler in _installed:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    return path


def error_line(rank: int, role: Role | str, error: BaseException) -> str:
    """The one line that says why a rank ended: `zbgrpo: rank 2 (producer 0) failed: DataError: ...`."""
    message = " ".join(str(error).split())
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + " ..."
    name = type(error).__name__
    return f"zbgrpo: rank {rank} ({_role_text(role)}) failed: {name}{': ' + message if message else ''}"


def _role_text(role: Role | str) -> str:
    return role.value if isinstance(role, Role) else role
