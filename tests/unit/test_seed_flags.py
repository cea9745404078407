"""What the flags of the seed do beyond being parsed, as docs/seed_flags.md says: where each value arrives."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import random_group, tiny_model, tiny_tokenizer
from zbgrpo.config.load import load_config
from zbgrpo.config.schema import RunConfig
from zbgrpo.data.rows import Row
from zbgrpo.engine import build_consumer, build_producer, build_trainer, startup
from zbgrpo.engine.inputs import make_renderer
from zbgrpo.engine.producer import Producer
from zbgrpo.engine.recorder import Recorder
from zbgrpo.engine.work import PromptSource
from zbgrpo.errors import ConfigError
from zbgrpo.inference.base import GenerationRequest
from zbgrpo.ledger.evaluation import EvaluationLease, EvaluationResult
from zbgrpo.observe.metrics import MetricsWriter
from zbgrpo.observe.timeledger import TimeLedger
from zbgrpo.rewards.prompts import default_stop_strings
from zbgrpo.topology.roles import Topology
from zbgrpo.transport.plan_stream import TrainGroup
from zbgrpo.transport.wire import group_header
from zbgrpo.types import Uid

TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"


def config_of(line: str = "") -> RunConfig:
    return load_config(shlex.split(line)).config


# ------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("argv", "culprit"),
    [
        ("-tMbs 1 -g 2 -tmbs 3", "-tmbs/--train-microbatch-size"),  # tMbs x g >= tmbs
        ("-tmbs 0", "-tmbs/--train-microbatch-size"),  # tmbs > 0
        ("-tbs 8 -tMbs 16", "-tMbs/--train-minibatch-size"),  # tMbs <= tbs
        ("-tbs 8 -tMbs 5", "-tMbs/--train-minibatch-size"),  # tbs % tMbs == 0
        ("-ibs 12 -imbs 8", "-ibs/--inference-batch-size"),  # ibs % imbs == 0
    ],
)
def test_the_checks_of_the_seed_are_errors(argv: str, culprit: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(argv.split())
    assert str(error.value).startswith(culprit)


def test_the_limits_of_the_checks_are_fine() -> None:
    config_of("-tMbs 1 -tbs 1 -g 2 -tmbs 2 -ibs 8 -imbs 8")


def test_prompts_that_do_not_fill_steps_are_a_warning_only() -> None:
    """(ibs x producers) % (tbs x dp) == 0 is no condition here: leases go out one by one."""
    others = "--max-staleness 9 --max-token-lag 9 -t 2 -tbs 4 -tMbs 4 -imbs 4"
    assert load_config(f"{others} -ibs 8 -i 2".split()).warnings == []
    (line,) = load_config(f"{others} -ibs 12 -i 1".split()).warnings
    assert line.startswith("-ibs/--inference-batch-size") and "12" in line and "8" in line


# --------------------------------------------------------------------------------- what the seed fixes in its script


def test_what_the_seed_fixes_is_an_option_with_its_value() -> None:
    config = config_of()
    assert (config.evaluation.temperature, config.evaluation.num_generations) == (0.6, 1)
    assert config.observe.rollout_interval == 20
    assert (config.trainer.weight_decay, config.trainer.max_grad_norm, config.trainer.schedule) == (0.0, 1.0, "cosine")
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.2)
    assert config.algorithm.skip_threshold == 20
    dapo = config_of("-a DAPO").algorithm
    assert (dapo.clip_low, dapo.clip_high, dapo.filter_range) == (0.2, 0.28, (0.01, 0.99))
    assert dapo.overlong_cache_tokens == 3584 // 4
    assert default_stop_strings("think_answer_tags") == ["</answer>"]
    assert default_stop_strings("boxed") == default_stop_strings("code") == []


def test_what_departs_from_the_seed_by_default() -> None:
    config = config_of("-a DAPO")
    assert config.inference.top_k is None, "the seed makes it 50"
    assert config.inference.temperature_end is None, "the seed ends its first episode at 0.9"
    assert config.algorithm.kl_coeff == 0 and config_of("-a DAPO -kl 0.1").algorithm.kl_coeff == 0.1, "ignored there"
    assert config.observe.wandb is False, "the seed needs it"


def test_evaluation_samples_at_its_own_temperature_and_number() -> None:
    requests: list[GenerationRequest] = []
    row = Row([{"role": "user", "content": "?"}], "4", None, {}, 1)
    nothing: dict[str, Any] = dict.fromkeys(("pool", "channel", "subscriber", "profiler", "events", "stop_requested"))
    for options, expected in (("", (0.6, 1)), ("evaluation.temperature=0 evaluation.num_generations=3", (0.0, 3))):
        producer = Producer(
            config_of(f"-temp 0.9 {options}"),
            backend=SimpleNamespace(submit=requests.append),  # type: ignore[arg-type]
            prompts=PromptSource([row], [0], lambda messages: [1, 2], str, {"t": [row]}),
            ledger=TimeLedger(),
            **nothing,
        )
        producer._start_evaluation_lease(EvaluationLease(0, "t", 0, 5))
        assert (requests[-1].temperature, len(requests[-1].streams)) == expected


# --------------------------------------------------------------------------------------------- where values arrive


def test_the_hub_gets_the_numbers(tmp_path: Path) -> None:
    config = config_of("-t 2 -i 3 -e 4 -ibs 16 -tbs 12 -tMbs 6 -si 7 --max-steps 9 --seed 5 --max-staleness 1 -cbsl 40")
    spec = startup._hub_spec(config, Topology.build(config, 5), [0] * 5, tmp_path, None)
    assert (spec.num_episodes, spec.seed, spec.max_steps, spec.save_interval) == (4, 5, 9, 7)
    assert (spec.groups_per_step, spec.groups_per_minibatch, spec.dp_size) == (24, 12, 2)
    assert (spec.num_producers, spec.leases_per_producer, spec.max_staleness) == (3, 16, 1)
    assert spec.buffer_limit == 40


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", 2 * 8 * 2), ("-cbsl 0", 2 * 8 * 2), ("-cbsl -7", 2 * 8 * 2), ("-cbsl 16", 16), ("-tMbs 4 -t 3", 2 * 4 * 3)],
)
def test_the_buffer_holds_effective_groups_and_is_not_divided_by_their_share(line: str, expected: int) -> None:
    assert config_of(f"-a DAPO {line}").buffer_limit == expected


def test_decode_slots_are_prompts_times_responses() -> None:
    rank: Any = SimpleNamespace(config=config_of("-imbs 3 -ibs 3 -g 2 -mnt 8 -mpt 16"))
    assert build_producer._build_backend(rank, tiny_model(), tiny_tokenizer()).num_slots == 6


@pytest.mark.parametrize(("line", "expected"), [("", "model"), ("--tokenizer-path other", "other")])
def test_the_tokenizer_is_the_models_unless_named(monkeypatch: pytest.MonkeyPatch, line: str, expected: str) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(build_consumer, "load_tokenizer", loaded.append)
    for name in ("load_data", "make_renderer", "load_evaluation"):
        monkeypatch.setattr(build_consumer, name, lambda *_: None)
    rank: Any = SimpleNamespace(config=config_of(f"-m model {line}"), env=SimpleNamespace(rank=0))
    build_consumer._read_inputs(rank)
    assert loaded == [expected]


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("-rt think_answer_tags", "[system]You answer questions carefully."),
        ("-rt boxed", "[system]Reason step by step"),
        ("-rt mine.py:score", "[user]?"),
        ("-rt boxed -s 'Be brief.'", "[system]Be brief.\n[user]?"),
        ("-rt boxed -s ''", "[user]?"),
    ],
)
def test_the_system_prompt_is_the_reward_types_unless_given(line: str, start: str) -> None:
    shown: list[str] = []
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **options: (
        shown.append(render(messages, tokenize=False)) or render(messages, **options)
    )
    make_renderer(config_of(line), tokenizer).render([{"role": "user", "content": "?"}])
    assert shown[0].startswith(start)


@pytest.mark.parametrize(
    ("line", "num_models"), [("", 2), ("-kl 0", 1), ("-a DAPO", 1), ("-a DAPO -kl 0.1", 2)], ids=str
)
def test_a_reference_model_is_loaded_only_for_kl(monkeypatch: pytest.MonkeyPatch, line: str, num_models: int) -> None:
    loaded: list[str] = []
    made: list[Any] = []
    monkeypatch.setattr(build_trainer, "device_of", lambda rank: torch.device("cpu"))
    monkeypatch.setattr(build_trainer, "load_model", lambda path, *_: loaded.append(path) or torch.nn.Linear(1, 1))
    monkeypatch.setattr(build_trainer, "TorchTrainer", lambda model, reference, *_, **__: made.append(reference))
    rank: Any = SimpleNamespace(config=config_of(f"-m model {line}"))
    build_trainer.build_trainer(rank, None, None, 1000, nullcontext)
    assert loaded == ["model"] * num_models
    (reference,) = made
    assert (reference is not None) == (num_models == 2)
    assert reference is None or not any(weight.requires_grad for weight in reference.parameters())


def test_evaluations_and_rollouts_go_to_their_folders_under_the_project(tmp_path: Path) -> None:
    config = config_of(f"""-p run -ed '{{"math": "m.jsonl"}}' -esd {tmp_path / "e"} -rsd {tmp_path / "r"}""")
    progress: Any = SimpleNamespace(note=lambda text: None)
    recorder = Recorder(config, MetricsWriter(tmp_path / "logs"), progress, tmp_path / "logs")
    recorder.evaluation(3, [EvaluationResult("math", 0, 3, [10.0], [1.0], [1.0], [5], [False], ["4"], None)])
    payload = random_group(tiny_model(), np.random.default_rng(0), num_responses=2, temperature=1.0, version=1)
    recorder.rollouts(4, [TrainGroup(group_header(Uid(0, 0), 0, 0, payload, 0), payload)], str)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step-*.jsonl")) == [
        "e/run/math/step-3.jsonl",
        "r/run/step-4.jsonl",
    ]
    (line,) = (tmp_path / "e" / "run" / "math" / "step-3.jsonl").read_text().splitlines()
    assert json.loads(line)["version"] == 3
