"""Combinations that cannot run: each is refused with a message that begins with the flag to change."""

from __future__ import annotations

import pytest

from zbgrpo.config import validate
from zbgrpo.config.load import load_config
from zbgrpo.errors import ConfigError


def first_line(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    return str(error.value).splitlines()[0]


def warnings(*argv: str) -> list[str]:
    return load_config(argv).warnings


@pytest.mark.parametrize(
    ("argv", "culprit", "parts"),
    [
        (["-g", "1"], "-g/--num-generations", ["1", "2 or more"]),
        (["-tbs", "8", "-tMbs", "16"], "-tMbs/--train-minibatch-size", ["16", "8 (-tbs/--train-batch-size)"]),
        (["-tbs", "8", "-tMbs", "3"], "-tMbs/--train-minibatch-size", ["3", "8", "divisor"]),
        (["-tMbs", "1", "-g", "4", "-tmbs", "5"], "-tmbs/--train-microbatch-size", ["1 x 4 = 4", "of 5"]),
        (["-ibs", "9"], "-ibs/--inference-batch-size", ["9", "8 (-imbs/--inference-microbatch-size)"]),
        (["-ibs", "4"], "-ibs/--inference-batch-size", ["4", "8"]),
        (["-cbsl", "15"], "-cbsl/--data_actor_buffer_size_limit", ["15", "16 = 8", "x 2"]),
        (["algorithm.filter_range=[0.9, 0.1]"], "algorithm.filter_range", ["[0.9, 0.1]"]),
        (["algorithm.filter_range=[0.5, 0.5]"], "algorithm.filter_range", ["[0.5, 0.5]"]),
        (["algorithm.filter_range=[-0.1, 0.5]"], "algorithm.filter_range", ["-0.1"]),
        (["algorithm.filter_range=[0.1, 1.5]"], "algorithm.filter_range", ["1.5"]),
        (["-a", "DAPO", "-g", "2", "algorithm.filter_range=[0.01, 0.5]"], "algorithm.filter_range", ["of 2 responses"]),
        (["-rt", "boxd"], "-rt/--reward-type", ["'boxd'", "did you mean boxed"]),
        (["-rt", "my reward"], "-rt/--reward-type", ["module:function"]),
        (["-rt", "module:"], "-rt/--reward-type", ["module:"]),
        (["-rt", "mod-ule:f"], "-rt/--reward-type", ["mod-ule:f"]),
        (["-rt", "file.txt/x:f"], "-rt/--reward-type", ["file.txt"]),
        (["-temp", "0.001"], "-temp/--temperature", ["0.001", "0.01"]),
        (["--code-sandbox-url", "http://box/run"], "--code-sandbox-url", ["-rt/--reward-type code"]),
        (["-rt", "code", "--code-sandbox-url", "box:80"], "--code-sandbox-url", ["'box:80'", "http"]),
        (["-ptp", "2"], "-ptp/--producer-tensor-parallel-size", ["-b/--backend vllm"]),
        (["-b", "vllm", "-temp", "0.7", "-topp", "0.9"], "-topp/--top-p", ["temperature", "transformers"]),
        (["-b", "vllm", "-topk", "5", "inference.temperature_end=0.9"], "-topk/--top-k", ["temperature"]),
        (["-b", "vllm", "-topk", "9", "inference.temperature_end=0.9"], "-topk/--top-k", ["full distribution"]),
        (["inference.temperature_end=0.001"], "inference.temperature_end", ["0.001"]),
        (['inference.stop=["a", ""]'], "inference.stop", ["empty"]),
        (["algorithm.clip_low=1.5"], "algorithm.clip_low", ["1.5"]),
        (["algorithm.skip_threshold=0.5"], "algorithm.skip_threshold", ["0.5"]),
        (["-mnt", "64", "algorithm.overlong_cache_tokens=65"], "algorithm.overlong_cache_tokens", ["65", "64"]),
        (["transport.peer_timeout_seconds=3"], "transport.peer_timeout_seconds", ["3.0", "2.0"]),
        (["-p", ""], "-p/--project", ["''"]),
        (["-p", "../x"], "-p/--project", ["../x"]),
        (["-p", ".."], "-p/--project", [".."]),
    ],
)
def test_bad_combination_names_the_flag_and_the_numbers(argv: list[str], culprit: str, parts: list[str]) -> None:
    line = first_line(*argv)
    assert line.startswith(culprit), line
    assert all(part in line for part in parts), line


def test_trainers_that_cannot_be_split() -> None:
    line = first_line("-t", "6", "-tp", "2", "-pp", "2")
    assert line.startswith("-t/--num-trainers") and "6" in line and "4 = 2" in line
    assert load_config(["-t", "4", "-tp", "2", "-pp", "2", "-tbs", "32"]).config.dp_size == 1


def test_producers_of_several_ranks_in_the_sum() -> None:
    assert load_config(["-t", "2", "-i", "3", "-ptp", "2", "-b", "vllm"], 8).config.world_size == 8
    with pytest.raises(ConfigError, match=r"2 trainers \+ 3 inferencers x 2 ranks .* = 8 ranks, but the world has 6"):
        load_config(["-t", "2", "-i", "3", "-ptp", "2", "-b", "vllm"], 6)


@pytest.mark.parametrize("kind", ["boxed", "think_answer_tags", "rewards:score", "a.b.c:score", "./my dir/r.py:score"])
def test_reward_types_that_are_fine(kind: str) -> None:
    assert load_config(["-rt", kind]).config.reward.type == kind


@pytest.mark.parametrize("argv", [["-cbsl", "16"], ["-cbsl", "0"], ["-tMbs", "32"], ["-tmbs", "64"], ["-ibs", "8"]])
def test_limits_themselves_are_fine(argv: list[str]) -> None:
    load_config(argv)


def test_user_function_may_score_fractions() -> None:
    load_config(["-a", "DAPO", "-g", "2", "algorithm.filter_range=[0.01, 0.5]", "-rt", "m:f"])


def test_filter_that_is_off_is_not_checked_for_group_size() -> None:
    load_config(["-g", "2", "algorithm.filter_range=[0.01, 0.5]"])


class TestWarnings:
    def test_generation_that_does_not_fill_steps(self) -> None:
        (line,) = warnings("-ibs", "24", "--max-staleness", "9", "--max-token-lag", "9")
        assert line.startswith("-ibs/--inference-batch-size") and "24 x 2 producers = 48" in line and "64 = 32" in line

    def test_more_in_flight_than_staleness_allows(self) -> None:
        # 2 producers x 64 leases / (32 x 2 groups per step) + 1 = 3
        (line,) = warnings()
        assert line.startswith("--max-staleness") and "128 groups in flight" in line and "use 3" in line
        assert warnings("--max-staleness", "3") == []
        assert warnings("-ibs", "32") == []

    def test_hint_rounds_up(self) -> None:
        config = load_config(["-ibs", "40"]).config  # 80 / 64
        assert validate.staleness_for_no_bubble(config) == 3

    def test_synchronous_mode_is_a_choice(self) -> None:
        assert warnings("--max-staleness", "0") == []

    def test_truncated_sampling(self) -> None:
        (line,) = warnings("--max-staleness", "3", "-topk", "50", "-topp", "0.9")
        assert line.startswith("-topk/--top-k and -topp/--top-p")
        (line,) = warnings("--max-staleness", "3", "-topp", "0.9")
        assert line.startswith("-topp/--top-p")

    def test_token_lag_below_staleness(self) -> None:
        (line,) = warnings("--max-staleness", "9")
        assert line.startswith("--max-token-lag") and "8" in line and "9" in line
