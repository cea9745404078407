"""The plan that --dry-run prints, and what it reads to make it."""

from __future__ import annotations

import gzip
import json
import re
import struct
from pathlib import Path

import pytest

from zbgrpo.config.dryrun import count_rows, describe_plan, num_steps
from zbgrpo.config.load import load_config
from zbgrpo.config.model_size import read_model_size
from zbgrpo.config.schema import RunConfig
from zbgrpo.config.sizes import max_group_bytes, ring_bytes
from zbgrpo.errors import DataError, ModelError


def config_of(*argv: str) -> RunConfig:
    return load_config(argv).config


def plan(*argv: str, num_rows: int | None = 1000) -> dict[str, str]:
    """The rows of the plan by name."""
    text = describe_plan(config_of(*argv), num_rows)
    return dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in text.splitlines() if line.startswith("  "))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 8, "vocab_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**sizes, "num_key_value_heads": 2}), encoding="utf-8")
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a": [100, 8], "b": [8]})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"c": [2, 2, 2], "scalar": []})
    return folder


class TestRows:
    def test_blank_lines_do_not_count(self, tmp_path: Path) -> None:
        text = '{"a": 1}\n\n   \n{"a": 2}\r\n\r\n{"a": 3}'
        (tmp_path / "d.jsonl").write_text(text, encoding="utf-8", newline="")
        assert count_rows(str(tmp_path / "d.jsonl")) == 3
        with gzip.open(tmp_path / "d.jsonl.gz", "wt", encoding="utf-8", newline="") as file:
            file.write(text)
        assert count_rows(str(tmp_path / "d.jsonl.gz")) == 3

    def test_line_separators_inside_a_row_do_not_split_it(self, tmp_path: Path) -> None:
        (tmp_path / "d.jsonl").write_text('{"a": "x\u2028y\x85z"}\n', encoding="utf-8")
        assert count_rows(str(tmp_path / "d.jsonl")) == 1

    def test_unknown_without_a_library(self, tmp_path: Path) -> None:
        (tmp_path / "d.parquet").write_bytes(b"PAR1")
        assert count_rows(str(tmp_path / "d.parquet")) is None
        assert count_rows("someone/some-set") is None

    def test_missing_default_points_to_the_quickstart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(DataError, match=r"^data\.jsonl: no such file.*bash launch/quickstart\.sh"):
            count_rows("data.jsonl")

    @pytest.mark.parametrize("name", ["no.jsonl", "no.jsonl.gz", "no.parquet", "no"])
    def test_missing_file_is_named(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: no such file") + ".*-d/--dataset"):
            count_rows(str(tmp_path / name))

    def test_empty_and_broken_files(self, tmp_path: Path) -> None:
        (tmp_path / "e.jsonl").write_text("\n\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"e\.jsonl: no rows"):
            count_rows(str(tmp_path / "e.jsonl"))
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:-12])
        with pytest.raises(DataError, match=r"b\.jsonl\.gz: cannot be read"):
            count_rows(str(tmp_path / "b.jsonl.gz"))
        (tmp_path / "c.jsonl.gz").write_bytes(b"not gzip")
        with pytest.raises(DataError, match=r"c\.jsonl\.gz: cannot be read"):
            count_rows(str(tmp_path / "c.jsonl.gz"))


class TestSteps:
    def test_rows_over_groups_per_step(self) -> None:
        assert num_steps(config_of(), 7473) == 116  # 7473 // 64
        assert num_steps(config_of("-e", "2"), 7473) == 233  # steps cross the ends of episodes
        assert num_steps(config_of("--max-steps", "10"), 7473) == 10
        assert num_steps(config_of("--max-steps", "1000"), 64) == 1

    def test_too_few_rows_is_an_error_with_both_numbers(self) -> None:
        with pytest.raises(DataError, match=r"^data\.jsonl: 63 rows x 1 episodes = 63 groups.* 64 "):
            describe_plan(config_of(), 63)
        assert num_steps(config_of("-e", "2"), 32) == 1


