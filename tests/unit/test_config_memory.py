"""The estimate of a consumer rank's memory: its parts by hand, and what settings do to it."""

from __future__ import annotations

import pytest

from zbgrpo.config.load import load_config
from zbgrpo.config.memory import Estimate, Shape, device_bytes, estimate, largest_microbatch, what_helps
from zbgrpo.config.model_size import ModelSize
from zbgrpo.config.schema import RunConfig

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS, HEADS = 1000, 3000, 20_000, 10, 10
MATRIX = VOCABULARY * HIDDEN
LAYER = 12_000_000
TIED = ModelSize(MATRIX + HIDDEN + LAYERS * LAYER, HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS, HEADS, 2, 100, True)
UNTIED = TIED._replace(num_parameters=TIED.num_parameters + MATRIX, is_tied=False)
WHOLE = MATRIX + LAYERS * LAYER
KEYS = "trainer.train_microbatch_size=2 inference.max_new_tokens=100 algorithm.kl_coeff=0"
"""Keys, since flags win over them."""


def config_of(line: str = "") -> RunConfig:
    """Four trainers, two responses of 100 tokens to prompts of 50 at once, no reference model."""
    return load_config(f"-t 4 -i 1 -g 2 -mpt 50 {KEYS} {line}".split()).config


def found(line: str = "", size: ModelSize = TIED) -> Estimate:
    return estimate(config_of(line), size)


def parts(line: str = "", size: ModelSize = TIED) -> dict[str, int]:
    return dict(found(line, size).on_device)


class TestState:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("--precision fp32", {"weights": 4, "optimizer state": 8, "gradients": 4, "two snapshots": 8}),
            ("", {"weights": 2, "master weights": 4, "optimizer state": 8, "gradients": 4, "two snapshots": 4}),
            ("-kl 0.1", {"weights": 2, "reference model": 2}),
            ("-zero 1", {"gathered weights": 2, "master weights": 1, "optimizer state": 2, "gradients": 5}),
            ("-zero 1 -tMbs 1", {"gathered weights": 2, "gradients": 1}),  # one microbatch: nothing to add up before
            ("-zero 2", {"gathered weights": 2, "master weights": 1, "optimizer state": 2, "gradients": 1}),
            ("-zero 2 -kl 0.1", {"reference model": 2}),
            ("-zero 3 -kl 0.1", {"master weights": 1, "gradients": 1, "reference model": 0.5, "two snapshots": 4}),
            ("-tp 2", {"weights": 1, "master weights": 2, "optimizer state": 4, "gradients": 2, "two snapshots": 4}),
            ("-tp 2 -zero 2", {"gathered weights": 1, "master weights": 1, "gradients": 1, "two snapshots": 4}),
        ],
    )
    def test_bytes_per_parameter(self, line: str, expected: dict[str, float]) -> None:
        # Long responses: the moment of the peak is in the backward pass, where all of it is there.
        seen = parts(f"{line} -mnt 2000")
        assert {what: seen[what] / WHOLE for what in expected} == pytest.approx(expected, rel=1e-3)

    def test_zero_needs_other_data_parallel_ranks(self) -> None:
        assert found("-t 1 -zero 3") == found("-t 1")

    def test_layers_gathered_by_zero_3(self) -> None:
        assert parts("-zero 3 -mnt 2000")["gathered weights"] == pytest.approx(2 * (MATRIX + 2 * LAYER), rel=1e-3)

    def test_a_stage_has_its_layers_and_ends(self) -> None:
        first = found("-pp 2 --precision fp32")
        assert dict(first.on_device)["weights"] == pytest.approx(4 * (MATRIX + 5 * LAYER), rel=1e-3)
        middle = 4 * 2.5 * LAYER  # of 10 layers, a stage has at most 3
        assert dict(found("-pp 4 --precision fp32").on_device)["weights"] > middle

    def test_kept_on_the_host(self) -> None:
        line = "-kl 0.1 trainer.offload_optimizer=true trainer.offload_reference=true --weight-staging cpu"
        seen = found(line + " -mnt 2000")
        assert {"master weights", "optimizer state", "reference model", "two snapshots"}.isdisjoint(
            dict(seen.on_device)
        )
        expected = {"master weights": 4, "gradients": 4, "optimizer state": 8, "reference model": 2, "two snapshots": 4}
        assert {what: n / WHOLE for what, n in seen.on_host} == pytest.approx(expected, rel=1e-3)
        assert dict(seen.on_device)["gradients"] == pytest.approx(4 * WHOLE, rel=1e-3)
        spread = found(line + " -zero 2 -mnt 2000")
        assert "gradients" not in dict(spread.on_device)
        assert dict(spread.on_host)["optimizer state"] == pytest.approx(2 * WHOLE, rel=1e-3)


