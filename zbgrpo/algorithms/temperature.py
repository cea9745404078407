"""The temperature that a group is sampled and trained at: a function of its uid, so that both roles know it unasked."""

from __future__ import annotations

import numpy as np

from zbgrpo.config.schema import InferenceConfig
from zbgrpo.data.order import episode_order
from zbgrpo.types import Uid


class TemperatureSchedule:
    """`temperature` throughout, or linear in the order of the first episode, from it to `temperature_end`, and that
    from then on. Depends on nothing that happens in the run, so a resume, a retry and every rank agree on it.

    Example: 3 rows, 1.0 to 0.8: the first uid of episode 0 is sampled at 1.0, the second at 0.9, the third, and all of
    episode 1, at 0.8.
    """

    def __init__(self, config: InferenceConfig, num_rows: int, seed: int) -> None:
        """`num_rows` is the number of usable rows, which `seed` orders."""
        self._start, self._end = config.temperature, config.temperature_end
        self._places: np.ndarray | None = None
        if self._end is not None:
            self._places = np.argsort(episode_order(num_rows, 0, seed), kind="stable")

    def at(self, uid: Uid) -> float:
        """Temperature of the responses of `uid`."""
        if self._end is None or self._places is None:
            return self._start
        if uid.episode > 0:
            return self._end
        share = int(self._places[uid.row]) / max(1, len(self._places) - 1)
        return self._start + (self._end - self._start) * share
