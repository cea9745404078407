"""The hub and the relays as child processes: how a rank starts one, and what each of them does first and last."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from zbgrpo.engine.hub_spec import HubSpec, HubStarted
from zbgrpo.errors import PeerLostError, ResourceError, ZbgrpoError
from zbgrpo.transport.ring import RingWriter
from zbgrpo.transport.server import Server
from zbgrpo.transport.sockets import Address, Keys

_PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 3


class ChildProcess:
    """A hub or relay of this rank. It ends when this process ends, whatever the cause."""

    def __init__(self, module: str, spec: HubSpec, timeout_seconds: float) -> None:
        """Start it and wait for its first line; raises `ResourceError` with what it says if it cannot start."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(encode_spec(spec) + "\n")
        self._process.stdin.flush()
        killer = threading.Timer(timeout_seconds, self._process.kill)
        killer.start()
        line = self._process.stdout.readline()
        killer.cancel()
        if not line:
            raise PeerLostError(f"{module} did not start (exit status {self._process.wait()})")
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            self._process.wait()
            raise ResourceError(answer["error"])
        self.started = msgspec.convert(answer, HubStarted)

    def poll(self) -> int | None:
        """Exit status, or None while it lives."""
        return self._process.poll()

    def close(self, timeout_seconds: float) -> None:
        """Wait for its end, then make sure of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def child_main(run: Callable[[HubSpec, Server, RingWriter], int]) -> int:
    """Read the spec, open socket and ring, tell the parent where they are, run."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Signals of the job are the ranks' business; the hub ends with them.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    spec = decode_spec(sys.stdin.readline())
    keys = Keys.generate() if spec.curve else None
    ring: RingWriter | None = None
    server = Server(spec.run_id, spec.host, spec.timing, spec.max_message_bytes, keys)
    try:
        num_local = sum(reader.node == spec.node for reader in spec.readers)
        ring = RingWriter.create("zbgrpo", spec.ring_bytes, num_local)
        started = HubStarted(asdict(server.address), ring.path, ring.capacity_bytes)
        print(msgspec.json.encode(started).decode(), flush=True)
        threading.Thread(target=_exit_with_parent, args=(ring,), daemon=True).start()
        return run(spec, server, ring)
    except ZbgrpoError as error:
        if ring is None:
            print(msgspec.json.encode({"error": str(error)}).decode(), flush=True)
        else:
            print(f"zbgrpo: hub failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        server.close()
        if ring is not None:
            ring.unlink()
            ring.close()


def _exit_with_parent(ring: RingWriter) -> None:
    """End this process when the parent's end of the pipe closes (PDEATHSIG can miss a parent that is already gone)."""
    while sys.stdin.readline():
        pass
    time.sleep(30.0)  # a parent that leaves in order closes the pipe a little before this process has finished
    ring.unlink()
    import os

    os._exit(EXIT_ORPHANED)


def address_of(fields: dict[str, str]) -> Address:
    """An `Address` from its JSON form."""
    return Address(**fields)


def encode_spec(spec: HubSpec) -> str:
    """One line of JSON."""
    fields = msgspec.to_builtins(spec)
    if spec.restored is not None:
        fields["restored"] = base64.b64encode(msgspec.msgpack.encode(spec.restored)).decode()
    return msgspec.json.encode(fields).decode()


def decode_spec(line: str) -> HubSpec:
    """The inverse of `encode_spec`."""
    fields = msgspec.json.decode(line)
    if fields.get("restored") is not None:
        fields["restored"] = msgspec.msgpack.decode(base64.b64decode(fields["restored"]))
    return msgspec.convert(fields, HubSpec)
