"""metrics.jsonl and its copies."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbgrpo.observe.metrics import METRIC_KEYS, MetricsWriter, read_metrics

FULL: dict[str, Any] = dict.fromkeys(METRIC_KEYS, 1.0)


def lines_of(path: Path) -> list[dict[str, Any]]:
    def reject(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def test_the_documented_keys() -> None:
    expected = """step wall_s reward/mean reward/format_acc reward/ans_acc reward/zero_variance_groups train/loss
    train/kl train/entropy train/grad_norm train/lr train/clip_ratio train/sample_utilization train/overlong_ratio
    rollout/response_length_mean rollout/temperature rollout/effective_groups rollout/logprob_gap rollout/ess
    staleness/mean staleness/max staleness/tokens_left_out throughput/completion_tokens_per_s
    weights/version_applied_min weights/broadcast_s weights/stall_s weights/producers_blocked
    ledger/leased ledger/buffered ledger/consumed ledger/filtered ledger/dropped bubble/consumers
    bubble/producers memory/rss_mb"""
    assert list(METRIC_KEYS) == expected.split()
    assert all(METRIC_KEYS.values())


def test_every_key_is_there_and_non_finite_is_null(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {**FULL, "train/loss": float("nan"), "train/kl": None, "own/extra": np.float32("inf")})
    with caplog.at_level(logging.WARNING):
        writer.write(2, {"train/loss": np.float32(0.5), "ledger/leased": np.int64(4)})
        writer.write(4, {"train/loss": -float("inf"), "ledger/leased": 4})
    first, second, third = lines_of(tmp_path / "metrics.jsonl")  # readable before close
    writer.close()
    assert set(first) == set(METRIC_KEYS) | {"own/extra"}
    assert [first[key] for key in ("step", "train/loss", "train/kl", "own/extra", "train/lr")] == [
        1,
        None,
        None,
        None,
        1.0,
    ]
    assert set(second) == set(METRIC_KEYS)
    assert (second["train/loss"], second["ledger/leased"], second["wall_s"]) == (0.5, 4, None)
    assert third["train/loss"] is None
    assert len(caplog.records) == 1, "missing keys are reported once"
    assert "reward/mean" in caplog.text
    assert read_metrics(tmp_path) == [first, second, third]


def test_steps_only_grow(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=3)
    with pytest.raises(ValueError, match="step 2"):
        writer.write(2, FULL)
    writer.write(3, FULL)
    with pytest.raises(ValueError, match="step 3"):
        writer.write(3, FULL)
    writer.write(5, FULL)
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [3, 5]


def test_resuming_moves_later_lines_aside(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, FULL)
        writer.write_eval({"step": step, "task": "gsm8k", "accuracy": 0.1 * step})
    writer.close()
    writer = MetricsWriter(tmp_path, first_step=4)
    writer.write(4, FULL)
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl.void-3")] == [4, 5]
    assert [line["step"] for line in lines_of(tmp_path / "eval.jsonl")] == [1, 2, 3]


def test_eval_and_summary(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write_eval({"step": 0, "task": "gsm8k", "accuracy": 0.25, "pass@4": float("nan")})
    path = writer.write_summary({"steps": 3, "seconds": float("inf"), "accuracy_after": np.float64(0.5)})
    writer.close()
    writer.close()
    assert lines_of(tmp_path / "eval.jsonl") == [{"step": 0, "task": "gsm8k", "accuracy": 0.25, "pass@4": None}]
    assert json.loads(path.read_text()) == {"steps": 3, "seconds": None, "accuracy_after": 0.5}
    assert not list(tmp_path.glob("*.tmp*"))


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, {**FULL, "train/loss": 0.5, "train/kl": None, "own/word": "text"})
    writer.write_eval({"step": 1, "task": "gsm8k", "accuracy": 0.25})
    writer.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    found = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    scalars = {(event.step, v.tag): v.simple_value for event in found for v in event.summary.value}
    assert scalars[1, "train/loss"] == 0.5
    assert scalars[1, "eval/gsm8k/accuracy"] == 0.25
    assert (1, "train/kl") not in scalars
    assert (1, "own/word") not in scalars


def test_without_tensorboard_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, FULL)
    writer.close()
    assert len(caplog.records) == 1
    assert "pip install tensorboard" in caplog.text
    assert len(read_metrics(tmp_path)) == 1
