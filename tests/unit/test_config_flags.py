"""The command line: every flag of the table, what is refused and how, and what --help says."""

from __future__ import annotations

import msgspec
import pytest

from zbgrpo.config import fields, yamlio
from zbgrpo.config.flags import FLAGS, WITHOUT_MEANING, build_parser, parse_command_line
from zbgrpo.config.load import load_config
from zbgrpo.errors import ConfigError

SEED_FLAGS: list[tuple[str | None, str, str, object]] = [
    ("-m", "--model", "model.path", "Qwen/Qwen2.5-7B"),
    (None, "--tokenizer-path", "model.tokenizer_path", None),
    ("-d", "--dataset", "data.path", "data.jsonl"),
    ("-ed", "--eval-dataset", "evaluation.datasets", {}),
    ("-p", "--project", "project", "GRPO"),
    ("-e", "--num-episodes", "data.num_episodes", 1),
    ("-t", "--num-trainers", "cluster.num_trainers", 2),
    ("-i", "--num-inferencer", "cluster.num_inferencer", 2),
    ("-g", "--num-generations", "inference.num_generations", 8),
    ("-ibs", "--inference-batch-size", "inference.inference_batch_size", 64),
    ("-imbs", "--inference-microbatch-size", "inference.inference_microbatch_size", 8),
    ("-tbs", "--train-batch-size", "trainer.train_batch_size", 32),
    ("-tMbs", "--train-minibatch-size", "trainer.train_minibatch_size", 8),
    ("-tmbs", "--train-microbatch-size", "trainer.train_microbatch_size", 2),
    ("-tp", "--tensor-parallel-size", "trainer.tensor_parallel_size", 1),
    ("-pp", "--pipeline-parallel-size", "trainer.pipeline_parallel_size", 1),
    ("-zero", "--zero-stage", "trainer.zero_stage", 0),
    ("-ptp", "--producer-tensor-parallel-size", "cluster.producer_tensor_parallel_size", 1),
    ("-b", "--backend", "inference.backend", "transformers"),
    ("-temp", "--temperature", "inference.temperature", 1.0),
    ("-topk", "--top-k", "inference.top_k", None),
    ("-topp", "--top-p", "inference.top_p", 1.0),
    ("-s", "--system-prompt", "data.system_prompt", None),
    ("-mnt", "--max-new-tokens", "inference.max_new_tokens", 3584),
    ("-mpt", "--max-prompt-tokens", "data.max_prompt_tokens", 512),
    ("-a", "--algo", "algorithm.name", "GRPO"),
    ("-lr", "--learning-rate", "trainer.learning_rate", 1e-6),
    ("-kl", "--kl-coeff", "algorithm.kl_coeff", 0.01),
    ("-rt", "--reward-type", "reward.type", "think_answer_tags"),
    ("-ei", "--eval-interval", "evaluation.interval", 100),
    ("-cbsl", "--data_actor_buffer_size_limit", "ledger.buffer_limit", -1),
    ("-si", "--save-interval", "checkpoint.save_interval", 100),
    ("-sd", "--save-dir", "checkpoint.save_dir", "./model"),
    ("-esd", "--eval-save-dir", "evaluation.save_dir", "./eval"),
    ("-rsd", "--rollout-save-dir", "observe.rollout_save_dir", "./rollouts"),
    (None, "--enable_profiling", "observe.enable_profiling", False),
]
"""Flags that have to keep their names and what they default to."""

NEW_FLAGS = {
    "--seed": 42,
    "--max-steps": None,
    "--max-staleness": 2,
    "--max-token-lag": 8,
    "--stale": "mask",
    "--resume": "auto",
    "--trainer": "torch",
    "--precision": "bf16",
    "--skip-bad-rows": False,
    "--log-dir": "./logs",
    "--weight-transport": "auto",
    "--weight-staging": "device",
    "--consumer-python": None,
    "--code-sandbox-url": None,
}


@pytest.mark.parametrize(("short", "long", "path", "default"), SEED_FLAGS, ids=[row[1] for row in SEED_FLAGS])
def test_known_flag_keeps_its_names_and_default(short: str | None, long: str, path: str, default: object) -> None:
    flag = next(flag for flag in FLAGS if flag.long == long)
    assert (flag.short, flag.path) == (short, path)
    assert fields.get(load_config([]).config, path) == default


