"""Programs run by a sandbox service elsewhere, through the run_code interface of SandboxFusion.

A request is a POST with a JSON object: `code`, `language`, `stdin`, `run_timeout` (seconds), `memory_limit_MB`. The
reply holds `status` and, unless the service itself failed, `run_result` with `status` (Finished, TimeLimitExceeded,
Error), `return_code`, `stdout`, `stderr` and `execution_time`. The service keeps no other limit of ours, and tells no
program that ran out of memory from one that failed.

Requests go straight to the address, whatever proxies the environment names, and never follow a redirection.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
import time
from types import TracebackType
from typing import Optional
from urllib.parse import urlsplit

import msgspec

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.sandbox.base import End, Execution, Isolation, Limits

REPLY_SECONDS = 0.9
"""How long after a program's own time the service may still answer."""

_REPLY_OVERHEAD_BYTES = 64 * 1024
_MOST_JSON_BYTES = 6  # of one byte of output: \\u0000
_TAIL_CHARACTERS = 2000


class _RunResult(msgspec.Struct):
    status: str
    execution_time: Optional[float] = None
    return_code: Optional[int] = None
    stdout: Optional[str] = None
    stderr: Optional[str] = None


class _Reply(msgspec.Struct):
    status: str
    message: str = ""
    run_result: Optional[_RunResult] = None


class RemoteSandbox:
    """A sandbox service at one address. Every fault of the service or the network is `INFRASTRUCTURE`."""

    def __init__(self, url: str) -> None:
        """`ConfigError` if `url` is no http or https address. Nothing is sent yet."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--code-sandbox-url {url!r} is not an address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or not url.isascii():
            raise ConfigError(f"--code-sandbox-url must look like http://host:8080/run_code, not {url!r}")
        if any(character.isspace() or not character.isprintable() for character in url):
            raise ConfigError(f"--code-sandbox-url holds white space: {url!r}")
        self._url = url
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
        """Run a program there; see `Sandbox.run`. Standard input has to be UTF-8, which ours always is."""
        start = time.monotonic()
        request = {
            "code": source,
            "language": "python",
            "stdin": stdin.decode("utf-8", "replace"),
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": math.ceil(limits.memory_bytes / 2**20),
        }
        most_bytes = _MOST_JSON_BYTES * 2 * limits.output_bytes + _REPLY_OVERHEAD_BYTES
        try:
            body = self._post(msgspec.json.encode(request), start + limits.wall_seconds + REPLY_SECONDS, most_bytes)
            return _execution(msgspec.json.decode(body, type=_Reply), limits, time.monotonic() - start)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError, RecursionError) as error:
            detail = f"{self._url}: {str(error) or type(error).__name__}"
            return _failed(detail, time.monotonic() - start)

    def isolation(self) -> Isolation:
        """Level 3: whatever it is, it is elsewhere."""
        return Isolation(3, {f"remote sandbox {self._url}": "active"})

    def close(self) -> None:
        """There is nothing to give back: a connection lasts for one program."""

    def _post(self, body: bytes, deadline: float, most_bytes: int) -> bytes:
        """Body of the reply, whose status is 200. `OSError` or `HTTPException` otherwise, at the deadline at last."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=max(0.01, deadline - time.monotonic()))
        with contextlib.closing(connection):
            connection.connect()
            with _Deadline(connection.sock, deadline):
                connection.request("POST", self._target, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    raise OSError(f"the sandbox service answered {response.status} {response.reason}")
                received = response.read(most_bytes + 1)
            if len(received) > most_bytes:
                raise OSError(f"the reply of the sandbox service is longer than {most_bytes} bytes")
            if response.length:
                raise OSError(f"the reply of the sandbox service lacks {response.length} bytes")
            return received


class _Deadline:
    """Ends a connection at a time of the monotonic clock; a socket's own timeout starts anew with every byte."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._has_passed = threading.Event()
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._timer.cancel()
        if self._has_passed.is_set():
            raise TimeoutError("the sandbox service did not answer in time") from error

    def _end(self) -> None:
        self._has_passed.set()
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not that of TLS, which is no thing of two threads


def _execution(reply: _Reply, limits: Limits, seconds: float) -> Execution:
    result = reply.run_result
    if reply.status not in ("Success", "Failed") or result is None:
        return _failed(f"the sandbox service answered {reply.status}: {reply.message[-_TAIL_CHARACTERS:]}", seconds)
    wall_seconds = seconds if result.execution_time is None else max(0.0, result.execution_time)
    stdout = (result.stdout or "").encode()
    stderr = (result.stderr or "")[-_TAIL_CHARACTERS:]
    if result.status == "TimeLimitExceeded":
        return Execution(End.TIME, None, stdout[: limits.output_bytes], stderr, wall_seconds)
    if result.status != "Finished" or result.return_code is None:
        return _failed(f"the sandbox service answered {result.status} without an exit status", seconds)
    if len(stdout) > limits.output_bytes:
        return Execution(End.OUTPUT, None, stdout[: limits.output_bytes], stderr, wall_seconds)
    end = End.EXITED if result.return_code >= 0 else End.SIGNALLED
    return Execution(end, result.return_code, stdout, stderr, wall_seconds)


def _failed(detail: str, seconds: float) -> Execution:
    return Execution(End.INFRASTRUCTURE, None, b"", "", seconds, detail)
