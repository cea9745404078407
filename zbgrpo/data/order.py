"""The order in which rows are leased: a function of (seed, episode) alone, so that a resume needs no state."""

from __future__ import annotations

import numpy as np

_WORD_MASK = 2**64 - 1
_DOMAIN = 0x6F72646572  # "order" in ASCII: keeps this stream apart from other uses of the same seed


def permutation(num_items: int, seed: int, stream: int) -> np.ndarray:
    """Random permutation of range(num_items), int32 [num_items]; (seed, stream) fixes it on every machine.

    Sorts the raw words of the counter-based generator Philox. numpy promises that the raw stream of a bit generator
    stays the same between releases, which it does not promise for `Generator.permutation`.
    """
    if num_items < 0:
        raise ValueError(f"num_items must not be negative, got {num_items}")
    key = np.array([seed & _WORD_MASK, stream & _WORD_MASK], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=[0, 0, 0, _DOMAIN]).random_raw(num_items)
    return np.argsort(words, kind="stable").astype(np.int32)


def episode_order(num_rows: int, episode: int, seed: int) -> np.ndarray:
    """Row indices in the order in which one episode leases them: int32 [num_rows], every row once."""
    return permutation(num_rows, seed, episode)
