"""Heavy-tailed lengths: `zbgrpo bench tails`.

One producer and one consumer, a core each. The lengths of responses are lognormal with sigma 1, cut off at 50 times the
median, each response's own. --max-staleness is groups in flight / S + 1; nothing may be dropped.

    bubble           consumers, producers: between two commits (see zbgrpo/bench/roles.py); limiting: of the role that
                     works more of its time
    tokens_left_out  share of the trained tokens that lagged more than --max-token-lag
    synchronous      the same run with --max-staleness 0, for comparison: its bubbles, and `ratio`, samples per second
                     of the first by those of this one
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

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
from zbgrpo.errors import ZbgrpoError

NUM_PAIRS = 3
WINDOW_STEPS = 15
MEDIAN_TOKENS, SIGMA, CAP = 16, 1.0, 50
SIZES = Sizes(
    groups_per_step=16,
    minibatch=8,
    microbatch_responses=GENERATIONS,
    slots_groups=5,
    leases=15,
    max_new_tokens=MEDIAN_TOKENS * CAP,
)


def lengths(seed: int = 0) -> Iterator[list[int]]:
    """Of the responses to one row after the other."""
    random = np.random.default_rng(seed)
    while True:
        drawn = MEDIAN_TOKENS * random.lognormal(0.0, SIGMA, GENERATIONS)
        yield np.clip(np.round(drawn), 1, MEDIAN_TOKENS * CAP).astype(int).tolist()


def limiting_bubble(window: Window) -> float:
    """That of the role with more work."""
    return window.consumers if window.training_seconds >= window.generating_seconds else window.producers


def measure(folder: Path, num_pairs: int, window_steps: int) -> dict[str, Any]:
    """All runs. Raises ZbgrpoError if one fails or drops a group."""
    prepare(folder, lengths())
    staleness = SIZES.staleness_for_no_bubble

    def window(name: str, max_staleness: int) -> Window:
        return read_window(run(folder, name, SIZES, max_staleness, window_steps), SIZES, window_steps)

    pairs = [(window(f"synchronous-{n}", 0), window(f"tails-{n}", staleness)) for n in range(num_pairs)]
    if any(run.dropped for pair in pairs for run in pair):
        raise ZbgrpoError("groups were dropped, so the figures are not of all lengths")
    return report(pairs) | {"max_staleness": staleness, "load_average": load_average()}


def report(pairs: Sequence[tuple[Window, Window]]) -> dict[str, Any]:
    """Of (synchronous, asynchronous) pairs: medians, and how far they lie apart."""
    windows = [own for _, own in pairs]
    bubbles = {
        "consumers": [own.consumers for own in windows],
        "producers": [own.producers for own in windows],
        "limiting": [limiting_bubble(own) for own in windows],
    }
    left_out = [own.tokens_left_out for own in windows]
    return {
        **bubbles_summary(bubbles),
        "tokens_left_out": rounded(median(left_out)),
        "tokens_left_out_max": rounded(max(left_out)),
        "synchronous": {
            **pairs_summary([own.samples_per_s / turns.samples_per_s for turns, own in pairs]),
            "consumers": rounded(median(turns.consumers for turns, _ in pairs)),
            "producers": rounded(median(turns.producers for turns, _ in pairs)),
        },
        "pairs": [[{k: rounded(v) for k, v in window._asdict().items()} for window in pair] for pair in pairs],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    return measure_pairs("tails", __doc__, measure, NUM_PAIRS, WINDOW_STEPS, arguments)


if __name__ == "__main__":
    sys.exit(main())
