"""Two network namespaces of this machine, which stand for two nodes, and the link between them. Needs root.

A namespace has its loopback and its end of the link, and no way to anywhere else. The plain link is a veth pair. One
with a delay or losses is a pair of TUN devices, and a thread of this process carries the packets. `tc netem` would do
the same, but kernels of virtual machines are often built without it, and this link counts what it loses.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import secrets
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.launching import start

_COMMAND_SECONDS = 20.0
_END_SECONDS = 10.0
_GUARD = """
read -r
for name in "$@"; do
    for _ in $(seq 100); do
        left=$(ip netns pids "$name") && [ -n "$left" ] || break
        kill -KILL $left
        sleep 0.05
    done
    ip netns delete "$name"
done
"""
"""Removes namespaces, with what runs in them, when its input ends: when this process does, however it does."""
_TUNSETIFF = 0x400454CA
_TUN_PLAIN = 0x0001 | 0x1000  # IP packets, without a header of the device's own
_LARGEST_PACKET = 1 << 16


class NamespacesError(Exception):
    """Namespaces cannot be made here; the message says why."""


class Node:
    """One namespace. `name` and the name of its end of the link, `device`, are random."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.device, self.address = name, name, address
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, command: list[str], folder: Path, hosts: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a process in this namespace; what it prints is piped. It is ended with the namespace at the latest.

        `hosts`: what it sees as /etc/hosts.
        """
        # The variables that say which interface to use must not come from the machine that the tests run on.
        prefix = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME"]
        prefix += [f"{name}={value}" for name, value in environment.items()]
        if hosts is not None:  # `ip netns exec` makes a mount namespace, so that nobody else sees this
            prefix = ["bash", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts), *prefix]
        process = start(["ip", "netns", "exec", self.name, *prefix, *command], folder)
        self.started.append(process)
        return process

    def processes(self) -> list[int]:
        """Ids of all processes in this namespace: those that `start` has started, and what has come of them."""
        return [int(line) for line in _ip("netns", "pids", self.name).split()]

    def end(self) -> None:
        """End all processes in this namespace, and no others."""
        deadline = time.monotonic() + _END_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        for started in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_END_SECONDS)
            if started.stdout is not None:
                started.stdout.close()


class Network:
    """Two nodes and their link."""

    def __init__(self, delay_seconds: float, loss: float) -> None:
        # Above 127: of two addresses gloo connects to the lower one, and would not notice that a loopback one is wrong.
        token, net = secrets.token_hex(4), f"172.{16 + secrets.randbelow(16)}.{secrets.randbelow(256)}"
        self.nodes = tuple(Node(f"zb{token}{end}", f"{net}.{end + 1}") for end in range(2))
        self.carrier = _Carrier(delay_seconds, loss) if delay_seconds or loss else None
        """None for a plain link."""
        self._guard: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Make all of it. Raises NamespacesError, after which `remove` is still to be called."""
        first, second = self.nodes
        self._guard = subprocess.Popen(
            ["bash", "-c", _GUARD, "guard", first.name, second.name], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for node in self.nodes:
            _ip("netns", "add", node.name)
        if self.carrier is None:
            ends = ["type", "veth", "peer", "name", second.device, "netns", second.name]
            _ip("link", "add", first.device, "netns", first.name, *ends)
        for node in self.nodes:
            if self.carrier is not None:
                self.carrier.add_end(node.device)  # a device that is moved stays connected to its descriptor
                _ip("link", "set", node.device, "netns", node.name)
            _ip("-n", node.name, "address", "add", f"{node.address}/30", "dev", node.device)
            _ip("-n", node.name, "link", "set", "lo", "up")
            _ip("-n", node.name, "link", "set", node.device, "up")
        if self.carrier is not None:
            self.carrier.start()

    def cut(self) -> None:
        """Take the link down, for good. No connection is closed by that: what is sent is lost."""
        _ip("-n", self.nodes[0].name, "link", "set", self.nodes[0].device, "down")

    def remove(self) -> None:
        """End what runs in the namespaces, and remove them and the link; also what `make` has made half."""
        for node in self.nodes:
            with contextlib.suppress(NamespacesError):  # it was not made
                node.end()
        if self.carrier is not None:
            self.carrier.close()
        if self._guard is not None:
            self._guard.communicate(timeout=_COMMAND_SECONDS)


@contextlib.contextmanager
def two_namespaces(delay_seconds: float = 0.0, loss: float = 0.0) -> Iterator[Network]:
    """Two connected namespaces; each direction of the link delays its packets and loses this share of them.

    Nothing of it is left afterwards, however the body, or this process, ends. Raises NamespacesError.
    """
    network = Network(delay_seconds, loss)
    try:
        network.make()
        yield network
    finally:
        network.remove()


class _Carrier:
    """Carries packets between two TUN devices."""

    def __init__(self, delay_seconds: float, loss: float) -> None:
        self.delay_seconds, self.loss = delay_seconds, loss
        self.num_carried = self.num_lost = 0
        self._ends: list[int] = []
        self._stop_read, self._stop_write = os.pipe()
        self._random = random.Random(0)
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)

    def add_end(self, device: str) -> None:
        """Make a TUN device in the namespace of this process."""
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._ends.append(end)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN_PLAIN))
        except OSError as error:
            raise NamespacesError(f"/dev/net/tun: {error}") from error

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; the devices are gone then."""
        os.close(self._stop_write)
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (*self._ends, self._stop_read):
            os.close(descriptor)

    def _run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # when it is due, its number, where to, the packet
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            readable, _, _ = select.select([*self._ends, self._stop_read], [], [], timeout)
            if self._stop_read in readable:
                return
            for end in readable:
                with contextlib.suppress(OSError):  # the device is down
                    packet = os.read(end, _LARGEST_PACKET)
                    if self._random.random() < self.loss:
                        self.num_lost += 1
                        continue
                    self.num_carried += 1
                    other = self._ends[1 - self._ends.index(end)]
                    heapq.heappush(waiting, (time.monotonic() + self.delay_seconds, self.num_carried, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(end, packet)


def _ip(*arguments: str) -> str:
    """What `ip` prints. Raises NamespacesError with what it complains of."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except FileNotFoundError:
        raise NamespacesError("there is no program `ip` (apt-get install iproute2)") from None
    if done.returncode != 0:
        raise NamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
