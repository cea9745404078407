"""Programs on this machine: each in a fresh interpreter, behind everything the machine offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.sandbox.base import Execution, Isolation, Limits
from zbgrpo.rewards.sandbox.confinement import confinement
from zbgrpo.rewards.sandbox.probe import examine, highest_level, isolation
from zbgrpo.rewards.sandbox.runner import run_confined


class LocalSandbox:
    """Runs programs one after the other; holds nothing between them. For a process with a single thread: it forks."""

    def __init__(self, level: Optional[int] = None, read_only: Sequence[str] = ()) -> None:
        """`level`: exactly this one, by default the highest that the machine offers. `read_only`: folders and files
        that programs may read besides the interpreter and the system's libraries.

        `ConfigError` if the machine does not offer the level, or cannot run programs at all, and why.
        """
        chosen = highest_level() if level is None else level
        self._isolation = isolation(chosen)
        try:
            self._confinement = confinement(chosen, examine().bubblewrap, tuple(read_only))
        except OSError as error:
            raise ConfigError(f"programs cannot be run on this machine: {error}") from error

    def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
        """Run a program to its end; see `Sandbox`."""
        return run_confined(self._confinement, source, stdin, limits)

    def isolation(self) -> Isolation:
        """What is active."""
        return self._isolation

    def close(self) -> None:
        """Nothing is held."""
