"""Groups on their way in the benchmarks of transport and hub: all arrive, once, as they were made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbgrpo.bench import hub, traffic_run, transport
from zbgrpo.bench.baselines import ray_queue
from zbgrpo.bench.traffic import Content, Mark, Shape, as_tensors
from zbgrpo.bench.traffic_run import FORWARDER, Traffic, hub_spec, run_traffic
from zbgrpo.errors import ProtocolError, ZbgrpoError
from zbgrpo.transport.plan_stream import TrainGroup
from zbgrpo.transport.wire import group_header, payload_crc, payload_frame, payload_from_frame
from zbgrpo.types import Uid

SHAPE = Shape(4, 3, 5, 7)


def group_of(row: int, content: Content) -> TrainGroup:
    payload = content.payload(row, 2)
    frame = payload_frame(payload)
    header = group_header(Uid(0, row), 10 + row, 0, payload, payload_crc(frame))
    return TrainGroup(header, payload_from_frame(header, bytearray(frame)))


def test_the_size_of_a_group_is_what_its_frame_takes() -> None:
    for shape in (SHAPE, hub.SHAPE, *(case.shape for case in transport.CASES.values())):
        assert len(payload_frame(Content(shape).payload(3, 0))) == shape.group_bytes
    assert 8000 < hub.SHAPE.group_bytes < 8400, "8 KB are promised"


def test_every_row_has_another_content_which_is_checked() -> None:
    content = Content(SHAPE)
    frames = {payload_frame(content.payload(row, 0)) for row in range(200)}
    assert len(frames) == 200
    group = group_of(7, content)
    content.check(group)
    wrong = TrainGroup(group_of(8, content).header, group.payload)
    with pytest.raises(ProtocolError, match="arrived with other"):
        content.check(wrong)
    group.payload.response_ids[5] ^= 1
    with pytest.raises(ProtocolError, match="response_ids"):
        content.check(group)


def test_tensors_have_the_values_and_memory_of_their_own() -> None:
    first, second = (group_of(7, Content(SHAPE)) for _ in range(2))
    tensors = as_tensors(first)
    for tensor, array in zip(tensors, second.payload, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    tensors[1].zero_()
    assert second.payload.response_ids.any()


@pytest.mark.parametrize("tensors", [False, True])
def test_the_forwarder_brings_all_groups_across(tmp_path: Path, tensors: bool) -> None:
    spec = hub_spec(SHAPE, 40, 1, 8, 40, tmp_path / "events" / "hub.jsonl")
    found = run_traffic(FORWARDER, spec, SHAPE, 120.0, tensors=tensors)
    assert found.groups == 40
    assert found.marks[-1].groups == 40
    assert set(found.cpu_seconds) == {"consumer", "producer 0", "hub"}
    assert found.groups_per_second() > 0


def test_the_hub_brings_all_groups_across_and_logs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "GROUPS_PER_STEP", 64)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    assert hub.main(["--groups", "100", "--producers", "2", "--runs", "1"]) == 0
    import json

    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["groups_per_s"] > 0 and result["producers"] == 2
    assert {"groups_per_s_min", "groups_per_s_max", "mb_per_s", "cores", "load"} <= result.keys()


def test_groups_that_are_lost_are_an_error() -> None:
    spec = hub_spec(SHAPE, 40, 1, 8, 40, Path("unused"))
    whole: dict[str, dict[str, Any]] = {"consumer": {"groups": 40}, "producer 0": {"groups": 40}}
    traffic_run._check(whole, spec, 0)
    for wrong, status in (({"consumer": {"groups": 39}}, 0), ({"producer 0": {"groups": 41}}, 0), ({}, 1)):
        with pytest.raises(ZbgrpoError, match="groups arrived"):
            traffic_run._check(whole | wrong, spec, status)


def test_a_rate_leaves_out_the_first_tenth() -> None:
    marks = [Mark(1, 0.0), Mark(50, 5.0), Mark(100, 10.0), Mark(550, 12.0), Mark(1000, 13.0)]
    assert Traffic(1000, marks, {}).groups_per_second() == pytest.approx(300.0)


def test_the_hub_reports_the_median_of_its_runs() -> None:
    runs = [Traffic(100, [Mark(10, 0.0), Mark(100, seconds)], {"hub": 0.01}) for seconds in (0.9, 0.45, 0.3)]
    result = hub.report(runs)
    assert (result["groups_per_s"], result["groups_per_s_min"], result["groups_per_s_max"]) == (200.0, 100.0, 300.0)
    assert result["cpu_microseconds_per_group"] == {"hub": 100.0}


# ------------------------------------------------------------------------------------------ against the baseline


class FakeRay:
    def __init__(self, rates: list[float]) -> None:
        self.rates = iter(rates)

    def __enter__(self) -> FakeRay:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def groups_per_second(self) -> float:
        return next(self.rates)


def test_ratios_are_of_interleaved_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = iter([100.0, 400.0, 900.0])
    monkeypatch.setattr(transport, "ray_queue", lambda python, shape: FakeRay([10.0, 20.0, 30.0]))
    monkeypatch.setattr(transport, "measure_ours", lambda case, folder: (next(ours), {"hub": 1.0}))
    result = transport.measure_case("small", transport.CASES["small"], Path("python"), 3)
    assert (result["ratio_small"], result["ratio_small_min"], result["ratio_small_max"]) == (20.0, 10.0, 30.0)
    assert result["small"]["groups_per_s"] == 400.0 and result["small"]["ray_groups_per_s"] == 20.0


def test_the_queue_of_the_baseline_gives_each_reader_a_copy_once() -> None:
    queue = ray_queue.BatchQueue(2)
    batch = ray_queue.padded_batch(1, 2, 3, 4)
    assert (queue.put(batch), queue.put(batch)) == (0, 1)
    first, second = queue.take(0), queue.take(0)
    assert first["input_ids"].shape == (1, 2, 7) and first["action_log_probs"].shape == (1, 2, 4)
    first["input_ids"].zero_()
    assert second["input_ids"].any() and batch["input_ids"].any()
    assert queue.take(0) is None, "both have had it"
    assert queue.take(1) is not None
