"""Which backend each process group gets, from the GPUs that the ranks say they use."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from zbgrpo.config import fields
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError, PeerLostError
from zbgrpo.groups import process_groups
from zbgrpo.topology.env import TorchrunEnv
from zbgrpo.topology.roles import Topology

NCCL, GLOO = "cpu:gloo,cuda:nccl", "gloo"
OWN, TRAINERS_SHARE, PRODUCERS_SHARE = ["a", "b", "c", "d"], ["a", "a", "b", "c"], ["a", "b", "c", "c"]
SOME_HAVE_NONE, NONE = ["a", "b", "c", ""], [""] * 4


def config_of(transport: str = "auto", staging: str = "device") -> RunConfig:
    return fields.build(
        {
            "cluster.num_trainers": 2,
            "cluster.num_inferencer": 2,
            "weights.transport": transport,
            "weights.staging": staging,
        }
    )


def backends(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, gpus: list[str], machines: str = "aabb"
) -> list[tuple[list[int], str]]:
    """Ranks and backend of each group that a rank makes, in order; by default on two machines."""
    store = HashStore()
    for rank, (gpu, machine) in enumerate(zip(gpus, machines, strict=True)):
        store.set(f"gpu/{rank}", gpu)
        store.set(f"machine/{rank}", machine)
    made: list[tuple[list[int], str]] = []
    monkeypatch.setattr(process_groups, "_new_group", lambda ranks, timeout, backend: made.append((ranks, backend)))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    process_groups.make_groups(store, Topology.build(config, 4), config)
    return made


@pytest.mark.parametrize(
    ("gpus", "consumers", "producers", "weights"),
    [
        (OWN, NCCL, NCCL, "nccl"),
        (TRAINERS_SHARE, GLOO, NCCL, GLOO),
        (PRODUCERS_SHARE, NCCL, GLOO, GLOO),
        (["a", "b", "a", "b"], NCCL, NCCL, GLOO),  # a producer and a consumer share one
        (SOME_HAVE_NONE, NCCL, GLOO, GLOO),
        (NONE, GLOO, GLOO, GLOO),
    ],
)
def test_nccl_only_between_ranks_with_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], consumers: str, producers: str, weights: str
) -> None:
    made = backends(monkeypatch, config_of(), gpus)
    assert made[:3] == [([0, 1], consumers), ([2, 3], producers), ([0, 2, 3], weights)]
    lines = [[0, 1], [0], [1], [0], [1]]  # of the consumers' mesh: dp, then pp and tp, which have one rank each
    assert made[3:] == [(line, consumers) for line in lines]


LINES = [(0, 2, 3)]


@pytest.mark.parametrize("gpus", [TRAINERS_SHARE, PRODUCERS_SHARE, NONE])
@pytest.mark.parametrize("asked", ["auto", "ipc"])
def test_on_one_machine_weights_go_through_memory(gpus: list[str], asked: str) -> None:
    """Unless each rank has a GPU of its own, which nccl takes."""
    assert process_groups.weights_transport(config_of(asked), gpus, "aaaa", LINES) == "ipc"
    # What counts is who gets weights from whom: here one stage on each machine, with producers of its own.
    assert process_groups.weights_transport(config_of(asked), gpus, "aabb", [(0, 1), (2, 3)]) == "ipc"


def test_memory_of_the_source_can_be_asked_for_with_gpus_too() -> None:
    assert process_groups.weights_transport(config_of("ipc"), OWN, "aaaa", LINES) == "ipc"
    assert process_groups.weights_transport(config_of("auto"), OWN, "aaaa", LINES) == "nccl"


@pytest.mark.parametrize(
    ("gpus", "machines", "culprit"),
    [(NONE, "aaab", "ranks 0 and 3 are on different machines"), (SOME_HAVE_NONE, "aaaa", "one of ranks 0 and 3 has")],
)
def test_memory_that_cannot_be_reached(gpus: list[str], machines: str, culprit: str) -> None:
    with pytest.raises(ConfigError, match=f"--weight-transport ipc: {culprit}"):
        process_groups.weights_transport(config_of("ipc"), gpus, machines, LINES)
    assert process_groups.weights_transport(config_of("auto"), gpus, machines, LINES) == "gloo"


def test_a_machine_is_a_node_a_boot_a_process_namespace_and_a_user() -> None:
    envs = [TorchrunEnv(rank, 3, 0, 1, node, "localhost", 1, "none", 0) for rank, node in ((0, 0), (1, 0), (2, 1))]
    first, same, other_node = map(process_groups._own_machine, envs)
    assert first == same != other_node and len(first.split()) == 4


@pytest.mark.parametrize("gpus", [OWN, TRAINERS_SHARE, NONE])
@pytest.mark.parametrize("staging", ["device", "cpu"])
def test_gloo_can_always_be_asked_for(monkeypatch: pytest.MonkeyPatch, gpus: list[str], staging: str) -> None:
    assert backends(monkeypatch, config_of("gloo", staging), gpus)[2] == ([0, 2, 3], GLOO)


@pytest.mark.parametrize(
    ("gpus", "culprit"),
    [(TRAINERS_SHARE, "ranks 0 and 1 share"), (PRODUCERS_SHARE, "ranks 2 and 3 share"), (SOME_HAVE_NONE, "rank 3")],
)
def test_nccl_between_ranks_that_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], culprit: str
) -> None:
    with pytest.raises(ConfigError, match=f"--weight-transport nccl.*{culprit}"):
        backends(monkeypatch, config_of("nccl"), gpus)


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_nccl_cannot_send_from_the_cpu(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    with pytest.raises(ConfigError, match=r"--weight-staging cpu.*--weight-transport gloo"):
        backends(monkeypatch, config_of(transport, "cpu"), OWN)
    assert backends(monkeypatch, config_of("auto", "cpu"), NONE)[2][1] == GLOO


def agreed(store: HashStore, world_size: int) -> list[str]:
    """What the ranks of one start get, each in a thread, the last one first."""
    found: dict[int, str] = {}

    def run(rank: int) -> None:
        found[rank] = process_groups.agree_on_start(store, rank, world_size, 20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return [found[rank] for rank in range(world_size)]


def test_starts_that_share_a_store_do_not_take_each_other_for_themselves() -> None:
    store, words = HashStore(), set()
    store.set("name/2", "of a start that did not get further")
    for _ in range(3):
        (word,) = set(agreed(store, 4))
        words.add(word)
    assert len(words) == 3


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    store.set("name/1", "of an earlier start")
    with pytest.raises(PeerLostError, match=r"ranks \[1, 2\] have not come"):
        process_groups.agree_on_start(store, 0, 3, 0.2)


def test_a_rank_names_the_gpu_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `device_of` chooses it, by a name that is the same for every process that uses it."""

    def properties(index: int) -> Any:
        return type("Properties", (), {"uuid": f"uuid-{index}"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    envs = [TorchrunEnv(rank, 3, rank, 3, 0, "localhost", 1, "none", 0) for rank in range(3)]
    assert [process_groups._own_gpu(env) for env in envs] == ["uuid-0", "uuid-1", "uuid-0"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process_groups._own_gpu(envs[0]) == ""
