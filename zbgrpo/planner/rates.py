"""How fast the parts of a run are: what the simulation needs to know of a machine, a model and a task.

A file of rates is YAML, `zbgrpo plan --rates FILE`; every key can be set on the command line too, as
`section.key=value`:

    decode: {step_seconds: 0.02, slot_seconds: 0.0001, prompt_seconds: 0.03}
    train: {microbatch_seconds: 0.05, token_seconds: 2.0e-5, commit_seconds: 0.5}
    weights: {broadcast_seconds: 1.5}
    lengths: {mean_tokens: 1200, sigma: 0.8, cap_tokens: 8192}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from zbgrpo.config import yamlio
from zbgrpo.errors import ConfigError

Seconds = Annotated[float, Meta(ge=0)]
Tokens = Annotated[float, Meta(ge=0)]
Lengths = list[list[int]]
"""Tokens of each response, by group."""

_BATCH = 4096  # groups drawn at a time


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, by keyword, strict about unknown keys."""


class DecodeRates(Section, frozen=True, kw_only=True):
    """One decode step takes `of_step` of its occupied slots, and what is begun and ended in it more."""

    step_seconds: Seconds = 0.0
    """Of a step by itself, whatever is in it."""
    slot_seconds: Seconds = 0.0
    """Of each occupied slot."""
    bends: list[tuple[int, float]] = []
    """[slots, seconds]: each occupied slot beyond so many takes so much more (less, if negative)."""
    prompt_step_seconds: Seconds = 0.0
    """Of a step in which any response starts."""
    prompt_seconds: Seconds = 0.0
    """Computing one prompt; spread evenly over the responses to it, as they start."""
    finish_seconds: Seconds = 0.0
    """What a finished response adds to the next step: scoring beside decoding where cores are short."""
    response_seconds: Seconds = 0.0
    """Work of the producer's loop for each response, outside the step: decoding text, sending."""
    loop_seconds: Seconds = 0.0
    """Work of the producer's loop for each step, outside the step."""

    def of_step(self, occupied: int) -> float:
        """Seconds of a step with so many occupied slots in which nothing begins or ends."""
        bent = sum(seconds * max(0, occupied - slots) for slots, seconds in self.bends)
        return max(0.0, self.step_seconds + self.slot_seconds * occupied + bent)


class TrainRates(Section, frozen=True, kw_only=True):
    """Of one data-parallel replica, whatever number of ranks it has."""

    microbatch_seconds: Seconds = 0.0
    """Of a forward and backward pass by itself."""
    token_seconds: Seconds = 0.0
    """Of each token, those of prompts included (a prompt counts once for its group)."""
    commit_seconds: Seconds = 0.0
    """The optimizer step, with adding up gradients and writing metrics."""


class WeightRates(Section, frozen=True, kw_only=True):
    copy_seconds: Seconds = 0.0
    """Training stands still while a version is copied aside."""
    broadcast_seconds: Seconds = 0.0
    """A version on its way to the producers, beside everything else."""
    apply_seconds: Seconds = 0.0
    """A producer stands still."""


class LengthRates(Section, frozen=True, kw_only=True):
    """Lengths of responses: those of `groups`, drawn group by group; or lognormal, all equal if sigma is 0."""

    mean_tokens: Tokens = 0.0
    """Mean of the lognormal before it is cut off."""
    sigma: Annotated[float, Meta(ge=0, le=4)] = 0.0
    """Standard deviation of the logarithm."""
    cap_tokens: Optional[Annotated[int, Meta(ge=1)]] = None
    """Longest response (-mnt)."""
    groups: Lengths = []
    """Observed lengths."""
    filtered_groups: Lengths = []
    """Observed lengths of groups that the filter left out; those of `groups` where empty."""


