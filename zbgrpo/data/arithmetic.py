"""A task that needs no download: sums of two numbers of two digits, in think/answer form.

The pairs of numbers are split into three sets that share no sum of the same two numbers, in whatever order: warm-up
(supervised, to give a policy something to start from), train (GRPO) and held-out (evaluation).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zbgrpo.data.order import permutation

SMALLEST, LARGEST = 10, 99
"""Range of both operands. All have two digits, so every prompt has the same number of tokens."""

NUM_TRAIN, NUM_HELDOUT = 2048, 256
"""Rows of the train and the held-out set; the warm-up set takes what is left of the 4,095 pairs."""


class Pair(NamedTuple):
    """The operands of one question, in the order they are asked."""

    a: int
    b: int


class Splits(NamedTuple):
    """Three sets of pairs; no unordered pair is in two of them, or twice in one."""

    warmup: list[Pair]
    train: list[Pair]
    heldout: list[Pair]


def make_splits(seed: int) -> Splits:
    """The three sets, fixed by the seed. Which operand comes first is random too."""
    pairs = [Pair(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]
    order = permutation(len(pairs), seed, stream=0)
    swap = permutation(len(pairs), seed, stream=1) % 2 == 1
    shuffled = [Pair(*reversed(pairs[index])) if swap[index] else pairs[index] for index in order]
    heldout, rest = shuffled[:NUM_HELDOUT], shuffled[NUM_HELDOUT:]
    return Splits(warmup=rest[NUM_TRAIN:], train=rest[:NUM_TRAIN], heldout=heldout)


def make_row(pair: Pair) -> dict[str, Any]:
    """The question as a row of a data set."""
    messages = {"role": "user", "content": f"What is {pair.a} + {pair.b}?"}
    return {"messages": messages, "gt_answer": str(pair.a + pair.b)}


def worked_response(pair: Pair, answer: int) -> str:
    """A response that adds ones and tens apart and then states `answer`, right or not: 12+30 and 42 for 17 + 25."""
    ones = pair.a % 10 + pair.b % 10
    tens = (pair.a // 10 + pair.b // 10) * 10
    return f"<think>{ones}+{tens}</think><answer>{answer}</answer>"
