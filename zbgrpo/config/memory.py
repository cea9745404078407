"""Memory of one consumer rank at its worst moment, by arithmetic: nothing is loaded and no device is asked.

Words, all of one rank: N parameters of its pipeline stage and tensor-parallel part, of which n in a decoder layer and E
outside of layers (embedding, norm, head); c bytes of a number that is computed with (2 bf16, 4 fp32); D, T ranks of the
dp and tp axes; L layers of the stage; t positions of the largest microbatch, in rows of s positions; H, I, Q widths of
hidden state, feed-forward and all query heads; V rows of the vocabulary. "Spread" means zero 1 to 3 with D > 1.

weights           whole: cN, and 4N of master weights if c is 2. Spread: 4N / D of master weights, and gathered ones:
                  cN from the first forward pass to the optimizer (zero 1, 2), or c (E + 2n) for the ends, the layer in
                  work and the one fetched ahead (zero 3)
gradients         4N; spread 4N / D, and 4N more where zero 1 adds up the microbatches of a minibatch
optimizer         8N, two moments; spread 8N / D
reference model   cN; zero 3 cN / D, and c (E + 2n) while it works
snapshots         2cN T, two of the stage's whole weights, on the source (the first rank of a stage) only
activations       of a layer, what autograd keeps of Llama's arithmetic: per position 2 (4 + 2c) H for two norms, whose
                  inputs are kept in float32; 4cQ / T for queries, outputs, and keys and values repeated for every query
                  head; 4cI / T. The last norm: (4 + 2c) H. The mask: c s for every position. With gradient
                  checkpointing cH for every layer, and one layer whole. A stage holds as many microbatches as there are
                  stages from it to the last one.
logits            of k = logprob_chunk_tokens: 2 float32 buffers of k V / T forward, one backward, and one of c bytes
                  each way if c is 2 (see `algorithms.logprobs`)
gradients on      not yet added to the others. Tied weights: cVH / T of the head's, until the embedding's follows at the
their way         end of the backward pass. Spread: of a layer, and at the end of E, what is sent to be added up, gloo's
                  copy of it (with NCCL the gradients as they came), and what comes back: 8 + 4 / D bytes each
tensor in work    publishing gathers one tensor after the other: the largest, cVH, twice

Left out: what libraries and the device's context need for themselves, kernels' own buffers, and fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from zbgrpo.config.model_size import ModelSize
from zbgrpo.config.schema import RunConfig

_FLOAT32 = 4
_WEIGHTS, _MASTERS, _GATHERED = "weights", "master weights", "gathered weights"
_GRADIENTS, _OPTIMIZER, _REFERENCE, _SNAPSHOTS = "gradients", "optimizer state", "reference model", "two snapshots"
_ACTIVATIONS, _LOGITS, _ON_THEIR_WAY = "activations", "logits of a chunk", "gradients on their way"
_IN_WORK = "tensor in work"


class Part(NamedTuple):
    what: str
    num_bytes: int


class Estimate(NamedTuple):
    """What a consumer rank holds when it holds most. The parts are those of one moment and add up."""

    stage: int
    """Pipeline stage of the rank."""
    moment: str
    """When that is, as a clause."""
    on_device: list[Part]
    on_host: list[Part]
    """Kept in the host's memory by settings."""

    @property
    def device_bytes(self) -> int:
        return sum(part.num_bytes for part in self.on_device)

    @property
    def host_bytes(self) -> int:
        return sum(part.num_bytes for part in self.on_host)


def estimate(config: RunConfig, size: ModelSize) -> Estimate:
    """The rank that needs most, a source, at the moment when it does; see the module's text. `size` must be complete,
    `config` resolved and valid. Every prompt and response is taken to be as long as they may be."""
    stages = config.trainer.pipeline_parallel_size
    return max((_Rank.of(config, size, stage).peak() for stage in range(stages)), key=lambda found: found.device_bytes)


def device_bytes(config: RunConfig) -> int | None:
    """Memory of a rank's device as the user says it is; None where nothing is said."""
    return None if config.cluster.memory_gib is None else int(config.cluster.memory_gib * 1024**3)


def what_helps(config: RunConfig, size: ModelSize) -> list[tuple[dict[str, Any], int]]:
    """Changes of settings (by key) that make a consumer rank need at least 1 % less, with what it needs then, in
    bytes; the one that helps most first. Each is one step, from what is set, and of use by itself."""
    now = estimate(config, size).device_bytes
    found = []
    for change in _changes(config, size):
        needed = estimate(_changed(config, change), size).device_bytes
        if needed < 0.99 * now:
            found.append((change, needed))
    return sorted(found, key=lambda entry: entry[1])