def test_table_holds_the_known_and_the_new_flags_and_nothing_else() -> None:
    assert {flag.long for flag in FLAGS} == {row[1] for row in SEED_FLAGS} | set(NEW_FLAGS)
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert len({flag.path for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("long", NEW_FLAGS)
def test_new_flag_has_its_default(long: str) -> None:
    flag = next(flag for flag in FLAGS if flag.long == long)
    assert fields.get(load_config([]).config, flag.path) == NEW_FLAGS[long]


SAMPLES = {"int": ("3", 3), "float": ("0.5", 0.5), "json": ('{"a": "b"}', {"a": "b"})}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.long)
def test_every_flag_sets_its_key_by_each_of_its_names(flag) -> None:
    leaf = fields.leaves()[flag.path]
    kind = msgspec.inspect.type_info(leaf.type)
    literal = kind.values[-1] if isinstance(kind, msgspec.inspect.LiteralType) else "text"
    text, expected = SAMPLES.get(flag.kind, (literal, literal))
    for name in flag.names:
        argv = [[name]] if flag.kind == "switch" else [[name, text], [f"{name}={text}"]]
        for arguments in argv:
            (setting,) = parse_command_line(arguments).settings
            assert setting.path == flag.path
            value = fields.convert(setting.path, setting.value, setting.source)
            assert value == (True if flag.kind == "switch" else expected)


def test_last_of_a_repeated_flag_wins() -> None:
    assert load_config(["-g", "4", "--num-generations", "6"]).config.inference.num_generations == 6


def test_negative_buffer_limit_is_a_value() -> None:
    assert load_config(["-cbsl", "-5"]).config.ledger.buffer_limit == -5


def test_empty_system_prompt_is_not_a_missing_one() -> None:
    assert load_config(["-s", ""]).config.data.system_prompt == ""


def test_keys_may_stand_between_flags() -> None:
    config = load_config(["trainer.schedule=constant", "-g", "4", "observe.wandb=true", "--seed", "7"]).config
    assert (config.trainer.schedule, config.inference.num_generations) == ("constant", 4)
    assert (config.observe.wandb, config.seed) == (True, 7)


@pytest.mark.parametrize("name", WITHOUT_MEANING)
def test_flag_of_ray_is_accepted_with_one_line(name: str) -> None:
    loaded = load_config([name, "x", "-g", "4"])
    assert loaded.config.inference.num_generations == 4
    (note,) = loaded.notes
    assert note.startswith(name) and "torchrun" in note and "\n" not in note


def test_dry_run_is_told() -> None:
    assert load_config(["--dry-run"]).dry_run
    assert not load_config([]).dry_run


@pytest.mark.parametrize(
    ("argv", "culprit", "hint"),
    [
        (["--learning-rat", "1"], "--learning-rat", "--learning-rate"),
        (["--num-gen", "4"], "--num-gen", "did you mean"),
        (["--learning"], "--learning", "unknown flag"),  # an abbreviation
        (["-tem", "1"], "-tem", "-temp"),
        (["-tps", "4"], "-tps", "unknown flag"),  # not -t with the value ps
        (["-t4"], "-t4", "unknown flag"),
        (["--zzzzzz=4"], "--zzzzzz", "--help"),
        (["-g"], "-g/--num-generations", "expected one argument"),
        (["-g", "eight"], "-g/--num-generations", "expected int >= 1, got 'eight'"),
        (["-g", "0"], "-g/--num-generations", "expected int >= 1, got 0"),
        (["-g", "1.5"], "-g/--num-generations", "expected int"),
        (["-t", "-2"], "-t/--num-trainers", "expected int >= 1, got -2"),
        (["-lr", "fast"], "-lr/--learning-rate", "expected number >= 0"),
        (["-lr", "nan"], "-lr/--learning-rate", "nan"),
        (["-temp", "inf"], "-temp/--temperature", "finite"),
        (["-temp", "0"], "-temp/--temperature", "expected number > 0"),
        (["-topp", "1.5"], "-topp/--top-p", "<= 1"),
        (["-a", "PPO"], "-a/--algo", "DAPO, GRPO"),
        (["-b", "sglang"], "-b/--backend", "transformers, vllm"),
        (["--stale", "drop"], "--stale", "mask, wait"),
        (["--precision", "fp16"], "--precision", "bf16, fp32"),
        (["-ed", "{a: b}"], "-ed/--eval-dataset", "JSON"),
        (["-ed", '["a"]'], "-ed/--eval-dataset", "mapping of str to str"),
        (["-ed", '{"math": 5}'], "-ed/--eval-dataset", "mapping of str to str"),
        (["--dry-run=yes"], "--dry-run", "argument"),
        (["train.jsonl"], "train.jsonl", "section.key=value"),
    ],
)
def test_bad_command_line_names_the_culprit_first(argv: list[str], culprit: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    first_line = str(error.value).splitlines()[0]
    assert first_line.startswith(culprit) and hint in first_line


def test_help_shows_groups_flags_defaults_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(["--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in FLAGS:
        # From Python 3.13 on the value is shown once, behind the last name of a flag.
        assert all(f"{name} " in text or f"{name}, " in text for name in flag.names)
        assert f"{flag.group}:" in text
    assert "responses per prompt (default: 8)" in text
    for path in set(fields.leaves()) - {flag.path for flag in FLAGS}:
        assert f" {path}=" in text


def test_defaults_in_the_help_are_valid_yaml_of_the_default() -> None:
    shown = [
        line.strip().partition("=") for line in (build_parser().epilog or "").splitlines() if line.startswith("  ")
    ]
    assert shown
    for path, _, text in shown:
        assert fields.convert(path, yamlio.parse(text, path), path) == fields.leaves()[path].default