class Rates(Section, frozen=True, kw_only=True):
    """All of them. The defaults of a section mean that it takes no time."""

    decode: DecodeRates = field(default_factory=DecodeRates)
    train: TrainRates = field(default_factory=TrainRates)
    weights: WeightRates = field(default_factory=WeightRates)
    lengths: LengthRates = field(default_factory=LengthRates)
    prompt_tokens: Tokens = 0.0
    """Mean length of a prompt."""
    filtered_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Groups that the filter leaves out (DAPO)."""
    reward_seconds: Seconds = 0.0
    """From the last response of a group until all are scored."""
    hub_seconds: Seconds = 0.001
    """A message between the hub and a rank, one way."""
    save_seconds: Seconds = 0.0
    """Saving at the end of a run; counted in whole runs only."""

    def check(self) -> Rates:
        """Itself; raises ConfigError if nothing takes any time or no response has any token."""
        if not self.lengths.groups and self.lengths.mean_tokens < 1:
            raise ConfigError("rates: lengths.mean_tokens is missing: how long is a response? (or lengths.groups)")
        if not any((self.decode.step_seconds, self.decode.slot_seconds)):
            raise ConfigError("rates: decode.step_seconds and decode.slot_seconds are missing: generation takes time")
        if not any((self.train.microbatch_seconds, self.train.token_seconds)):
            raise ConfigError("rates: train.microbatch_seconds and train.token_seconds are missing: so does training")
        for name in ("groups", "filtered_groups"):
            if any(not group or min(group) < 1 for group in getattr(self.lengths, name)):
                raise ConfigError(f"rates: lengths.{name}: every group needs responses of at least one token")
        return self


def read_rates(path: Optional[Union[str, Path]], overrides: Sequence[str] = (), base: Optional[Rates] = None) -> Rates:
    """Rates of `base`, then of a file, then of `section.key=value` texts; later ones win. Raises ConfigError."""
    tree: dict[str, Any] = {} if base is None else msgspec.to_builtins(base)
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--rates {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--rates {path}: not UTF-8 text: {error}") from None
        _merge(tree, _convert(yamlio.parse(text, str(path)) or {}, str(path)))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: expected KEY=VALUE, such as decode.step_seconds=0.02")
        nested: Any = yamlio.parse(value, key)
        for name in reversed(key.split(".")):
            nested = {name: nested}
        _merge(tree, _convert(nested, override))
    return msgspec.convert(tree, Rates).check()


def _convert(tree: Any, source: str) -> dict[str, Any]:
    """`tree` again, if its keys and values are such as rates have."""
    try:
        rates = msgspec.convert(tree, Rates)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_lower(str(error))}") from None
    numbers = [value for value in _leaves(msgspec.to_builtins(rates)) if isinstance(value, float)]
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{source}: rates must be finite")
    assert isinstance(tree, dict)
    return tree


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _leaves(tree: dict[str, Any]) -> list[Any]:
    return [leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


def _merge(tree: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


class LengthSource:
    """Draws groups: the length of each response, and whether the filter leaves the group out. The n-th group is a
    function of the seed and n, so that scenarios with equal seeds meet equal groups."""

    def __init__(self, rates: Rates, generations: int, seed: int) -> None:
        self._rates, self._generations = rates, generations
        self._random = np.random.default_rng(seed)
        lengths = rates.lengths
        self._kept = _as_table(lengths.groups, generations)
        self._left_out = _as_table(lengths.filtered_groups or lengths.groups, generations)
        self._drawn: list[tuple[list[int], bool]] = []
        self._next = 0

    def draw(self) -> tuple[list[int], bool]:
        """The next group."""
        if self._next == len(self._drawn):
            self._drawn, self._next = self._batch(_BATCH), 0
        self._next += 1
        return self._drawn[self._next - 1]

    def means(self) -> tuple[float, float, float]:
        """Means over responses (of all groups) of tokens and of decode steps, and of tokens of groups kept."""
        batch = LengthSource(self._rates, self._generations, seed=0)._batch(_BATCH)
        lengths = np.array([group for group, _ in batch])
        kept = lengths[[not filtered for _, filtered in batch]]
        return float(lengths.mean()), float(decode_steps(lengths).mean()), float(kept.mean())

    def _batch(self, num: int) -> list[tuple[list[int], bool]]:
        filtered = self._random.random(num) < self._rates.filtered_share
        if self._kept is not None and self._left_out is not None:
            kept = self._kept[self._random.integers(len(self._kept), size=num)]
            left_out = self._left_out[self._random.integers(len(self._left_out), size=num)]
            lengths = np.where(filtered[:, None], left_out, kept)
        else:
            rates = self._rates.lengths
            normal = self._random.standard_normal((num, self._generations))
            # The mean of a lognormal is its median x exp(sigma^2 / 2).
            drawn = rates.mean_tokens * np.exp(rates.sigma * normal - rates.sigma**2 / 2)
            lengths = np.maximum(1, np.rint(np.minimum(drawn, rates.cap_tokens or np.inf))).astype(np.int64)
        return list(zip(lengths.tolist(), filtered.tolist(), strict=True))


def _as_table(groups: Lengths, generations: int) -> Optional[np.ndarray]:
    """Lengths int64 [groups, generations]; a group with another number of responses is repeated or cut."""
    if not groups:
        return None
    return np.stack([np.resize(np.array(group, np.int64), generations) for group in groups])


def decode_steps(lengths: np.ndarray) -> np.ndarray:
    """Decode steps that responses of these lengths take: the first token comes with the prompt."""
    return np.maximum(1, lengths - 1)