class TestComingAndGoing:
    def test_activations_by_hand(self) -> None:
        seen = found("-mnt 1000")
        positions, tokens = 50 + 2 * 1000, 2 * 1000
        assert seen.moment == "the backward pass goes through the head"
        layer = 2 * (4 + 2 + 2) * HIDDEN + 4 * 2 * HIDDEN + 4 * 2 * FEED_FORWARD
        mask, norm, selected = 2 * positions, (4 + 2 + 2) * HIDDEN, 2 * tokens * HIDDEN
        assert dict(seen.on_device)["activations"] == positions * (LAYERS * layer + mask + norm) + selected

    def test_checkpointing_keeps_the_inputs_of_layers(self) -> None:
        positions = 50 + 2 * 4000
        plain, saving = (parts(f"-mnt 4000 trainer.gradient_checkpointing={on}") for on in ("false", "true"))
        assert plain["activations"] - saving["activations"] > 6 * positions * 40 * HIDDEN  # 40 = 16 + 8 + 24 - 8 ...

    def test_stages_hold_several_microbatches(self) -> None:
        # Activations outweigh the head's logits here, and the first of two stages holds those of two microbatches.
        assert found("-pp 2 -mnt 4000").stage == 0
        # A vocabulary that outweighs all else makes it the last one.
        assert found("-pp 2 -mnt 10 trainer.logprob_chunk_tokens=1000", TIED._replace(vocab_size=1000)).stage in (0, 1)

    def test_logits_are_those_of_a_chunk(self) -> None:
        def logits(chunk: int) -> int:
            return parts(f"-mnt 2000 trainer.logprob_chunk_tokens={chunk}")["logits of a chunk"]

        assert logits(2000) - logits(1000) == pytest.approx(1000 * VOCABULARY * (2 * 4 + 2), rel=0.5)
        assert logits(4000) == logits(8000)  # there are no more tokens

    def test_an_untied_head_is_another_matrix(self) -> None:
        assert parts("", UNTIED)["weights"] - parts("")["weights"] == 2 * MATRIX

    @pytest.mark.parametrize("line", ["", "-zero 1", "-zero 2", "-zero 3", "-tp 2", "-pp 2", "-tp 2 -pp 2", "-kl 0.1"])
    @pytest.mark.parametrize("more", ["-mnt 400", "-mpt 400", "-tmbs 4", "-kl 0.2", "--precision fp32"])
    def test_more_never_takes_less(self, line: str, more: str) -> None:
        assert found(f"{line} {more}").device_bytes >= found(line).device_bytes

    @pytest.mark.parametrize("size", [TIED, UNTIED], ids=["tied", "untied"])
    def test_each_zero_stage_takes_less_than_the_one_before(self, size: ModelSize) -> None:
        needed = [found(f"-zero {stage} -tMbs 4", size).device_bytes for stage in range(4)]
        assert needed == sorted(needed, reverse=True) and len(set(needed)) == 4


class TestLargestMicrobatch:
    @pytest.mark.parametrize(
        ("line", "shape"),
        [
            ("-g 4 -tmbs 1", Shape(1, 150, 100)),
            ("-g 4 -tmbs 4", Shape(1, 450, 400)),
            ("-g 4 -tmbs 8", Shape(2, 450, 800)),
            ("-g 3 -tmbs 2", Shape(1, 250, 200)),  # or one of each of two groups, padded to 2 x 150
            ("-g 2 -tmbs 3", Shape(2, 250, 300)),
        ],
    )
    def test_responses_of_a_group_share_a_row(self, line: str, shape: Shape) -> None:
        assert largest_microbatch(config_of(line)) == shape


class TestWhatHelps:
    def keys(self, line: str, size: ModelSize = TIED) -> list[str]:
        return [key for change, _ in what_helps(config_of(line), size) for key in change]

    def test_of_a_model_that_is_all_weights(self) -> None:
        keys = self.keys("-tmbs 1 -mnt 50 -kl 0.1")
        assert keys[0] in ("trainer.tensor_parallel_size", "trainer.zero_stage", "trainer.offload_optimizer")
        assert {"trainer.pipeline_parallel_size", "trainer.offload_reference", "weights.staging"} <= set(keys)
        assert "inference.max_new_tokens" not in keys

    def test_of_long_responses(self) -> None:
        keys = self.keys("-mnt 30000 -zero 3")
        assert {"inference.max_new_tokens", "trainer.train_microbatch_size", "trainer.gradient_checkpointing"} <= set(
            keys
        )

    def test_only_what_can_be_set(self) -> None:
        assert "trainer.zero_stage" not in self.keys("-t 1")
        assert "trainer.tensor_parallel_size" not in self.keys("-tp 2")  # 2 key-value heads
        assert "trainer.pipeline_parallel_size" not in self.keys("-t 2 -pp 2")
        assert "trainer.offload_reference" not in self.keys("")

    def test_each_says_what_it_needs(self) -> None:
        for change, needed in what_helps(config_of("-kl 0.1"), TIED):
            ((key, value),) = change.items()
            kept = [setting for setting in KEYS.split() if not setting.startswith(key)]
            line = f"-t 4 -i 1 -g 2 -mpt 50 -kl 0.1 {' '.join(kept)} {key}={str(value).lower()}"
            assert needed == estimate(load_config(line.split()).config, TIED).device_bytes

    def test_nothing_said_about_the_device(self) -> None:
        assert device_bytes(config_of()) is None
        assert device_bytes(config_of("cluster.memory_gib=1.5")) == 3 * 2**29
