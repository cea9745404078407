"""Files, keys and flags come together: precedence, messages, presets, YAML round trip, fingerprints, light imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbgrpo.config import fields, yamlio
from zbgrpo.config.load import (
    GROUPS_PER_STEP,
    compare_fingerprints,
    dump_yaml,
    fingerprint,
    load_config,
    load_yaml,
    resolve,
)
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def first_line(argv: list[str], world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(argv, world_size)
    return str(error.value).splitlines()[0]


class TestPrecedence:
    def test_flag_beats_key_beats_file_beats_default(self, tmp_path: Path) -> None:
        file = write(tmp_path, "inference: {num_generations: 3, max_new_tokens: 30, temperature: 0.3}\nseed: 3\n")
        argv = ["-g", "5", "inference.num_generations=4", "inference.max_new_tokens=40", "--config", file]
        config = load_config(argv).config
        assert config.inference.num_generations == 5
        assert config.inference.max_new_tokens == 40
        assert (config.inference.temperature, config.seed) == (0.3, 3)
        assert config.inference.inference_batch_size == 64

    def test_later_key_beats_earlier(self) -> None:
        assert load_config(["seed=1", "seed=2"]).config.seed == 2

    def test_key_can_take_back_what_the_file_says(self, tmp_path: Path) -> None:
        file = write(tmp_path, "inference: {top_k: 5}")
        assert load_config(["--config", file, "inference.top_k=null"]).config.inference.top_k is None

    def test_explicit_value_beats_the_preset(self, tmp_path: Path) -> None:
        file = write(tmp_path, "algorithm: {name: DAPO, clip_high: 0.25}")
        algorithm = load_config(["--config", file, "-kl", "0.02", "algorithm.mask_truncated=false"]).config.algorithm
        assert (algorithm.clip_high, algorithm.kl_coeff, algorithm.mask_truncated) == (0.25, 0.02, False)
        assert (algorithm.loss, algorithm.dynamic_batching) == ("token_mean", True)


class TestKeys:
    SAMPLES: dict[str, tuple[str, object]] = {  # noqa: RUF012 - a constant
        "algorithm.filter_range": ("[0.1, 0.7]", (0.1, 0.7)),
        "evaluation.datasets": ("{math: m.jsonl}", {"math": "m.jsonl"}),
        "inference.stop": ("[a, b]", ["a", "b"]),
        "observe.profiling_steps": ("5", 5),
        "reward.min_isolation": ("2", 2),
        "vllm.max_restarts": ("5", 5),
        "weights.transport": ("gloo", "gloo"),
    }

    @staticmethod
    def sample(leaf: fields.Leaf) -> tuple[str, object]:
        """A text and its value for a leaf, other than the default."""
        info = msgspec.inspect.type_info(leaf.type)
        options = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
        kind = options[0]
        if isinstance(kind, msgspec.inspect.LiteralType):
            other = next(value for value in kind.values if value != leaf.default)
            return str(other), other
        if isinstance(kind, msgspec.inspect.IntType):
            return "3", 3
        if isinstance(kind, msgspec.inspect.FloatType):
            return "0.5", 0.5
        if isinstance(kind, msgspec.inspect.BoolType):
            return ("false", False) if leaf.default else ("true", True)
        return "some text", "some text"

    @pytest.mark.parametrize("path", fields.leaves())
    def test_every_leaf_is_reachable_by_its_key_and_from_a_file(self, path: str, monkeypatch, tmp_path: Path) -> None:
        # Not every sample fits the other settings; only how it gets there is of interest here.
        monkeypatch.setattr("zbgrpo.config.load.validate", lambda config, world_size: [])
        text, value = self.SAMPLES.get(path) or self.sample(fields.leaves()[path])
        assert value != fields.leaves()[path].default
        assert fields.get(load_config([f"{path}={text}"]).config, path) == value
        section, _, key = path.rpartition(".")
        file = write(tmp_path, f"{section}:\n  {key}: {text}\n" if section else f"{key}: {text}\n")
        assert fields.get(load_config(["--config", file]).config, path) == value

    def test_text_stays_text(self) -> None:
        argv = ["project=2024", "data.system_prompt=Note: be brief", "reward.type=pkg.mod:score", "model.path=yes"]
        config = load_config(argv).config
        assert (config.project, config.data.system_prompt) == ("2024", "Note: be brief")
        assert (config.reward.type, config.model.path) == ("pkg.mod:score", "yes")

    def test_value_may_hold_an_equals_sign(self) -> None:
        assert load_config(["data.system_prompt=a=b"]).config.data.system_prompt == "a=b"

    def test_number_without_a_point_is_a_number(self, tmp_path: Path) -> None:
        assert load_config(["trainer.learning_rate=2e-6"]).config.trainer.learning_rate == 2e-6
        file = write(tmp_path, "trainer: {learning_rate: 3e-6}")
        assert load_config(["--config", file]).config.trainer.learning_rate == 3e-6

    def test_evaluation_set_is_added_by_key(self, tmp_path: Path) -> None:
        file = write(tmp_path, "evaluation: {datasets: {a: a.jsonl}}")
        argv = ["--config", file, "evaluation.datasets.b=b.jsonl", "evaluation.datasets.c=1"]
        assert load_config(argv).config.evaluation.datasets == {"a": "a.jsonl", "b": "b.jsonl", "c": "1"}

    @pytest.mark.parametrize(
        ("argument", "culprit", "hint"),
        [
            ("inference.num_generation=4", "inference.num_generation", "inference.num_generations"),
            ("infrence.top_k=4", "infrence.top_k", "inference.top_k"),
            ("trainer.max_staleness=4", "trainer.max_staleness", "ledger.max_staleness"),
            ("learning_rate=4", "learning_rate", "trainer.learning_rate"),
            ("sed=4", "sed", "seed"),
            ("inference.zzz=4", "inference.zzz", "keys of inference: backend"),
            ("qqq.zzz=4", "qqq.zzz", "sections: model"),
            ("inference=4", "inference", "is a section"),
            ("model.path.x=4", "model.path.x", "unknown key"),
            ("=4", "", "unknown key"),
            ("inference.num_generations=four", "inference.num_generations", "expected int >= 1, got 'four'"),
            ("inference.num_generations=true", "inference.num_generations", "expected int >= 1, got true"),
            ("inference.num_generations=", "inference.num_generations", "expected int >= 1, got null"),
            ("inference.top_k=0", "inference.top_k", "expected int >= 1 or null, got 0"),
            ("trainer.learning_rate=.inf", "trainer.learning_rate", "finite"),
            ("algorithm.filter_range=[0.1]", "algorithm.filter_range", "[number, number]"),
            ("algorithm.filter_range=[0.1, .nan]", "algorithm.filter_range", "finite"),
            ("observe.wandb=maybe", "observe.wandb", "expected true or false"),
            ("inference.stop=x", "inference.stop", "list of str or null"),
            ("data.path=[a", "data.path", "not valid YAML"),
        ],
    )
    def test_bad_key_is_named_with_the_nearest(self, argument: str, culprit: str, hint: str) -> None:
        line = first_line([argument])
        assert line.startswith((culprit, f"unknown key {culprit}")) and hint in line


class TestFile:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("inference: {num_generation: 4}", ["inference.num_generation", "inference.num_generations"]),
            ("infrence: {top_k: 4}", ["infrence", "inference"]),
            ("learning_rate: 1e-6", ["learning_rate", "trainer.learning_rate"]),
            ("inference: {num_generations: many}", ["inference.num_generations", "expected int >= 1, got 'many'"]),
            ("inference: {num_generations: 0}", ["inference.num_generations", "expected int >= 1, got 0"]),
            ("project: 2024", ["project", "expected str, got 2024"]),
            ("inference: 4", ["inference", "mapping"]),
            ("- a\n- b", ["mapping of sections"]),
            ("seed: 1\nseed: 2", [":2", "'seed' is set twice"]),
            ("model: {path: a}\nmodel: {path: b}", [":2", "'model' is set twice"]),
            ("model:\n  path: [a", [":2", "not valid YAML"]),
            ("1: x", ["unknown key 1"]),
            ("? [a]\n: x", ["not valid YAML"]),
            ("a: &a [*b]", ["not valid YAML"]),
        ],
    )
    def test_bad_file_is_named_with_its_key(self, text: str, expected: list[str], tmp_path: Path) -> None:
        file = write(tmp_path, text)
        line = first_line(["--config", file])
        assert line.startswith(file)
        assert all(part in line for part in expected), line

    def test_missing_or_unreadable_file(self, tmp_path: Path) -> None:
        assert first_line(["--config", str(tmp_path / "no.yaml")]).startswith(f"--config {tmp_path / 'no.yaml'}")
        assert first_line(["--config", str(tmp_path)]).startswith(f"--config {tmp_path}")
        (tmp_path / "x.yaml").write_bytes(b"seed: \xff\xfe")
        assert "UTF-8" in first_line(["--config", str(tmp_path / "x.yaml")])

    def test_bad_value_in_a_file_does_not_hide_behind_a_flag(self, tmp_path: Path) -> None:
        file = write(tmp_path, "inference: {num_generations: 0}")
        assert first_line(["--config", file, "-g", "4"]).startswith(f"{file}: inference.num_generations")

    @pytest.mark.parametrize("text", ["", "# nothing\n", "inference:\n", "model: {}\n"])
    def test_empty_file_and_section_change_nothing(self, text: str, tmp_path: Path) -> None:
        assert load_config(["--config", write(tmp_path, text)]).config == load_config([]).config

    def test_merge_keys_work(self) -> None:
        assert yamlio.parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "t")["b"] == {"x": 1, "y": 3}


class TestRoles:
    @pytest.mark.parametrize(
        ("argv", "world_size", "expected"),
        [
            ([], None, (2, 2)),
            ([], 4, (2, 2)),
            ([], 2, (1, 1)),
            ([], 10, (5, 5)),
            (["-t", "3"], None, (3, 2)),
            (["-i", "3"], None, (2, 3)),
            (["-t", "3"], 8, (3, 5)),
            (["-i", "1"], 3, (2, 1)),
            (["-t", "1", "-i", "6"], 7, (1, 6)),
        ],
    )
    def test_left_out_roles_are_filled(self, argv: list[str], world_size: int | None, expected: tuple) -> None:
        cluster = load_config(argv, world_size).config.cluster
        assert (cluster.num_trainers, cluster.num_inferencer) == expected

    def test_producers_of_several_ranks(self) -> None:
        config = load_yaml("cluster: {producer_tensor_parallel_size: 2}")
        cluster = resolve(config, 8).cluster
        assert (cluster.num_trainers, cluster.num_inferencer) == (4, 2)
        with pytest.raises(ConfigError, match="of 2 each"):
            resolve(config, 6)

    @pytest.mark.parametrize(
        ("argv", "world_size", "parts"),
        [
            ([], 1, ["world of 1", "nproc-per-node 2"]),
            ([], 3, ["world of 3", "-t/--num-trainers"]),
            (["-t", "4"], 4, ["world of 4", "-t/--num-trainers", "-i/--num-inferencer"]),
            (["-i", "5"], 4, ["world of 4", "-i/--num-inferencer"]),
            (["-t", "2", "-i", "3"], 4, ["-t/--num-trainers", "2 trainers + 3 inferencers x 1", "= 5", "has 4"]),
            (["-t", "1", "-i", "1"], 1, ["1 trainers + 1 inferencers x 1", "= 2", "has 1"]),
        ],
    )
    def test_world_that_does_not_fit(self, argv: list[str], world_size: int, parts: list[str]) -> None:
        line = first_line(argv, world_size)
        assert all(part in line for part in parts), line


class TestPresets:
    def test_grpo(self) -> None:
        algorithm = load_config([]).config.algorithm
        assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss) == (0.2, 0.2, "response_mean")
        assert (algorithm.kl_coeff, algorithm.dynamic_batching) == (0.01, False)
        assert (algorithm.mask_truncated, algorithm.overlong_penalty) == (False, False)

    def test_dapo(self) -> None:
        algorithm = load_config(["-a", "DAPO"]).config.algorithm
        assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss) == (0.2, 0.28, "token_mean")
        assert (algorithm.kl_coeff, algorithm.dynamic_batching) == (0.0, True)
        assert (algorithm.mask_truncated, algorithm.overlong_penalty) == (True, True)
        assert algorithm.filter_range == (0.01, 0.99)

    @pytest.mark.parametrize(("longest", "cache"), [(8192, 1024), (4096, 1024), (3584, 896), (64, 16), (2, 1)])
    def test_overlong_cache(self, longest: int, cache: int) -> None:
        assert load_config(["-mnt", str(longest)]).config.algorithm.overlong_cache_tokens == cache

    def test_left_to_the_reward_type(self) -> None:
        config = load_config(["-rt", "boxed"]).config
        assert config.data.system_prompt is None and config.inference.stop is None

    def test_resolving_twice_changes_nothing(self) -> None:
        config = load_config(["-a", "DAPO"], 6).config
        assert resolve(config, 6) == config


class TestRoundTrip:
    def test_resolved_configuration(self) -> None:
        for argv in ([], ["-a", "DAPO", "-lr", "1e-7", "-ed", '{"math": "m"}', "inference.stop=[a]", "-s", ""]):
            config = load_config(argv, 4).config
            assert load_yaml(dump_yaml(config)) == config

    def test_schema_itself(self) -> None:
        assert load_yaml(dump_yaml(RunConfig())) == RunConfig()

    def test_dump_is_taken_by_config(self, tmp_path: Path) -> None:
        config = load_config(["-a", "DAPO", "-g", "4", "-t", "1"], 3).config
        assert load_config(["--config", write(tmp_path, dump_yaml(config))], 3).config == config

    @settings(max_examples=150, deadline=None)
    @given(
        st.text(st.characters(exclude_categories=["Cs"]))
        | st.sampled_from(["1e6", "1e-6", "1.5e3", "on", "null", "2024-01-01", "0x1f", "1:30", "~", "- a", "# a", ""]),
        st.floats(min_value=0, allow_infinity=False, allow_nan=False),
    )
    def test_any_text_and_number(self, text: str, number: float) -> None:
        config = fields.build({"data.system_prompt": text, "trainer.learning_rate": number, "inference.stop": [text]})
        assert load_yaml(dump_yaml(config)) == config


class TestFingerprint:
    BASE = load_config([], 4).config

    def changed(self, path: str, value: object) -> RunConfig:
        section, _, key = path.rpartition(".")
        if not section:
            return msgspec.structs.replace(self.BASE, **{key: value})
        part = msgspec.structs.replace(getattr(self.BASE, section), **{key: value})
        return msgspec.structs.replace(self.BASE, **{section: part})

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("seed", 1),
            ("model.path", "other"),
            ("data.path", "other.jsonl"),
            ("data.num_episodes", 2),
            ("cluster.num_trainers", 1),
            ("inference.num_generations", 4),
            ("inference.temperature", 0.9),
            ("reward.type", "boxed"),
            ("algorithm.kl_coeff", 0.0),
            ("algorithm.filter_range", (0.01, 0.7)),
            ("ledger.max_staleness", 0),
            ("trainer.train_batch_size", 16),
            ("trainer.learning_rate", 1e-5),
            ("trainer.precision", "fp32"),
            ("evaluation.temperature", 0.0),
        ],
    )
    def test_what_decides_results_has_to_stay(self, path: str, value: object) -> None:
        message = compare_fingerprints(fingerprint(self.BASE), fingerprint(self.changed(path, value)))
        assert message is not None
        before = fingerprint(self.BASE)
        old = before.get(path, before[GROUPS_PER_STEP])
        assert repr(old) in message and (path in message or message.startswith("-"))

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("project", "other"),
            ("cluster.num_inferencer", 5),
            ("cluster.timeout_seconds", 5.0),
            ("inference.inference_batch_size", 16),
            ("reward.num_workers", 5),
            ("trainer.train_microbatch_size", 1),
            ("trainer.train_minibatch_size", 4),
            ("trainer.zero_stage", 2),
            ("trainer.gradient_checkpointing", True),
            ("ledger.max_steps", 500),
            ("transport.ring_bytes", 5),
            ("weights.staging", "cpu"),
            ("checkpoint.resume", "never"),
            ("checkpoint.save_interval", 5),
            ("evaluation.interval", 5),
            ("evaluation.datasets", {"a": "b"}),
            ("observe.log_dir", "other"),
        ],
    )
    def test_what_does_not_may_change(self, path: str, value: object) -> None:
        assert compare_fingerprints(fingerprint(self.BASE), fingerprint(self.changed(path, value))) is None

    def test_message_names_flag_and_both_values(self) -> None:
        new = fingerprint(self.changed("trainer.learning_rate", 0.5))
        message = compare_fingerprints(fingerprint(self.BASE), new)
        assert message == "-lr/--learning-rate: the saved run has 1e-06, this one 0.5"

    def test_survives_json_and_reports_keys_of_other_versions(self) -> None:
        old = fingerprint(self.BASE)
        assert msgspec.json.decode(msgspec.json.encode(old)) == old
        assert (
            compare_fingerprints({**old, "gone.key": 1}, old) == "gone.key: the saved run has 1, this one '(not set)'"
        )
        assert "seed" in (compare_fingerprints({k: v for k, v in old.items() if k != "seed"}, old) or "")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_file_is_valid_and_without_warnings(path: Path) -> None:
    loaded = load_config(["--config", str(path)])
    world_size = loaded.config.world_size
    assert load_config(["--config", str(path)], world_size).warnings == []


def test_shipped_files_are_listed() -> None:
    files = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert files
    readme = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    assert all(name in readme for name in files)


LIGHT = """
import contextlib, io, sys
from zbgrpo.config import dryrun, flags, load
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    load.load_config(["--help"])
assert "--num-generations" in out.getvalue()
loaded = load.load_config(["--dry-run", "-d", sys.argv[1]])
assert dryrun.describe_plan(loaded.config, dryrun.count_rows(loaded.config.data.path))
heavy = {"torch", "transformers", "zmq", "numpy", "datasets", "pyarrow", "vllm"} & set(sys.modules)
sys.exit(f"loaded {sorted(heavy)}" if heavy else 0)
"""


def test_configuration_help_and_dry_run_load_nothing_heavy(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n" * 200, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(data)], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
