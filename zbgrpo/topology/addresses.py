"""Which of its addresses this machine has towards another one, and the network interface that has an address."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_SIOCGIFCONF = 0x8912
_ENTRY = struct.Struct("16s4x4s16x")
"""struct ifreq with a sockaddr_in in it: name, family and port (skipped), IPv4 address."""


def route_to(host: str, port: int) -> str | None:
    """This machine's own IPv4 address on the route to a host; None without a route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address, be it its only one or not; None if none has it."""
    wanted = socket.inet_aton(address)
    return next((name for name, found in _addresses() if found == wanted), None)


def _addresses() -> list[tuple[str, bytes]]:
    """Interface and IPv4 address of all addresses of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        size = _ask(probe, 0, 0)  # without a buffer the kernel says how large it must be
        buffer = array.array("B", bytes(size))
        size = _ask(probe, size, buffer.buffer_info()[0])
    return [
        (name.partition(b"\0")[0].decode(), address)
        for name, address in _ENTRY.iter_unpack(bytes(buffer)[: size - size % _ENTRY.size])
    ]


def _ask(probe: socket.socket, size: int, pointer: int) -> int:
    """SIOCGIFCONF with a buffer of `size` bytes; the number of bytes that it has filled or would fill."""
    answer: tuple[int, int] = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, pointer)))
    return answer[0]
