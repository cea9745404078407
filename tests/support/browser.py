"""A headless Chromium over its own pipe: pages from the disk, without a network, with what they say and draw."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE_SECONDS = 60.0


def find_browser() -> str | None:
    """Path of a Chromium, if there is one."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Commands are those of the DevTools protocol, as JSON over two pipes."""

    def __init__(self, program: str, profile: Path, width: int = 1280, height: int = 900) -> None:
        """`profile`: an empty folder of its own."""
        to_browser, from_browser = os.pipe(), os.pipe()
        self._write, self._read = to_browser[1], from_browser[0]
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        shell = ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._buffer = b""
        self._next = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the page has said, as events of the protocol."""
        targets = self.command("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.command("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0,
                     uploadThroughput=0)  # fmt: skip
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; raises AssertionError with the browser's words if it fails."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._next:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def resize(self, width: int, height: int, scale: float = 1.0, mobile: bool = False) -> None:
        """Size of the page in CSS pixels."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                     mobile=mobile)  # fmt: skip

    def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, path: Path, ready: str = "true") -> None:
        """Load a file and wait until the expression `ready` is true in it."""
        self.command("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(f"location.href !== 'about:blank' && document.readyState === 'complete' && ({ready})")

    def wait_for(self, expression: str) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.complaints()}"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page. Promises are waited for."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event (`mouseMoved`, `mousePressed`, `mouseReleased`, `mouseWheel`) at a place in the window."""
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def complaints(self) -> list[Any]:
        """Errors and warnings of the page so far: exceptions, the console, blocked or failed loads."""
        self.value("0")  # what happened before has arrived by then
        found: list[Any] = []
        for event in self.events:
            parameters = event.get("params", {})
            kind = event.get("method")
            if kind == "Runtime.exceptionThrown":
                found.append(parameters["exceptionDetails"])
            elif kind == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(parameters["args"])
            elif kind == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"])
            elif kind == "Network.loadingFailed":
                found.append(parameters)
        return found

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        """A picture of the page, below the window too."""
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
        return path
