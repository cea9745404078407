"""The order in which the rows of an episode are leased: a function of (seed, episode) alone, so a resume needs no state."""

from __future__ import annotations

import numpy as np

_WORD_MASK = 2**64 - 1
_DOMAIN = 0x6F72646572  # "order" in ASCII: keeps this stream apart from other uses of the same seed


def permutation(num_items: int, seed: int, stream: int) -> np.ndarray:
    """Random permutation of range(num_items), int32 [num_items], fixed by (seed, stream) for every machine and version.

    Sorts the raw words of the Philox counter-based generator. numpy promises the raw stream of a bit generator to stay the
    same between releases, which it does not for `Generator.permutation`.
    """
    if num_items < 0:
        raise ValueError(f"num_items must not be negative, got {num_items}")
    key = np.array([seed & _WORD_MASK, stream & _WORD_MASK], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=[0, 0, 0, _DOMAIN]).random_raw(num_items)
    return np.argsort(words, kind="stable").astype(np.int32)


def episode_order(num_rows: int, episode: int, seed: int) -> np.ndarray:
    """Row indices of one episode in the order they are leased: int32 [num_rows], every row once, reshuffled by episode."""
    return permutation(num_rows, seed, episode)
