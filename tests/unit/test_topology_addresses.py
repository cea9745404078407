"""Addresses and interfaces of this machine, and which interface ranks of several nodes meet on."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

import pytest
from torch.distributed import HashStore

from zbgrpo.groups import process_groups
from zbgrpo.groups.process_groups import interface_to_others
from zbgrpo.topology import addresses
from zbgrpo.topology.addresses import interface_of, route_to
from zbgrpo.topology.env import TorchrunEnv, prefer_interface

PORT = 29500
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def test_the_way_to_loopback_is_loopback() -> None:
    assert route_to("127.0.0.1", PORT) == "127.0.0.1"
    interface = interface_of("127.0.0.1")
    assert interface is not None and interface in {name for _, name in socket.if_nameindex()}


def test_an_address_of_nobody_here_has_no_interface() -> None:
    assert interface_of("203.0.113.7") is None


def test_every_address_of_an_interface_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = addresses._ENTRY
    table = b"".join(
        entry.pack(name, socket.inet_aton(address))
        for name, address in [
            (b"lo", "127.0.0.1"),
            (b"eth0", "10.0.0.5"),
            (b"eth0", "10.1.0.5"),
            (b"ib0:1", "10.2.0.5"),
        ]
    )

    def answer(probe: socket.socket, size: int, pointer: int) -> int:
        if pointer:
            ctypes.memmove(pointer, table, len(table))
        return len(table)

    monkeypatch.setattr(addresses, "_ask", answer)
    found = [interface_of(address) for address in ("127.0.0.1", "10.0.0.5", "10.1.0.5", "10.2.0.5", "10.2.0.6")]
    assert found == ["lo", "eth0", "eth0", "ib0:1", None]


def test_an_unknown_name_has_no_route() -> None:
    assert route_to("no.such.name.invalid", PORT) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {GLOO: "eth1", NCCL: "=eth1"}),
        ({GLOO: "ib0"}, {GLOO: "ib0", NCCL: "=eth1"}),
        ({NCCL: "^docker"}, {GLOO: "eth1", NCCL: "^docker"}),
        ({GLOO: "", NCCL: ""}, {GLOO: "eth1", NCCL: "=eth1"}),
    ],
)
def test_what_the_user_has_said_stays(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: dict[str, str]
) -> None:
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, before.get(name, ""))  # restored afterwards
        if name not in before:
            monkeypatch.delenv(name)
    prefer_interface("eth1")
    assert {name: os.environ[name] for name in (GLOO, NCCL)} == after


# ------------------------------------------------------------------------------------------------ among several nodes


def env_of(rank: int, world: int = 3) -> TorchrunEnv:
    return TorchrunEnv(rank, world, 0, 1, rank, "head", PORT, "run", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Routes and interfaces of this machine; filled by the test."""
    known: dict[str, str] = {}
    monkeypatch.setattr(process_groups, "route_to", lambda host, port: known.get(host))
    monkeypatch.setattr(process_groups, "interface_of", known.get)
    return known


def store_of(*own: str) -> Any:
    store = HashStore()
    for rank, address in enumerate(own):
        store.set(f"address/{rank}", address)
    return store


def test_the_interface_is_that_of_the_way_to_the_master(machine: dict[str, str]) -> None:
    machine.update({"10.0.0.2": "eth1"})
    assert interface_to_others(store_of("10.0.0.1", "10.0.0.2", "10.0.0.3"), env_of(1)) == "eth1"


def test_a_master_that_is_loopback_on_its_own_node_takes_the_way_to_another(machine: dict[str, str]) -> None:
    machine.update({"127.0.1.1": "lo", "10.0.0.3": "10.0.0.1", "10.0.0.1": "eth1"})
    assert interface_to_others(store_of("127.0.1.1", "127.0.1.1", "10.0.0.3"), env_of(0)) == "eth1"
    assert interface_to_others(store_of("127.0.1.1", "127.0.1.1", "10.0.0.3"), env_of(1)) == "eth1"


def test_launchers_on_one_machine_meet_on_loopback(machine: dict[str, str]) -> None:
    machine.update({"127.0.0.1": "lo"})
    assert interface_to_others(store_of("127.0.0.1", "127.0.0.1", "127.0.0.1"), env_of(2)) == "lo"


def test_without_a_route_nothing_is_chosen(machine: dict[str, str]) -> None:
    assert interface_to_others(store_of("", "10.0.0.2", "10.0.0.3"), env_of(0)) is None
    assert interface_to_others(store_of("10.0.0.9", "", ""), env_of(0)) is None, "no interface has the address"
