"""The hub and the relays as child processes: how a rank starts one, and what each of them does first and last."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from zbgrpo import failpoints
from zbgrpo.engine.hub_spec import HubSpec, HubStarted
from zbgrpo.errors import PeerLostError, ResourceError, ZbgrpoError
from zbgrpo.transport import messages as m
from zbgrpo.transport.memory import keep_freed_memory
from zbgrpo.transport.ring import RingWriter
from zbgrpo.transport.server import Server
from zbgrpo.transport.sockets import Address, Keys

_PR_SET_PDEATHSIG = 1
_PARENT_GONE = signal.SIGRTMIN
"""Sent by the kernel when the parent ends. Not SIGKILL, which would leave the files of the socket; nobody else uses
this one."""
_ABORT_SECONDS = 2.0
_GARBAGE_OBJECTS = 100_000
EXIT_ORPHANED = 3
HUB_TITLE = "hub"


class ChildProcess:
    """A hub or relay of this rank. It ends when this process ends, whatever the cause."""

    def __init__(self, module: str, spec: HubSpec, timeout_seconds: float) -> None:
        """Start it and wait for its first line; raises `ResourceError` with what it says if it cannot start."""
        self.title = title_of(spec)
        """What it is, for people: `hub` or `relay of node 1`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and says nothing below
            self._process.stdin.write(encode_spec(spec) + "\n")
            self._process.stdin.flush()
        killer = threading.Timer(timeout_seconds, self._process.kill)
        killer.start()
        line = self._process.stdout.readline()
        killer.cancel()
        if not line:
            raise PeerLostError(f"the {self.title} did not start (exit status {self._process.wait()})")
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            self._process.wait()
            raise ResourceError(answer["error"])
        self.started = msgspec.convert(answer, HubStarted)

    def poll(self) -> int | None:
        """Exit status, or None while it lives."""
        return self._process.poll()

    def close(self, timeout_seconds: float) -> None:
        """Wait for its end, then make sure of it, and that it leaves no files."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        _remove_files(self.started.address["endpoint"], self.started.ring_path)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _ParentGone(PeerLostError):
    """The rank that started this process has ended; nobody but its peers need be told."""


def child_main(run: Callable[[HubSpec, Server, RingWriter], int]) -> int:
    """Read the spec, open socket and ring, tell the parent where they are, run.

    The end of the process: whatever goes wrong is told in one line on stderr (to the parent instead while it still
    waits for the first line) and to all peers, and no file is left.
    """
    signal.signal(_PARENT_GONE, _parent_gone)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _PARENT_GONE)
    # Signals of the job are the ranks' business; the hub ends with them.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    title, started = "child process", False
    with contextlib.ExitStack() as stack:
        server: Server | None = None
        try:
            spec = decode_spec(sys.stdin.readline())
            title = title_of(spec)
            failpoints.arm(spec.failpoints, title.replace(" of node ", ":"))
            keys = Keys.generate() if spec.curve else None
            server = Server(spec.run_id, spec.host, spec.timing, spec.max_message_bytes, keys, spec.peers())
            stack.callback(server.close)
            num_local = sum(reader.node == spec.node for reader in spec.readers)
            ring = RingWriter.create("ring", spec.ring_bytes, num_local)
            stack.callback(ring.close)
            stack.callback(ring.unlink)
            failpoints.fire("init.hub")
            files = (server.address.endpoint, ring.path)
            threading.Thread(target=_exit_with_parent, args=files, daemon=True).start()
            first = HubStarted(asdict(server.address), ring.path, ring.capacity_bytes)
            print(msgspec.json.encode(first).decode(), flush=True)
            started = True
            # What is made from here on lives until its group has ended, and has no cycles: looking for some among it,
            # at every few hundred new objects, took a fifth of the hub's time.
            gc.set_threshold(_GARBAGE_OBJECTS)
            keep_freed_memory()
            return run(spec, server, ring)
        except Exception as error:
            signal.signal(_PARENT_GONE, signal.SIG_IGN)
            if started:
                _report(title, error, server)
            else:
                cause = str(error) if isinstance(error, ZbgrpoError) else _text(error)
                with contextlib.suppress(BrokenPipeError):
                    print(msgspec.json.encode({"error": f"the {title} cannot start: {cause}"}).decode(), flush=True)
            return 1
        finally:
            signal.signal(_PARENT_GONE, signal.SIG_IGN)  # this process is ending, and must clean up in peace


def _report(title: str, error: Exception, server: Server | None) -> None:
    """Say what went wrong: here, and to all peers."""
    reported = isinstance(error, PeerLostError) and error.reported
    # A hub whose rank has died has nothing to add: that rank has spoken, or its launcher does.
    silent = reported or (isinstance(error, _ParentGone) and title == HUB_TITLE)
    if not silent:
        print(f"zbgrpo: the {title} failed: {_text(error)}", file=sys.stderr, flush=True)
    if server is None:
        return
    text = str(error) if reported else f"the {title} failed: {_text(error)}"
    if isinstance(error, _ParentGone) and title == HUB_TITLE:
        text = "rank 0 (consumer 0) is gone, and the hub with it"
    with contextlib.suppress(Exception):  # what has failed may be the server itself
        for name, peer in server.peers.items():
            if not peer.left:
                server.send(name, m.Abort(text, reported=reported or not silent))
        deadline = time.monotonic() + _ABORT_SECONDS
        while not server.drained() and time.monotonic() < deadline:
            server.poll(0.02)
            server.tick()


def _text(error: Exception) -> str:
    """One line; with the place for an error that nobody raised on purpose."""
    text = f"{type(error).__name__.lstrip('_')}: {' '.join(str(error).split())}"
    if isinstance(error, ZbgrpoError):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(place.filename).name}:{place.lineno})"


def _parent_gone(number: int, frame: Any) -> None:
    raise _ParentGone("the rank that started it is gone")


def _exit_with_parent(endpoint: str, ring_path: str) -> None:
    """End this process when the parent's end of the pipe closes: the signal can miss a parent that is already gone,
    and a main thread that is stuck does not handle it."""
    while sys.stdin.readline():
        pass
    time.sleep(30.0)  # a parent that leaves in order closes the pipe a little before this process has finished
    _remove_files(endpoint, ring_path)
    os._exit(EXIT_ORPHANED)


def _remove_files(endpoint: str, ring_path: str) -> None:
    """What a process that was killed leaves behind; nothing if it ended in order."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(ring_path)
    if endpoint.startswith("ipc://"):
        # The folder is the socket's own, made for it with a random name.
        shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent, ignore_errors=True)


def title_of(spec: HubSpec) -> str:
    """What the process of this spec is, for people."""
    return HUB_TITLE if spec.hub_address is None else f"relay of node {spec.node}"


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
