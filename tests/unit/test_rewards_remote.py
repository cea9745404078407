"""The remote sandbox against a real HTTP server that answers well, badly, slowly or not at all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.code import CodeScorer
from zbgrpo.rewards.messages import RewardSpec, ScoreOutcome, ScoreRequest
from zbgrpo.rewards.sandbox import remote
from zbgrpo.rewards.sandbox.base import End, Execution, Isolation, Limits
from zbgrpo.rewards.sandbox.remote import RemoteSandbox

FINISHED = {"status": "Finished", "return_code": 0, "stdout": "out\n", "stderr": "err", "execution_time": 0.25}
Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


class Service:
    """A server whose answer is set by the test; it keeps the requests."""

    def __init__(self) -> None:
        self.answer: Answer = reply_with({})
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.done = threading.Event()  # nothing a handler waits for outlasts the test
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.paths.append(self.path)
                service.requests.append(json.loads(body))
                self.close_connection = True
                service.answer(self, service.requests[-1])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/run_code"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.done.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, missing: int = 0, location: str = "") -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) + missing))
    if location:
        handler.send_header("Location", location)
    handler.end_headers()
    handler.wfile.write(body)


def reply_with(changes: dict[str, Any], **outer: Any) -> Answer:
    result = {**FINISHED, **changes}
    reply = {"status": "Success", "message": "", "compile_result": None, "run_result": result, "files": {}, **outer}
    return lambda handler, request: send(handler, json.dumps(reply).encode())


def run(service: Service, stdin: bytes = b"in", **limits: Any) -> Execution:
    return RemoteSandbox(service.url).run("print('é')", stdin, Limits(**limits))


def test_a_program_runs_there(service: Service) -> None:
    execution = run(service, "ü\n".encode(), wall_seconds=3.5, memory_bytes=3 * 2**20 + 1)
    assert execution == Execution(End.EXITED, 0, b"out\n", "err", 0.25)
    assert service.paths == ["/run_code"]
    assert service.requests == [
        {"code": "print('é')", "language": "python", "stdin": "ü\n", "run_timeout": 3.5, "memory_limit_MB": 4}
    ]


@pytest.mark.parametrize(
    ("changes", "outer", "end", "exit_status"),
    [
        ({"return_code": 3}, {"status": "Failed"}, End.EXITED, 3),
        ({"return_code": -11}, {"status": "Failed"}, End.SIGNALLED, -11),
        ({"status": "TimeLimitExceeded", "return_code": None}, {"status": "Failed"}, End.TIME, None),
        ({"stdout": "é" * 51}, {}, End.OUTPUT, None),
        ({"stdout": "é" * 50}, {}, End.EXITED, 0),
        ({"stdout": None, "stderr": None}, {}, End.EXITED, 0),
        ({"return_code": None}, {}, End.INFRASTRUCTURE, None),
        ({"status": "Error"}, {"status": "Failed"}, End.INFRASTRUCTURE, None),
        ({}, {"status": "SandboxError", "message": "no pods"}, End.INFRASTRUCTURE, None),
        ({}, {"run_result": None}, End.INFRASTRUCTURE, None),
        ({"return_code": "0"}, {}, End.INFRASTRUCTURE, None),
        ({"stdout": 7}, {}, End.INFRASTRUCTURE, None),
        ({"status": None}, {}, End.INFRASTRUCTURE, None),
        ({"execution_time": -5}, {}, End.EXITED, 0),
    ],
)
def test_how_it_ended(
    service: Service, changes: dict[str, Any], outer: dict[str, Any], end: End, exit_status: int | None
) -> None:
    service.answer = reply_with(changes, **outer)
    execution = run(service, output_bytes=100)
    assert (execution.end, execution.exit_status) == (end, exit_status)
    assert len(execution.stdout) <= 100
    assert execution.wall_seconds >= 0
    assert bool(execution.detail) is (end is End.INFRASTRUCTURE)
    if "message" in outer:
        assert "no pods" in execution.detail


def close_at_once(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def promise_more(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    send(handler, json.dumps({"status": "Success", "run_result": FINISHED}).encode(), missing=1)


def no_http(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.wfile.write(b"220 mail.example ready\r\n")


def endless_headers(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000)


def redirect(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    send(handler, b"", 307, location="/elsewhere")


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (lambda handler, request: send(handler, b"oh", 500), "500"),
        (lambda handler, request: send(handler, b"{}", 404), "404"),
        (lambda handler, request: send(handler, b"{}", 204), "204"),
        (lambda handler, request: send(handler, b"<html>"), ""),
        (lambda handler, request: send(handler, b"[]"), ""),
        (lambda handler, request: send(handler, b'{"status": "Success"'), ""),
        (lambda handler, request: send(handler, b'{"status": "\xff"}'), ""),
        (lambda handler, request: send(handler, b'{"a": ' + b"[" * 100_000), ""),
        (lambda handler, request: send(handler, b" " * 3_000_000), "longer than"),
        (redirect, "307"),
        (close_at_once, ""),
        (promise_more, "lacks"),
        (no_http, ""),
        (endless_headers, ""),
    ],
)
def test_a_bad_answer_is_a_fault_of_the_service(service: Service, answer: Answer, part: str) -> None:
    service.answer = answer
    execution = run(service, output_bytes=100_000)
    assert execution.end is End.INFRASTRUCTURE
    assert part in execution.detail
    assert service.url in execution.detail
    assert service.paths == ["/run_code"]


@pytest.mark.parametrize("headers_first", [False, True])
def test_a_slow_answer_ends_at_the_deadline(
    service: Service, monkeypatch: pytest.MonkeyPatch, headers_first: bool
) -> None:
    """Also one that says a byte now and then, which no timeout of a socket ends."""
    monkeypatch.setattr(remote, "REPLY_SECONDS", 0.2)

    def drip(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        if headers_first:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not service.done.wait(0.02):
            try:
                handler.wfile.write(b" ")
                handler.wfile.flush()
            except OSError:
                return

    service.answer = drip
    execution = run(service, wall_seconds=0.1)
    assert execution.end is End.INFRASTRUCTURE
    assert "in time" in execution.detail


def test_a_silent_service_ends_at_the_deadline(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REPLY_SECONDS", 0.2)
    service.answer = lambda handler, request: service.done.wait(60.0) and None
    execution = run(service, wall_seconds=0.1)
    assert execution.end is End.INFRASTRUCTURE


def test_no_service_at_all() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        execution = RemoteSandbox(f"http://127.0.0.1:{taken.getsockname()[1]}/").run("x", b"", Limits())
    assert execution.end is End.INFRASTRUCTURE
    assert "refused" in execution.detail


def test_tls_with_a_server_that_has_none(service: Service) -> None:
    execution = RemoteSandbox(service.url.replace("http:", "https:")).run("x", b"", Limits())
    assert execution.end is End.INFRASTRUCTURE


@pytest.mark.parametrize(
    "url",
    ["", "host:8080", "host/run_code", "ftp://host/run_code", "http://", "http:///run_code", "http://host:port/",
     "http://host:99999/", "http://user:secret@host/", "http://host/a b", "http://host/\r\nX: y", "http://höst/",
     "file:///etc/passwd", "http://[::1/"],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--code-sandbox-url"):
        RemoteSandbox(url)


def test_isolation() -> None:
    sandbox = RemoteSandbox("https://sandbox.example/run_code?key=1")
    assert sandbox.isolation() == Isolation(3, {"remote sandbox https://sandbox.example/run_code?key=1": "active"})
    sandbox.close()


def run_for_real(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", request["code"]], input=request["stdin"], capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    reply_with(
        {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr,
         "execution_time": time.monotonic() - start}
    )(handler, request)  # fmt: skip


@pytest.mark.parametrize(
    "test_cases",
    [
        {"inputs": ["1\n", "20\n"], "outputs": ["2", "21"]},
        {"inputs": [[1], [20]], "outputs": [2, 21], "fn_name": "f"},
        {"assert": ["assert f(1) == 2", "assert f(20) == 21"]},
    ],
)
def test_all_kinds_of_test_cases_work_there(service: Service, test_cases: dict[str, Any]) -> None:
    service.answer = run_for_real
    scorer = CodeScorer(RemoteSandbox(service.url), RewardSpec("code", 30.0))
    right = "def f(n): return n + 1\nif __name__ == '__main__': print(f(int(input())))"
    outcomes = [
        scorer.score(ScoreRequest(f"```python\n{source}\n```", test_cases=test_cases))
        for source in (right, right.replace("n + 1", "2"))
    ]
    assert outcomes == [ScoreOutcome(10.0, 1.0, 1.0), ScoreOutcome(0.0, 1.0, 0.0)]


def test_a_service_that_fails_now_and_then_costs_nothing(service: Service) -> None:
    answers = [run_for_real, redirect, run_for_real, no_http, close_at_once]

    def next_answer(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        answers.pop()(handler, request)

    service.answer = next_answer
    scorer = CodeScorer(RemoteSandbox(service.url), RewardSpec("code", 30.0))
    cases = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    outcome = scorer.score(ScoreRequest("```python\nprint(input())\n```", test_cases=cases))
    assert outcome == ScoreOutcome(10.0, 1.0, 1.0)
