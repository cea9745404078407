"""When a response ends: any of the model's end-of-sequence ids, or a stop string, which stays in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class StopRule:
    """Decides from token ids alone; text is only looked at when a token could complete a stop string."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._is_end = np.zeros(vocabulary, dtype=bool)
        self._is_end[[i for i in end_ids if i < vocabulary]] = True
        self._may_complete = np.zeros(vocabulary, dtype=bool)
        if self._stop:
            # The token that completes a stop string contains its last character (or a piece of its bytes).
            last = {s[-1] for s in self._stop}
            known = min(vocabulary, len(tokenizer))
            for token, text in enumerate(tokenizer.batch_decode([[i] for i in range(known)])):
                self._may_complete[token] = "\ufffd" in text or any(c in text for c in last)
        # A token is at least one byte, a character at most four.
        self._tail_tokens = max((len(s.encode()) for s in self._stop), default=0) + 4

    def is_end(self, tokens: np.ndarray) -> np.ndarray:
        """Which of these ids are end-of-sequence ids: bool [n]."""
        return self._is_end[tokens]

    def may_complete(self, tokens: np.ndarray) -> np.ndarray:
        """Which of these ids could complete a stop string: bool [n]."""
        return self._may_complete[tokens]

    def has_stop_string(self, token_ids: np.ndarray) -> bool:
        """Whether the text of these response tokens contains a stop string that the last token completes."""
        text = self._tokenizer.decode(token_ids[-self._tail_tokens :].tolist(), skip_special_tokens=False)
        return any(s in text for s in self._stop)


def model_end_ids(model: Any, tokenizer: Any) -> list[int]:
    """All end-of-sequence ids that the model's generation settings, its configuration and the tokenizer name."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else ({ids} if ids is not None else set())
    return sorted(found)
