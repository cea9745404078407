"""New weights between real processes: one source and two sinks over gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zbgrpo.weights.subscriber as subscriber_module
from tests.support import weight_ends
from tests.support.ranks import run_ranks
from tests.support.weight_ends import (
    BUCKET_BYTES,
    CPU,
    END,
    TIMEOUT_SECONDS,
    Net,
    Sink,
    Source,
    expected,
    same,
)
from zbgrpo.errors import WeightSyncError
from zbgrpo.weights.manifest import WeightManifest, digest, named_weights
from zbgrpo.weights.subscriber import Incoming

# ------------------------------------------------------------------------------------------------ scenarios


def steps(rank: int, store: Any, group: Any, dtype: torch.dtype, tied: bool) -> Any:
    """Versions 0 to 3, each sent when the sinks have applied the one before."""
    if rank == 0:
        source = Source(group, store, dtype, tied=tied)
        for version in range(4):
            source.publish(version)
            assert source.publisher.flush(TIMEOUT_SECONDS)
            store.wait([f"applied/{r}/{version}" for r in (1, 2)])
        return source.finish()
    sink = Sink(group, store, dtype, tied=tied)
    found = {"places": [sink.places], "untouched": [], "right": [], "incoming": [], "recomputed": [], "tied": []}
    while (version := sink.next_announced()) != END:
        before = sink.live
        kept = {name: tensor.clone() for name, tensor in before.items()}
        sink.subscriber.expect(version)
        sink.wait()
        found["untouched"].append(same(sink.live, kept))
        applied = sink.subscriber.apply()
        found["incoming"].append(applied)
        found["places"].append(sink.places)
        found["right"].append(same(sink.live, expected(version, dtype, tied=tied)))
        found["recomputed"].append(digest(sink.live))
        found["tied"].append(sink.model.head.weight is sink.model.embed.weight)
        store.set(f"applied/{rank}/{version}", "")
    found["again"] = sink.subscriber.apply()
    found["reports"] = sink.close()
    return found


def coalescing(rank: int, store: Any, group: Any) -> Any:
    """1 is being sent; 2 waits; 3 replaces it; 4, pinned, replaces that; 5 must wait for 4 to leave."""
    if rank > 0:
        sink = Sink(group, store, torch.float32)
        return sink.take_all(), same(sink.live, expected(5, torch.float32)), sink.close()
    go, sending = threading.Event(), threading.Event()

    def hold_the_first(version: int) -> None:
        sending.set()
        if version == 1:
            assert go.wait(TIMEOUT_SECONDS)

    source = Source(group, store, torch.float32, before_sending=hold_the_first)
    publisher = source.publisher
    reused = dict(named_weights(Net(1)))
    publisher.publish(1, reused.items())
    assert sending.wait(TIMEOUT_SECONDS)
    with torch.no_grad():  # training goes on in the same tensors
        for tensor in reused.values():
            tensor.zero_()
    source.publish(2)
    source.publish(3)
    source.publish(4, pinned=True)
    replaced, fifth_waits, original = publisher.coalesced, threading.Event(), publisher._condition.wait

    def wait(timeout: float | None = None) -> bool:
        if threading.current_thread() is fifth:
            fifth_waits.set()
        return original(timeout)

    publisher._condition.wait = wait  # type: ignore[method-assign]
    fifth = threading.Thread(target=source.publish, args=(5,))
    fifth.start()
    while fifth.is_alive() and not fifth_waits.wait(0.01):
        pass
    waited = fifth_waits.is_set()
    go.set()
    fifth.join(TIMEOUT_SECONDS)
    return source.finish(), replaced, publisher.coalesced, waited


def holding(rank: int, store: Any, group: Any) -> Any:
    """Version 1 is READY and not applied; 2 and 3 overwrite it."""
    if rank == 0:
        source = Source(group, store, torch.bfloat16)
        for version in (0, 1, 2, 3):
            source.publish(version)
            assert source.publisher.flush(TIMEOUT_SECONDS)
        return source.finish()
    sink = Sink(group, store, torch.bfloat16)
    seen = []
    while (version := sink.next_announced()) != END:
        sink.subscriber.expect(version)
        sink.wait_for(version)
        if version in (0, 3):
            seen.append(sink.subscriber.apply())
        seen.append(same(sink.live, expected(0 if version < 3 else 3, torch.bfloat16)))
    return seen, sink.close()


def keeping(rank: int, store: Any, group: Any) -> Any:
    """Version 1 is READY, due for evaluation and not applied when 2 and 3 are announced: they wait for it."""
    if rank == 0:
        source = Source(group, store, torch.float32)
        source.publish(1, pinned=True)
        assert source.publisher.flush(TIMEOUT_SECONDS)
        source.publish(2)
        store.wait([f"looked/{r}" for r in (1, 2)])
        assert source.publisher.flush(TIMEOUT_SECONDS)
        source.publish(3)
        return source.finish()
    sink = Sink(group, store, torch.float32)
    sink.subscriber.expect(sink.next_announced(), keep=True)
    sink.wait_for(1)
    sink.subscriber.expect(sink.next_announced())
    time.sleep(0.2)  # long enough for a receiver that does not wait to overwrite it
    kept = sink.subscriber.ready()
    store.set(f"looked/{rank}", "")
    applied = [sink.subscriber.apply()]
    sink.wait_for(2)
    sink.subscriber.expect(sink.next_announced())
    sink.wait_for(3)
    applied.append(sink.subscriber.apply())
    right = same(sink.live, expected(3, torch.float32))
    return kept, [each.version for each in applied], right, sink.next_announced() == END, sink.close()


def piecemeal(rank: int, store: Any, group: Any) -> Any:
    """The source stops before the last bucket, and again before the trailer: nothing is READY."""
    manifest = WeightManifest.of(Net(0), torch.float32, BUCKET_BYTES)
    if rank == 0:
        buckets = manifest.allocate(CPU)
        for name, view in manifest.views(buckets).items():
            view.copy_(expected(7, torch.float32)[name])
        trailer = torch.tensor([7, int(digest(manifest.views(buckets)), 16)])
        for number, tensor in enumerate([*buckets, trailer]):
            dist.broadcast(tensor, src=0, group=group)
            store.set(f"part/{number}", "")
            store.wait([f"looked/{r}/{number}" for r in (1, 2)])
        return len(buckets)
    sink = Sink(group, store, torch.float32)
    sink.subscriber.expect(7)
    early = []
    for number in range(len(manifest.bucket_sizes)):
        store.wait([f"part/{number}"])
        early += [sink.subscriber.ready(), sink.subscriber.apply(), not same(sink.live, expected(1000, torch.float32))]
        store.set(f"looked/{rank}/{number}", "")
    sink.wait()
    store.set(f"looked/{rank}/{len(manifest.bucket_sizes)}", "")
    applied = sink.subscriber.apply()
    return early, applied, same(sink.live, expected(7, torch.float32)), sink.close()


def late_reports(rank: int, store: Any, group: Any) -> Any:
    """Version 1 is applied after the source has begun with 2, and 2 before the digest of 1 is asked for in turn."""
    if rank == 0:
        source = Source(group, store, torch.float32)
        for version in (1, 2):
            source.publish(version)
            assert source.publisher.flush(TIMEOUT_SECONDS)
        return source.finish()
    sink = Sink(group, store, torch.float32)
    sink.subscriber.expect(sink.next_announced())
    sink.wait_for(1)
    joined, second_applied, receive = threading.Event(), threading.Event(), sink.subscriber._receive

    def slow(version: int, keep: bool) -> None:
        assert joined.wait(TIMEOUT_SECONDS)
        receive(version, keep)
        assert second_applied.wait(TIMEOUT_SECONDS)

    sink.subscriber._receive = slow  # type: ignore[method-assign]
    sink.subscriber.expect(sink.next_announced())
    sink.subscriber.apply()
    joined.set()
    sink.wait_for(2)
    sink.subscriber.apply()
    second_applied.set()
    return sink.close()


def damage(rank: int, store: Any, group: Any) -> Any:
    """Rank 1 gets a flipped bit, rank 2 was told of another version: both refuse, and stay refusing."""
    if rank == 0:
        source = Source(group, store, torch.float32)
        source.publish(4)
        return source.finish()
    sink = Sink(group, store, torch.float32)
    announced = sink.next_announced()
    honest = subscriber_module.digest

    def flip_then_digest(tensors: dict[str, torch.Tensor]) -> str:
        arrived = dict(tensors)
        next(iter(arrived.values())).view(-1).view(torch.uint8)[3] ^= 16
        return honest(arrived)

    if rank == 1:
        subscriber_module.digest = flip_then_digest
    try:
        sink.subscriber.expect(announced + (rank == 2))
        with pytest.raises(WeightSyncError) as raised:
            sink.wait()
    finally:
        subscriber_module.digest = honest
    with pytest.raises(WeightSyncError):
        sink.subscriber.ready()
    return str(raised.value), sink.subscriber.apply(), same(sink.live, expected(1000, torch.float32)), sink.close()


def backwards(rank: int, store: Any, group: Any) -> Any:
    """A source that sends an older version than the one in use."""
    if rank == 0:
        source = Source(group, store, torch.float32)
        for version in (5, 3):
            source.publish(version)
            assert source.publisher.flush(TIMEOUT_SECONDS)
        return source.finish()
    sink = Sink(group, store, torch.float32)
    sink.subscriber.expect(sink.next_announced())
    sink.wait_for(5)
    sink.subscriber.apply()
    sink.subscriber.expect(sink.next_announced())
    sink.wait_for(3)
    with pytest.raises(WeightSyncError) as raised:
        sink.subscriber.apply()
    sink.close()
    return str(raised.value), sink.subscriber.applied_version, same(sink.live, expected(5, torch.float32))


SCENARIOS: dict[str, Callable[[int, Any, Any], Any]] = {
    "steps fp32 tied": lambda *a: steps(*a, torch.float32, True),
    "steps fp32 untied": lambda *a: steps(*a, torch.float32, False),
    "steps bf16 tied": lambda *a: steps(*a, torch.bfloat16, True),
    "coalescing": coalescing,
    "holding": holding,
    "keeping": keeping,
    "piecemeal": piecemeal,
    "late reports": late_reports,
    "damage": damage,
    "backwards": backwards,
}


BROADCAST_ONLY = ("piecemeal",)


def all_scenarios(rank: int, store: Any, shared: bool) -> dict[str, Any]:
    weight_ends.SHARED_MEMORY = shared
    found = {}
    for name, scenario in SCENARIOS.items():
        if shared and name in BROADCAST_ONLY:
            continue
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT_SECONDS))
        found[name] = scenario(rank, dist.PrefixStore(name, store), group)
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["broadcast", "memory"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(3, partial(all_scenarios, shared=request.param), 2 * TIMEOUT_SECONDS)


# ------------------------------------------------------------------------------------------------ between processes


@pytest.mark.parametrize("kind", ["fp32 tied", "fp32 untied", "bf16 tied"])
def test_every_version_is_applied_whole_and_digests_agree(ranks: list[dict[str, Any]], kind: str) -> None:
    digests, *sinks = (each[f"steps {kind}"] for each in ranks)
    assert list(digests) == [0, 1, 2, 3] and len(set(digests.values())) == 4
    for found in sinks:
        assert found["incoming"] == [Incoming(version, digests[version]) for version in range(4)]
        assert found["recomputed"] == list(digests.values())
        assert found["reports"] == list(digests.items())
        assert found["right"] == found["untouched"] == [True] * 4
        assert found["tied"] == ["untied" not in kind] * 4
        assert found["again"] is None


def test_an_apply_exchanges_storages_and_copies_nothing(ranks: list[dict[str, Any]]) -> None:
    for each in ranks[1:]:
        for kind in ("fp32 tied", "fp32 untied", "bf16 tied"):
            start, *places = each[f"steps {kind}"]["places"]
            assert places[1] == places[3] == start and places[0] == places[2]
            assert not set(places[0]) & set(places[1])


def test_newer_versions_replace_a_waiting_one_but_never_a_pinned_one(ranks: list[dict[str, Any]]) -> None:
    (digests, replaced, replaced_in_the_end, waited), *sinks = (each["coalescing"] for each in ranks)
    assert list(digests) == [1, 4, 5]
    assert replaced == replaced_in_the_end == 2 and waited
    for versions, right, reports in sinks:
        assert versions == [1, 4, 5] and right
        assert reports == list(digests.items())
    # The weights were overwritten while version 1 was on its way: what was sent is what was published.
    assert digests[1] == digest(expected(1, torch.float32))


def test_a_version_that_is_held_back_is_overwritten_by_a_newer_one(ranks: list[dict[str, Any]]) -> None:
    digests, *sinks = (each["holding"] for each in ranks)
    for seen, reports in sinks:
        assert seen == [Incoming(0, digests[0]), True, True, True, Incoming(3, digests[3]), True]
        assert reports == [(0, digests[0]), (3, digests[3])]


def test_a_version_due_for_evaluation_is_not_overwritten_before_it_is_applied(ranks: list[dict[str, Any]]) -> None:
    for found in ranks[1:]:
        kept, applied, right, ended, _ = found["keeping"]
        assert kept.version == 1 and kept.keep
        assert applied == [1, 3] and right and ended


@pytest.mark.parametrize("ranks", [False], ids=["broadcast"], indirect=True)  # memory of the source has no halves
def test_half_a_version_is_never_ready(ranks: list[dict[str, Any]]) -> None:
    num_buckets, *sinks = (each["piecemeal"] for each in ranks)
    assert num_buckets > 1
    value = digest(expected(7, torch.float32))
    for early, applied, right, reports in sinks:
        assert early == [None, None, False] * num_buckets
        assert applied == Incoming(7, value) and right and reports == [(7, value)]


def test_reports_are_of_the_tensors_of_their_version(ranks: list[dict[str, Any]]) -> None:
    digests, *sinks = (each["late reports"] for each in ranks)
    assert sinks == [list(digests.items())] * 2


def test_damaged_weights_and_another_version_than_announced_are_refused(ranks: list[dict[str, Any]]) -> None:
    _, flipped, mistaken = (each["damage"] for each in ranks)
    for message, applied, untouched, reports in (flipped, mistaken):
        assert "arrived damaged" in message and applied is None and untouched and reports == []
    assert "version 4 arrived" in flipped[0]
    assert "version 5 arrived" in mistaken[0] and "of 4 was sent" in mistaken[0]


def test_versions_never_go_back(ranks: list[dict[str, Any]]) -> None:
    for message, version, untouched in (each["backwards"] for each in ranks[1:]):
        assert "version 3 arrived after 5" in message and version == 5 and untouched