class TestPlan:
    def test_roles_and_batches(self) -> None:
        rows = plan("-t", "3", "-i", "1", "-ibs", "16")
        assert rows["world"] == "4 = 3 trainers + 1 inferencers x 1"
        assert rows["consumers"].startswith("ranks 0-2:")
        assert rows["producers"].startswith("rank 3:")
        assert rows["optimizer step, S"].startswith("96 groups = 32 x dp 3; 768 responses")
        assert rows["minibatch"] == "24 groups = 8 x dp 3; 4 per step"
        assert rows["microbatch"] == "2 responses; 32 per minibatch and rank"
        assert rows["decode slots per producer"].startswith("64 = 8")
        assert rows["leases held per producer"] == "at most 16 groups"
        assert rows["groups in flight"] == "at most 16"
        assert rows["buffer"] == "48 groups"
        assert rows["steps"].startswith("at most 10 = 1 episodes x 1000 rows // 96")

    def test_staleness_says_what_zero_bubble_needs(self) -> None:
        rows = plan()
        assert "zero bubble needs 3" in rows["staleness"] and "too little" in rows["staleness"]
        assert "--max-staleness" in rows["hint"]
        rows = plan("--max-staleness", "3")
        assert "enough" in rows["staleness"] and "hint" not in rows
        rows = plan("--max-staleness", "0")
        assert "synchronous" in rows["staleness"] and "hint" not in rows

    def test_unknown_rows(self) -> None:
        assert "unknown" in plan(num_rows=None)["data"]
        assert plan("--max-steps", "5", num_rows=None)["steps"] == "at most 5 (max_steps)"

    def test_where_things_go(self) -> None:
        rows = plan("-p", "run1", "-sd", "/m", "--log-dir", "/l", "-ed", '{"math": "m.jsonl"}')
        assert rows["models and states"].startswith("/m/run1,")
        assert rows["logs and metrics"].startswith("/l/run1,")
        assert rows["evaluations"].startswith("eval/run1, math")
        assert "evaluations" not in plan()

    def test_memory_is_unknown_for_a_hub_name(self) -> None:
        assert "unknown" in plan()["everything else"]

    def test_memory_of_a_local_model(self, model: Path) -> None:
        rows = plan(
            "-m", str(model), "-mnt", "1024", "-mpt", "1024", "-kl", "0", "trainer.logprob_chunk_tokens=1048576"
        )
        assert rows["parameters"] == "0.0 million"
        assert rows["logits that exist at once"].startswith("400.0 MiB")  # 2**20 tokens x 100 x 4 bytes
        # 64 slots x 2048 tokens x (2 x 3 layers x 2 heads x 2) x 2 bytes
        assert rows["key-value cache, per producer"].startswith("6.0 MiB")

    def test_missing_local_model_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no such folder.*-m/--model"):
            plan("-m", str(tmp_path / "none"))


class TestModelSize:
    def test_counts_the_headers(self, model: Path) -> None:
        size = read_model_size(str(model))
        assert size is not None
        assert size.num_parameters == 800 + 8 + 8 + 1
        assert (size.hidden_size, size.vocab_size, size.kv_values_per_token) == (8, 100, 2 * 3 * 2 * 2)

    def test_no_folder_and_an_empty_one(self, tmp_path: Path) -> None:
        assert read_model_size("Qwen/Qwen2.5-7B") is None
        assert read_model_size(str(tmp_path)) == (None, None, None, None)
        assert "unknown" in plan("-m", str(tmp_path))["parameters"]

    @pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**60), struct.pack("<Q", 9) + b'{"a": 1}'])
    def test_damaged_file_is_named(self, content: bytes, model: Path) -> None:
        (model / "model-00001-of-00002.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match="model-00001-of-00002"):
            read_model_size(str(model))

    def test_damaged_config_is_named(self, model: Path) -> None:
        (model / "config.json").write_text("{", encoding="utf-8")
        with pytest.raises(ModelError, match=r"config\.json"):
            read_model_size(str(model))


def test_group_and_ring_sizes() -> None:
    config = config_of("-g", "2", "-mnt", "100", "-mpt", "10", "-tMbs", "8", "--max-staleness", "2")
    assert max_group_bytes(config) == 4 * 10 + 2 * (8 * 100 + 17 + 12 * 11) + 640
    assert ring_bytes(config) == 4 * 16 * max_group_bytes(config)
    assert ring_bytes(config_of("transport.ring_bytes=1234567")) == 1234567
    large = config_of("-mnt", "1000000", "-g", "64")  # a minibatch of 8 GiB
    assert ring_bytes(large) == 16 * max_group_bytes(large)
    middle = config_of("-mnt", "100000", "-g", "32")  # a minibatch of 0.4 GiB
    assert ring_bytes(middle) == 1024**3
