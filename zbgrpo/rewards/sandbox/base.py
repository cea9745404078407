"""What running a program means, whoever runs it.

A program is Python source that reads standard input and writes standard output. It is not trusted: it may do anything
within its limits, and what it prints is all that is believed of it. Exit status 0 is no proof of anything.
"""

from __future__ import annotations

import enum
from typing import Optional, Protocol

import msgspec


class End(str, enum.Enum):
    """How a program ended."""

    EXITED = "exited"
    """By itself, whatever its exit status."""
    SIGNALLED = "signalled"
    """By a signal that was not a limit of ours: a crash."""
    TIME = "time"
    """Its wall-clock or CPU time was used up."""
    MEMORY = "memory"
    """It, or what it started, took more memory than it may."""
    OUTPUT = "output"
    """It printed more than it may."""
    INFRASTRUCTURE = "infrastructure"
    """It could not be run, or not be watched to its end: no fault of the program, and never a score of 0."""


class Limits(msgspec.Struct, frozen=True):
    """What one program may use, together with everything that it starts."""

    wall_seconds: float = 10.0
    memory_bytes: int = 1024**3
    output_bytes: int = 4 * 1024**2
    """Of standard output; of standard error only a tail is kept, and as much again of it ends the program."""
    file_bytes: int = 64 * 1024**2
    """Everything that it keeps in its private folder."""
    num_processes: int = 64
    """Processes and threads."""
    num_files: int = 128
    """Open descriptors of each process."""


class Execution(msgspec.Struct, frozen=True):
    """What a program did."""

    end: End
    exit_status: Optional[int]
    """Of `EXITED`; the negative number of the signal for `SIGNALLED`; else None."""
    stdout: bytes
    """What it printed, complete for `EXITED`, at most the limit."""
    stderr: str
    """The last lines of standard error, for messages to people."""
    wall_seconds: float
    detail: str = ""
    """For messages to people: why it is `INFRASTRUCTURE`, which limit it was."""


class Isolation(msgspec.Struct, frozen=True):
    """What keeps a program away from the machine, as probed once by running things and seeing them refused."""

    level: int
    """0: fresh interpreter, limits, private folder, the whole process tree killed. 1: also no network, and the file
    system cannot be written or, beyond the interpreter and system libraries, read (no_new_privs, seccomp, Landlock).
    2: also namespaces of its own for users, mounts, processes and network. 3: a remote sandbox."""
    mechanisms: dict[str, str]
    """Name of each mechanism and `active`, or why it is not."""

    def describe(self) -> str:
        """One line for logs."""
        listed = ", ".join(f"{name}: {state}" for name, state in self.mechanisms.items())
        return f"isolation level {self.level} ({listed})"


class Sandbox(Protocol):
    """Runs programs one after the other; one per thread."""

    def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
        """Run a program to its end, at the latest `limits.wall_seconds` and a second from now.

        No process that it started is left afterwards, nor any file. Never raises for anything a program does.
        """
        ...

    def isolation(self) -> Isolation:
        """What is active."""
        ...

    def close(self) -> None:
        """Give back what the sandbox holds."""
        ...
