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
    sizes = {"hidden_size": 8, "intermediate_size": 24, "vocab_size": 100, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(sizes | heads), encoding="utf-8")
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"embed": [100, 8], "layers": [3, 10, 10]})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"norm": [2, 2, 2], "scalar": []})
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
        assert "not a local folder" in plan()["unknown"]
        assert "not a local folder" in plan()["producer, per rank"]

    def test_whose_memory_is_not_counted(self, model: Path) -> None:
        assert plan("-m", str(model))["together"].endswith("without what libraries need for themselves")
        other = plan("-m", str(model), "--trainer", "colossalai")["together"]
        assert other.endswith("without ColossalAI's own buffers: the torch trainer is what is estimated")

    def test_memory_of_a_local_model(self, model: Path) -> None:
        rows = plan("-m", str(model), "-mnt", "1024", "-mpt", "1024", "-kl", "0", "-g", "8", "-tmbs", "2")
        assert rows["parameters"] == "0.0 million"
        assert rows["largest microbatch"] == "1 x 3072 positions, 2048 response tokens"
        # 64 slots x 2048 tokens x (2 x 3 layers x 2 heads x 2) x 2 bytes
        assert rows["- key-value cache"].startswith("6.0 MiB")
        assert "cluster.memory_gib" in rows["fits"]

    def test_the_parts_add_up(self, model: Path) -> None:
        rows = plan("-m", str(model), "-mnt", "20000", "-mpt", "20000", "-kl", "0.1", "trainer.offload_optimizer=true")
        parts = {name: value for name, value in rows.items() if name.startswith("- ") and "cache" not in name}
        on_device = [float(value.split()[0].replace(",", "")) for n, value in parts.items() if "host" not in n]
        mebibytes = [v * 1024 if "GiB" in parts[n] else v for n, v in zip(parts, on_device, strict=False)]
        together = rows["together"].split(",  ")[0].split()
        assert sum(mebibytes) == pytest.approx(float(together[0]) * 1024, rel=0.05) and together[1].startswith("GiB")
        assert {"- optimizer state, in the host's memory", "- activations"} <= parts.keys()

    def test_what_does_not_fit_is_said_with_what_helps(self, model: Path) -> None:
        argv = ("-m", str(model), "-mnt", "4096", "-kl", "0", "-tmbs", "2")
        text = describe_plan(config_of(*argv, "cluster.memory_gib=0.1"), 1000)
        (line,) = [line for line in text.splitlines() if line.strip().startswith("fits")]
        assert "NO" in line and "102.4 MiB of a device" in line
        helps = [line.split("what helps")[1].strip() for line in text.splitlines() if "what helps" in line]
        assert any(line.startswith("-tmbs/--train-microbatch-size 1: ") and line.endswith(", fits") for line in helps)
        assert any(line.startswith("trainer.gradient_checkpointing=true: ") for line in helps)
        assert not any("zero" in line for line in helps)  # the weights are nothing here
        assert plan(*argv, "cluster.memory_gib=100")["fits"].startswith("yes, 99.")

    def test_a_producer_that_does_not_fit(self, model: Path) -> None:
        rows = plan("-m", str(model), "-mnt", "1024", "-mpt", "1024", "-kl", "0", "cluster.memory_gib=0.005")
        assert (
            "-imbs/--inference-microbatch-size" in rows["- fits"] and "0.9 MiB more than the 5.1 MiB" in rows["- fits"]
        )

    def test_missing_local_model_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no such folder.*-m/--model"):
            plan("-m", str(tmp_path / "none"))


class TestModelSize:
    def test_counts_the_headers(self, model: Path) -> None:
        size = read_model_size(str(model))
        assert size is not None and size.is_complete
        assert size.num_parameters == 800 + 300 + 8 + 1
        assert (size.hidden_size, size.intermediate_size, size.vocab_size) == (8, 24, 100)
        assert (size.num_layers, size.num_heads, size.num_kv_heads, size.head_size) == (3, 4, 2, 2)
        assert size.kv_values_per_token == 2 * 3 * 2 * 2
        assert size.is_tied

    def test_a_head_of_its_own(self, model: Path) -> None:
        write_safetensors(model / "model-00003.safetensors", {"lm_head.weight": [100, 8]})
        size = read_model_size(str(model))
        assert size is not None and not size.is_tied and size.num_parameters == 1109 + 800
        # Some folders hold a tied matrix twice.
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
        size = read_model_size(str(model))
        assert size is not None and size.is_tied and size.num_parameters == 1109

    def test_no_folder_and_an_empty_one(self, tmp_path: Path) -> None:
        assert read_model_size("Qwen/Qwen2.5-7B") is None
        size = read_model_size(str(tmp_path))
        assert size is not None and not size.is_complete and size.num_parameters == 0
        assert "does not say" in plan("-m", str(tmp_path))["unknown"]

    @pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"])
    def test_what_is_left_out_or_no_number_makes_it_incomplete(self, key: str, model: Path) -> None:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        for value in (None, "many", [1], 0):
            (model / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
            size = read_model_size(str(model))
            assert size is not None and not size.is_complete

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
    assert max_group_bytes(config) == 4 * 10 + 2 * (8 * 100 + 20 + 12 * 11) + 128
    assert ring_bytes(config) == 4 * 16 * max_group_bytes(config)
    assert ring_bytes(config_of("transport.ring_bytes=1234567")) == 1234567
    large = config_of("-mnt", "1000000", "-g", "64")  # a minibatch of 8 GiB
    assert ring_bytes(large) == 16 * max_group_bytes(large)
    middle = config_of("-mnt", "100000", "-g", "32")  # a minibatch of 0.4 GiB
    assert ring_bytes(middle) == 1024**3
