"""What overlapping is worth: a run against the same run with --max-staleness 0: `zbgrpo bench overlap`.

One producer and one consumer, a core each (the producer's has its reward workers too, the consumer's the hub),
responses of one length. Two short runs measure what decode steps and microbatches cost; their numbers are then chosen
so that generating a step's groups takes as long as training them. Then pairs of a synchronous and an asynchronous run.

    ratio        samples/s of the asynchronous run by those of the synchronous one, where roles take turns: at most 2,
                 but for what turns cost beside (an empty start of each round, a wait for the last response)
    alone_ratio  samples/s of the asynchronous run by those of its slower role alone, as it works in the synchronous run
                 where nobody is beside it
    bubble       consumers, producers: of the asynchronous run, between two commits (see zbgrpo/bench/roles.py);
                 limiting: of the slower role; other: of the faster one, less `imbalance`, the share of its time that
                 it would idle at these rates if nothing were lost
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from zbgrpo.bench.common import load_average, pairs_summary, rounded
from zbgrpo.bench.roles import (
    GENERATIONS,
    Sizes,
    Window,
    bubbles_summary,
    measure_pairs,
    prepare,
    read_window,
    run,
)

NUM_PAIRS = 3
WINDOW_STEPS = 15
TOKENS = 32
GROUPS_PER_STEP = 8
_MOST_SLOTS = 8  # in groups


class Pair(NamedTuple):
    """A synchronous and an asynchronous run, one after the other."""

    synchronous: Window
    asynchronous: Window

    @property
    def ratio(self) -> float:
        return self.asynchronous.samples_per_s / self.synchronous.samples_per_s

    @property
    def slower_seconds(self) -> float:
        """Of a step's work of the slower role, done alone."""
        return max(self.synchronous.training_seconds, self.synchronous.generating_seconds)

    @property
    def alone_ratio(self) -> float:
        return self.slower_seconds / self.asynchronous.step_seconds

    @property
    def consumers_limit(self) -> bool:
        return self.asynchronous.training_seconds >= self.asynchronous.generating_seconds

    @property
    def imbalance(self) -> float:
        """By the rates of the asynchronous run itself, where each role works beside the other one."""
        both = self.asynchronous.training_seconds, self.asynchronous.generating_seconds
        return 1 - min(both) / max(both)

    @property
    def limiting_bubble(self) -> float:
        return self.asynchronous.consumers if self.consumers_limit else self.asynchronous.producers

    @property
    def other_bubble(self) -> float:
        """Beyond the imbalance of rates."""
        other = self.asynchronous.producers if self.consumers_limit else self.asynchronous.consumers
        return other - self.imbalance


def sizes_of(slots_groups: int, microbatch: int) -> Sizes:
    """Of a run with that many groups decoded together, as many leases again, so that slots are refilled, and that many
    responses in a microbatch."""
    return Sizes(GROUPS_PER_STEP, GROUPS_PER_STEP, microbatch, slots_groups, 2 * slots_groups, TOKENS)


def balanced_sizes(few: tuple[Sizes, Window], many: tuple[Sizes, Window]) -> Sizes:
    """With which generating takes as long as training, from two synchronous runs with other slots and microbatches.

    Their generating seconds give the two costs of a decode step, a + b x slots, with which every other number's follow.
    Occupied slots are what is counted, so a last, partly filled round costs its part. Their training seconds are what
    their microbatches cost.
    """
    (x0, y0), (x1, y1) = ((s.slots_groups, w.generating_seconds / _rounds(s.slots_groups)) for s, w in (few, many))
    slope = (y1 - y0) / (x1 - x0)

    def imbalance(slots: int, training: float) -> float:
        return abs(math.log(_rounds(slots) * (y0 + slope * (slots - x0)) / training))

    choices = [
        (imbalance(slots, window.training_seconds), slots, sizes.microbatch_responses)
        for slots in range(1, _MOST_SLOTS + 1)
        for sizes, window in (few, many)
    ]
    _, slots, microbatch = min(choices)
    return sizes_of(slots, microbatch)


def _rounds(slots: int) -> float:
    return GROUPS_PER_STEP / slots


def measure(folder: Path, num_pairs: int, window_steps: int) -> dict[str, Any]:
    """All runs. Raises ZbgrpoError if one fails."""
    prepare(folder, repeat([TOKENS] * GENERATIONS))

    def window(name: str, sizes: Sizes, max_staleness: int, steps: int) -> Window:
        return read_window(run(folder, name, sizes, max_staleness, steps), sizes, steps)

    few, many = (
        (sizes, window(f"slots-{sizes.slots_groups}", sizes, 0, 4))
        for sizes in (sizes_of(2, GENERATIONS), sizes_of(_MOST_SLOTS, GENERATIONS // 2))
    )
    sizes = balanced_sizes(few, many)
    staleness = sizes.staleness_for_no_bubble
    pairs = [
        Pair(
            window(f"synchronous-{n}", sizes, 0, window_steps),
            window(f"asynchronous-{n}", sizes, staleness, window_steps),
        )
        for n in range(num_pairs)
    ]
    return report(pairs) | {
        "slots": sizes.slots_groups * GENERATIONS,
        "microbatch": sizes.microbatch_responses,
        "max_staleness": staleness,
        "load_average": load_average(),
    }


def report(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians over the pairs, and how far they lie apart."""
    bubbles = {
        "consumers": [pair.asynchronous.consumers for pair in pairs],
        "producers": [pair.asynchronous.producers for pair in pairs],
        "imbalance": [pair.imbalance for pair in pairs],
        "limiting": [pair.limiting_bubble for pair in pairs],
        "other": [pair.other_bubble for pair in pairs],
    }
    return {
        **pairs_summary([pair.ratio for pair in pairs]),
        **pairs_summary([pair.alone_ratio for pair in pairs], "alone_ratio"),
        **bubbles_summary(bubbles),
        "pairs": [
            {
                kind: {key: rounded(value) for key, value in window._asdict().items()}
                for kind, window in pair._asdict().items()
            }
            for pair in pairs
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    return measure_pairs("overlap", __doc__, measure, NUM_PAIRS, WINDOW_STEPS, arguments)


if __name__ == "__main__":
    sys.exit(main())