def _changes(config: RunConfig, size: ModelSize) -> Iterator[dict[str, Any]]:
    trainer, trainers = config.trainer, config.cluster.num_trainers or 1
    tp, pp = trainer.tensor_parallel_size, trainer.pipeline_parallel_size
    if config.dp_size > 1:
        yield from ({"trainer.zero_stage": stage} for stage in range(trainer.zero_stage + 1, 4))
    if trainers % (2 * tp * pp) == 0:
        if size.num_kv_heads % (2 * tp) == 0 and size.num_heads % (2 * tp) == 0:
            yield {"trainer.tensor_parallel_size": 2 * tp}
        if size.num_layers >= 2 * pp:
            yield {"trainer.pipeline_parallel_size": 2 * pp}
    if trainer.train_microbatch_size > 1:
        yield {"trainer.train_microbatch_size": trainer.train_microbatch_size // 2}
    if config.inference.max_new_tokens > 1:
        yield {"inference.max_new_tokens": config.inference.max_new_tokens // 2}
    for key in ("gradient_checkpointing", "offload_optimizer", "offload_reference"):
        if not getattr(trainer, key):
            yield {f"trainer.{key}": True}
    if config.weights.staging != "cpu":
        yield {"weights.staging": "cpu"}


def _changed(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    for path, value in change.items():
        section, key = path.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


class Shape(NamedTuple):
    """Sizes of a microbatch."""

    rows: int
    positions: int
    """Of each row."""
    response_tokens: int

    @property
    def num_positions(self) -> int:
        return self.rows * self.positions


def largest_microbatch(config: RunConfig) -> Shape:
    """The microbatch that needs most when all responses are as long as they may be. Its rows are the parts of groups
    that its responses fall into, each with its prompt, padded to the longest (see `algorithms.packing`)."""
    at_once, group = config.trainer.train_microbatch_size, config.inference.num_generations
    prompt, response = config.data.max_prompt_tokens, config.inference.max_new_tokens
    shapes = []
    for start in range(0, math.lcm(at_once, group), at_once):
        parts, place, left = [], start % group, at_once
        while left:
            parts.append(min(left, group - place))
            place, left = 0, left - parts[-1]
        shapes.append(Shape(len(parts), prompt + max(parts) * response, at_once * response))
    return max(shapes, key=lambda shape: shape.rows * shape.positions**2)


@dataclass(frozen=True)
class _Rank:
    """One source rank, in the words of the module's text."""

    stage: int
    compute_bytes: int
    dp: int
    tp: int
    zero: int  # 0 where dp is 1
    layers: int
    layer_parameters: int
    end_parameters: int
    vocabulary_parameters: int  # of one matrix, embedding or head
    is_first: bool
    is_last: bool
    tied: bool  # on this rank
    tied_over_stages: bool
    hidden: int
    feed_forward: int
    attention: int
    vocabulary: int
    shape: Shape
    held: int
    adds_up_whole: bool  # zero 1: gradients of several microbatches, before they are spread
    chunk: int
    has_reference: bool
    checkpointing: bool
    optimizer_on_host: bool
    reference_on_host: bool
    snapshots_on_host: bool

    @staticmethod
    def of(config: RunConfig, size: ModelSize, stage: int) -> _Rank:
        trainer = config.trainer
        assert size.is_complete
        tp, pp = trainer.tensor_parallel_size, trainer.pipeline_parallel_size
        shape = largest_microbatch(config)
        responses = trainer.train_minibatch_size * config.inference.num_generations
        microbatches = -(-responses // trainer.train_microbatch_size)
        matrix = size.vocab_size * size.hidden_size
        in_layers = size.num_parameters - matrix * (1 if size.is_tied else 2) - size.hidden_size
        is_first, is_last = stage == 0, stage == pp - 1
        matrices = 1 if size.is_tied and pp == 1 else is_first + is_last
        zero = trainer.zero_stage if config.dp_size > 1 else 0
        return _Rank(
            stage=stage,
            compute_bytes=2 if trainer.precision == "bf16" else 4,
            dp=config.dp_size,
            tp=tp,
            zero=zero,
            layers=-(-size.num_layers // pp),  # at most; the ends may have one less
            layer_parameters=in_layers // size.num_layers // tp,
            end_parameters=matrices * matrix // tp,
            vocabulary_parameters=matrix,
            is_first=is_first,
            is_last=is_last,
            tied=size.is_tied and pp == 1,
            tied_over_stages=size.is_tied and pp > 1,
            hidden=size.hidden_size,
            feed_forward=size.intermediate_size // tp,
            attention=size.num_heads * size.head_size // tp,
            vocabulary=size.vocab_size // tp,
            shape=shape,
            held=min(pp - stage, microbatches),
            adds_up_whole=zero == 1 and microbatches > 1,
            chunk=min(trainer.logprob_chunk_tokens, shape.response_tokens),
            has_reference=bool(config.algorithm.kl_coeff),
            checkpointing=trainer.gradient_checkpointing,
            optimizer_on_host=trainer.offload_optimizer,
            reference_on_host=trainer.offload_reference,
            snapshots_on_host=config.weights.staging == "cpu",
        )

    # ------------------------------------------------------------------------------------------ what always is there

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.end_parameters

    @property
    def _own(self) -> int:
        """Parameters whose master weights this rank has."""
        return self.parameters // (self.dp if self.zero else 1)

    def _gathered(self, zero: int) -> int:
        if zero == 3:
            return self.compute_bytes * (self.end_parameters + 2 * min(1, self.layers) * self.layer_parameters)
        return self.compute_bytes * self.parameters if zero else 0

    def _state(self) -> list[Part]:
        """What is on the device all the time."""
        own = _FLOAT32 * self._own
        parts = []
        if not self.zero:
            parts.append(Part(_WEIGHTS, self.compute_bytes * self.parameters))
        if not self.optimizer_on_host:
            if self.zero or self.compute_bytes == 2:
                parts.append(Part(_MASTERS, own))
            parts.append(Part(_OPTIMIZER, 2 * own))
        if self.has_reference and not self.reference_on_host:
            parts.append(Part(_REFERENCE, self._reference_bytes))
        if not self.snapshots_on_host:
            parts.append(Part(_SNAPSHOTS, self._snapshot_bytes))
        return parts

    @property
    def _reference_bytes(self) -> int:
        return self.compute_bytes * self.parameters // (self.dp if self.zero == 3 else 1)

    @property
    def _snapshot_bytes(self) -> int:
        parameters = self.parameters * self.tp
        if self.tied_over_stages and self.is_last:  # the first stage sends them
            parameters -= self.vocabulary_parameters
        return 2 * self.compute_bytes * parameters

    def _on_host(self) -> list[Part]:
        parts = []
        if self.optimizer_on_host:
            own = _FLOAT32 * self._own
            parts += [Part(_MASTERS, own), Part(_GRADIENTS, own), Part(_OPTIMIZER, 2 * own)]
        if self.has_reference and self.reference_on_host:
            parts.append(Part(_REFERENCE, self._reference_bytes))
        if self.snapshots_on_host:
            parts.append(Part(_SNAPSHOTS, self._snapshot_bytes))
        return parts

    def _gradients(self, whole: int) -> Part:
        """`whole`: parameters whose gradients exist whole where zero 1 adds them up."""
        if not self.zero:
            return Part(_GRADIENTS, _FLOAT32 * self.parameters)
        spread = 0 if self.optimizer_on_host else self._own
        return Part(_GRADIENTS, _FLOAT32 * (spread + (whole if self.adds_up_whole else 0)))

    # ------------------------------------------------------------------------------------------ what comes and goes

    @property
    def _layer_activations(self) -> int:
        norms = 2 * (_FLOAT32 + 2 * self.compute_bytes) * self.hidden
        products = 4 * self.compute_bytes * (self.attention + self.feed_forward)
        return self.shape.num_positions * (norms + products)

    @property
    def _mask(self) -> int:
        return self.compute_bytes * self.shape.num_positions * self.shape.positions

    @property
    def _outer_activations(self) -> int:
        """Outside of layers, without the mask."""
        if not self.is_last:
            return 0
        norm = self.shape.num_positions * (_FLOAT32 + 2 * self.compute_bytes) * self.hidden
        return norm + self.shape.response_tokens * self.compute_bytes * self.hidden

    def _activations(self, layers: int) -> int:
        """Of all microbatches held, the one in work with this many layers."""
        each = self._layer_activations
        if self.checkpointing:
            each = self.shape.num_positions * self.compute_bytes * self.hidden
        return each * (layers + (self.held - 1) * self.layers) + self.held * (self._mask + self._outer_activations)

    def _logits(self, num_float32: int) -> int:
        low = self.compute_bytes if self.compute_bytes < _FLOAT32 else 0
        return self.chunk * self.vocabulary * (num_float32 * _FLOAT32 + low)

    @property
    def _head_gradient(self) -> int:
        return self.compute_bytes * self.vocabulary_parameters // self.tp if self.is_last else 0

    def _summing(self, parameters: int) -> int:
        """To add up the gradients of so many parameters over the dp axis."""
        if not self.zero:
            return 0
        whole = _FLOAT32 if self.adds_up_whole else 2 * _FLOAT32
        return parameters * whole + parameters * _FLOAT32 // self.dp

    def _moments(self) -> Iterator[tuple[str, list[Part]]]:
        """What there is beside `_state`, at the moments that can be the worst."""
        gathered, whole = Part(_GATHERED, self._gathered(self.zero)), self._gradients(self.parameters)
        at_once = self.shape.num_positions * self.compute_bytes  # for every unit of width
        kept = self._head_gradient if self.tied else 0
        if self.has_reference:
            forward = at_once * (3 * self.feed_forward + 4 * self.hidden) + self._mask
            reference = self._reference_bytes if self.reference_on_host else 0
            reference = self._gathered(3) if self.zero == 3 else reference
            parts = [Part(_REFERENCE + " in work", reference), Part(_ACTIVATIONS, forward)]
            logits = Part(_LOGITS, self._logits(2) if self.is_last else 0)
            policy = Part(_GATHERED, 0) if self.zero == 3 else gathered
            yield "the reference model computes log-probs", [policy, self._gradients(0), *parts, logits]
        if self.is_last:
            everything = Part(_ACTIVATIONS, self._activations(self.layers))
            yield "log-probs are made of logits", [gathered, whole, everything, Part(_LOGITS, self._logits(2))]
            # The hidden state is there scaled, and its gradient in float32.
            work = self.shape.response_tokens * self.hidden * (self.compute_bytes + 2 * _FLOAT32)
            logits = Part(_LOGITS, self._logits(1) + work)
            fresh = Part(_ON_THEIR_WAY, self._head_gradient)
            yield "the backward pass goes through the head", [gathered, whole, everything, logits, fresh]
        computing = self._layer_activations + 2 * at_once * self.feed_forward
        if self.checkpointing and self.zero:
            computing += _FLOAT32 * self.layer_parameters  # of the layer before, still on their way
        summing = self._summing(self.layer_parameters)
        rest = self._activations(self.layers if self.checkpointing else self.layers - 1)
        activations = Part(_ACTIVATIONS, rest + (computing if computing > summing else 0))
        fresh = Part(_ON_THEIR_WAY, kept + (0 if computing > summing else summing))
        yield "the backward pass goes through a layer", [gathered, whole, activations, fresh]
        gathered = Part(_GATHERED, 0) if self.zero == 3 else gathered  # let go before gradients are added up
        yield "the backward pass ends", [gathered, self._gradients(self.end_parameters), *self._at_the_end()]
        if self.tied_over_stages and (self.is_first or self.is_last):
            one = _FLOAT32 * self.vocabulary_parameters // self.tp // (self.dp if self.zero else 1)
            parts = [gathered, self._gradients(0), Part(_ON_THEIR_WAY, one)]
            yield "the ends add up the gradients of tied weights", parts
        yield (
            "the weights are published",
            [Part(_GRADIENTS, 0 if self.zero else whole.num_bytes), Part(_IN_WORK, self._publishing())],
        )

    def _at_the_end(self) -> list[Part]:
        """The embedding's gradient is new: it is beside the head's, which it is tied to, or beside its float32 copy."""
        others = Part(_ACTIVATIONS, (self.held - 1) * self._activations(0))
        one = self.vocabulary_parameters // self.tp if self.is_first else 0
        needs_copy = self.tied or self.compute_bytes < _FLOAT32
        fresh = (self.compute_bytes + (_FLOAT32 if needs_copy else 0)) * one
        if self.tp > 1:  # the embedding's gradient has all rows before each rank takes its own
            fresh = self.compute_bytes * (one + 2 * self.vocabulary_parameters * self.is_first)
        return [others, Part(_ON_THEIR_WAY, max(fresh, self._summing(self.end_parameters)))]

    def _publishing(self) -> int:
        if not self.zero and self.tp == 1:
            return 0
        shards = self.tp * (self.dp if self.zero else 1)
        return self.compute_bytes * (2 * self.vocabulary_parameters + self.vocabulary_parameters // shards)

    def peak(self) -> Estimate:
        moments = [(moment, [*self._state(), *parts]) for moment, parts in self._moments()]
        moment, parts = max(moments, key=lambda found: sum(part.num_bytes for part in found[1]))
        return Estimate(self.stage, moment, [part for part in parts if part.num_bytes], self._on_host())
