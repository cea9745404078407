"""Weights & Biases: what arrives in the file of a run in offline mode, read back with wandb's own messages."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.config.load import load_config, to_tree
from zbgrpo.errors import ConfigError
from zbgrpo.observe.metrics import METRIC_KEYS, MetricsWriter
from zbgrpo.observe.wandb_sink import project_name, require_wandb

FULL: dict[str, Any] = dict.fromkeys(METRIC_KEYS, 1.0)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """wandb, offline, with all of its folders in the test's."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    yield wandb
    wandb.teardown()


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file: a log of LevelDB (blocks of 32 KiB; crc, length, kind) after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def items(entries: Any) -> dict[str, Any]:
    return {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def run_files(log_dir: Path) -> list[Path]:
    """The files of its runs, in the order of their folders' names, which begin with the time."""
    return sorted((log_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def history(path: Path) -> list[dict[str, Any]]:
    return [items(record.history.item) for record in records(path) if record.WhichOneof("record_type") == "history"]


def test_metrics_and_config_arrive(tmp_path: Path, offline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = to_tree(load_config(["-p", "my run", "-lr", "3e-6", "-a", "DAPO"]).config)
    logs = tmp_path / "logs"
    writer = MetricsWriter(logs, wandb=True, project="my run", config_dict=config)
    writer.write_eval({"step": 0, "task": "gsm8k", "accuracy": 0.25})
    writer.write(1, {**FULL, "train/loss": 0.5, "train/kl": None, "reward/mean": float("nan"), "own/word": "text"})
    writer.write(2, {**FULL, "train/loss": 0.25})
    print("a line of the progress bar")
    writer.close()
    writer.close()
    assert capsys.readouterr().out == "a line of the progress bar\n"
    (path,) = run_files(logs)
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    assert run.project == "my run"
    sent = items(run.config.update)
    assert {key: sent[key] for key in config} == config
    assert sent["trainer"]["learning_rate"] == 3e-6 and sent["algorithm"]["clip_high"] == 0.28
    evaluation, first, second = history(path)
    assert (evaluation["step"], evaluation["eval/gsm8k/accuracy"]) == (0, 0.25)
    assert (first["step"], first["train/loss"], second["step"], second["train/loss"]) == (1, 0.5, 2, 0.25)
    assert set(METRIC_KEYS) - set(first) == {"train/kl", "reward/mean"} and set(METRIC_KEYS) <= set(second)
    assert "own/word" not in first
    kinds = [record.WhichOneof("record_type") for record in records(path)]
    assert kinds[-1] == "exit", "the run is finished"
    assert "output_raw" not in kinds, "what a run prints is not captured"
    assert not (tmp_path / "wandb_dir").exists(), "everything is in the run's own log folder"


def test_step_is_the_axis_of_every_metric(tmp_path: Path, offline: Any) -> None:
    writer = MetricsWriter(tmp_path, wandb=True)
    writer.write(1, FULL)
    writer.close()
    (path,) = run_files(tmp_path)
    axes = {
        (record.metric.name or record.metric.glob_name): record.metric.step_metric
        for record in records(path)
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes["*"] == "step" and "step" in axes


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after step 5, gone on from state 3: steps 4 and 5 come again and are not lost."""
    for first, last in ((1, 5), (4, 6)):
        writer = MetricsWriter(tmp_path, wandb=True, project="p", first_step=first)
        for step in range(first, last + 1):
            writer.write(step, {**FULL, "train/loss": step + first / 10})
        writer.close()
    before, after = run_files(tmp_path)
    assert before.name == after.name, "one run has one id"
    assert (tmp_path / "wandb_run_id").read_text().strip() in before.name
    assert [row["step"] for row in history(before)] == [1, 2, 3, 4, 5]
    assert [(row["step"], row["train/loss"]) for row in history(after)] == [(4, 4.4), (5, 5.4), (6, 6.4)]


def test_project_names_that_wandb_refuses() -> None:
    assert project_name("GRPO") == "GRPO"
    assert project_name("run: 50% of #1?") == "run- 50- of -1-"
    assert len(project_name("x" * 300)) == 128


def test_a_refused_character_does_not_stop_a_run(tmp_path: Path, offline: Any) -> None:
    MetricsWriter(tmp_path, wandb=True, project="lr:1e-6").close()
    (path,) = run_files(tmp_path)
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    assert run.project == "lr-1e-6"


def test_without_wandb_one_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for attempt in (require_wandb, lambda: MetricsWriter(tmp_path / "logs", wandb=True)):
        with pytest.raises(ConfigError, match=r"^observe\.wandb is on.* pip install wandb") as error:
            attempt()
        assert "\n" not in str(error.value) and error.value.__suppress_context__
    assert not (tmp_path / "logs").exists()


def test_a_run_that_wandb_cannot_start_is_one_clear_error(
    tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise offline.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(offline, "init", refuse)
    with pytest.raises(ConfigError, match=r"No API key configured\. Use `wandb login`") as error:
        MetricsWriter(tmp_path, wandb=True)
    assert "WANDB_MODE=offline" in str(error.value) and "\n" not in str(error.value)


def test_offline_needs_no_network_at_all(tmp_path: Path, offline: Any) -> None:
    """In a network namespace of its own, without so much as a loopback address that is up."""
    isolated = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], check=False, timeout=10).returncode:
        pytest.skip("needs network namespaces")
    program = (
        "from zbgrpo.observe.metrics import MetricsWriter\n"
        f"writer = MetricsWriter({str(tmp_path)!r}, wandb=True)\n"
        "writer.write(1, {'train/loss': 0.5})\n"
        "writer.close()\n"
    )
    done = subprocess.run([*isolated, sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    (path,) = run_files(tmp_path)
    assert [row["train/loss"] for row in history(path)] == [0.5]
