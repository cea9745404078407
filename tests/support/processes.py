"""Whether processes that are not this one's children have ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped. One that has ended stays listed until its parent asks: for an orphan that is the
    machine's first process, which may take seconds to, or never does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(pids: Iterable[int], patience_seconds: float) -> list[int]:
    """Those that are still alive after this time; returns as soon as none is."""
    pids, deadline = list(pids), time.monotonic() + patience_seconds
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive
