"""The one file that knows ZeroMQ: a ROUTER for the hub, a DEALER for everybody else, and how they close.

A socket belongs to the thread that made it. Everything here is non-blocking or bounded by a timeout.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
import zmq.auth.thread

from zbgrpo.errors import ProtocolError, ResourceError

HIGH_WATER_MARK = 100_000  # messages; memory is bounded by leases and the plan window, not by ZeroMQ
_HEARTBEAT_MILLISECONDS = 2_000
_FOLDER_PREFIX = "zbgrpo-"
_YOUNG_NANOSECONDS = 60_000_000_000


@dataclass(frozen=True)
class Keys:
    """CURVE keys of one run: the hub's pair and the one pair that its peers use; nobody else is let in."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def generate(cls) -> Keys:
        """Fresh keys."""
        pairs = [*zmq.curve_keypair(), *zmq.curve_keypair()]
        return cls(*(key.decode() for key in pairs))


@dataclass(frozen=True)
class Address:
    """Where a hub listens: `ipc://` or one named TCP address, with the keys of a peer when CURVE is on."""

    endpoint: str
    server_public: str = ""
    client_public: str = ""
    client_secret: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return self.endpoint.startswith("ipc://")


class _AllowList:
    """Credentials provider of pyzmq: lets in the run's own key."""

    def __init__(self, client_public: str) -> None:
        self._key = client_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with this public key (in Z85) may connect."""
        return secrets.compare_digest(key, self._key)


class _Base:
    def __init__(self, kind: int, max_message_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_lock = threading.Lock()
        self.closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def wake(self) -> None:
        """End a running `wait` early. The only method that other threads may call."""
        # Under a lock, because after `close` the number of the descriptor may belong to somebody else's file.
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # the pipe is full: the waiter wakes anyway
            if not self.closed:
                os.write(self._wake_write, b"x")

    def wait(self, timeout_seconds: float, or_writable: bool = False) -> bool:
        """Wait for a message, for `wake`, or for a connection that takes messages; whether a message is there."""
        self._poller.modify(self._socket, zmq.POLLIN | zmq.POLLOUT if or_writable else zmq.POLLIN)
        ready = dict(self._poller.poll(max(0, int(timeout_seconds * 1000))))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        return bool(ready.get(self._socket, 0) & zmq.POLLIN)

    def _receive(self) -> list[memoryview] | None:
        receive = self._socket.recv
        try:
            frame = receive(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts = [frame.buffer]
        while frame.more:  # the rest is there too: a message arrives whole
            frame = receive(copy=False)
            parts.append(frame.buffer)
        return parts

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close; a second time changes nothing. What has not been handed to the network within `linger_seconds` is
        gone: drain by acknowledgements first. The last acknowledgement itself has nobody to wait for and is what the
        lingering is for."""
        linger = int(linger_seconds * 1000)
        self._socket.close(linger=linger)
        self._context.destroy(linger=linger)
        with self._wake_lock:
            if not self.closed:
                self.closed = True
                os.close(self._wake_read)
                os.close(self._wake_write)


class Router(_Base):
    """The hub's socket: knows its peers by name."""

    def __init__(self, host: str | None, max_message_bytes: int, keys: Keys | None = None) -> None:
        """Listen on `ipc://` in a private folder (host None) or on a free port of one named address.

        Raises `ProtocolError` for a host that means all addresses, `ResourceError` when it cannot be listened on.
        """
        if host is not None and _means_all(host):
            raise ProtocolError("the hub listens on one named address, never on all of them")
        self._folder: str | None = None
        super().__init__(zmq.ROUTER, max_message_bytes)
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _AllowList(keys.client_public))
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.server_secret.encode()
            self._socket.curve_publickey = keys.server_public.encode()
        try:
            self.address = Address(self._bind(host), *_public_part(keys))
        except zmq.ZMQError as error:
            self.close()
            raise ResourceError(f"the hub cannot listen on {host or 'ipc://'}: {error}") from error

    def _bind(self, host: str | None) -> str:
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if host is None:
            # A folder that only this user can enter, and not Linux's abstract names, which have no permissions: a run
            # id is no secret that could stand in for them.
            self._folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
            _remove_abandoned_folders(os.stat(self._folder).st_mtime_ns)
            endpoint = f"ipc://{self._folder}/{secrets.token_hex(4)}"
            self._socket.bind(endpoint)
            return endpoint
        return f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """Next message: name of the peer and its parts; None when there is none."""
        parts = self._receive()
        return None if parts is None else (bytes(parts[0]), parts[1:])

    def send(self, peer: bytes, parts: list) -> bool:
        """Send without blocking; False when the peer is not connected (the link sends again)."""
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK, copy=_copy(parts))
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def close(self, linger_seconds: float = 0.0) -> None:
        if self.closed:
            return
        if self._authenticator is not None:
            self._authenticator.stop()
        super().close(linger_seconds)
        if self._folder is not None:
            for name in os.listdir(self._folder):
                os.unlink(os.path.join(self._folder, name))
            os.rmdir(self._folder)


class Dealer(_Base):
    """A peer's socket: one connection to one hub or relay."""

    def __init__(self, address: Address, name: bytes, max_message_bytes: int) -> None:
        super().__init__(zmq.DEALER, max_message_bytes)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        if address.server_public:
            self._socket.curve_serverkey = address.server_public.encode()
            self._socket.curve_publickey = address.client_public.encode()
            self._socket.curve_secretkey = address.client_secret.encode()
        self._socket.connect(address.endpoint)

    def receive(self) -> list[memoryview] | None:
        """Next message's parts; None when there is none."""
        return self._receive()

    def send(self, parts: list) -> bool:
        """Send without blocking; False when there is no connection yet (the link sends again)."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=_copy(parts))
        except zmq.Again:
            return False
        return True

    def writable(self) -> bool:
        """Whether there is a connection that takes messages."""
        return bool(self._socket.poll(0, zmq.POLLOUT))


def _remove_abandoned_folders(now_ns: int) -> None:
    """Remove this user's socket folders in which nobody listens any more: their processes were killed.

    `now_ns`: the file system's time of this moment.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            status, entries = folder.stat(), list(folder.iterdir())
            # Not a young one: between binding and listening a socket looks as if nobody listened.
            young = now_ns - status.st_mtime_ns < _YOUNG_NANOSECONDS
            if status.st_uid == os.getuid() and not young and entries and all(map(_is_abandoned, entries)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Whether this is a Unix socket that nobody listens on."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _means_all(host: str) -> bool:
    """Whether binding to this host would listen on every interface, however that is spelled."""
    if host in ("", "*"):
        return True
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False  # the name of an interface, or nothing that can be bound to
    return any(ipaddress.ip_address(address[0]).is_unspecified for *_, address in found)


def _public_part(keys: Keys | None) -> tuple[str, ...]:
    return () if keys is None else (keys.server_public, keys.client_public, keys.client_secret)


def _copy(parts: list) -> bool:
    # Handing over large buffers without a copy pays; for small ones its bookkeeping costs more than the copy.
    return max(len(part) for part in parts) < 65_536
