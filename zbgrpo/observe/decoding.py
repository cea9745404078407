"""What decode steps and the loop around them cost a producer, in sums that a short run's log can hold."""

from __future__ import annotations


class DecodeStatistics:
    """Sums over decode steps, apart by how full the slots were and by how many responses were started in them; and over
    what the loop does between two steps, apart by how many responses had ended and had been scored.

    A row of steps is `[steps, occupied, started, finished, seconds, occupied_seconds]`: decode steps, the sum of
    their occupied slots, responses started and finished in them, their seconds, and the sum of occupied slots x
    seconds. Steps with 1, 2-3, 4-7, 8-15 ... occupied slots have rows of their own, so that what a step costs by itself
    and what a slot adds can be told apart; and so have steps that start none, 1, 2-3, 4-7 ... responses, which may
    compute prompts.

    A row of the loop is `[turns, finished, scored, seconds]`, in the same way.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], list[float]] = {}
        self._turns: dict[tuple[int, int], list[float]] = {}
        self._finished = self._scored = 0
        self._ended: float | None = None
        """When the last step ended, if the loop has only worked since then."""

    def add(self, *, occupied: int, started: int, finished: int, begun: float, ended: float) -> None:
        """One decode step, with its times on any clock that goes on."""
        if self._ended is not None:
            key = self._finished.bit_length(), self._scored.bit_length()
            _add(self._turns, key, (1, self._finished, self._scored, begun - self._ended))
        self._ended, self._finished, self._scored = ended, finished, 0
        seconds = ended - begun
        key = occupied.bit_length(), started.bit_length()
        _add(self._steps, key, (1, occupied, started, finished, seconds, occupied * seconds))

    def scored(self, num_responses: int) -> None:
        """So many responses are scored, and are being sent."""
        self._scored += num_responses

    def pause(self) -> None:
        """The loop waits, or does something else, before the next step."""
        self._ended = None

    def take(self) -> tuple[list[list[float]], list[list[float]]]:
        """The rows of steps and of the loop since the last call, fullest slots last."""
        taken = tuple([[round(value, 6) for value in row] for _, row in sorted(rows.items())]
                      for rows in (self._steps, self._turns))  # fmt: skip
        self._steps.clear()
        self._turns.clear()
        return taken[0], taken[1]


def _add(rows: dict[tuple[int, int], list[float]], key: tuple[int, int], values: tuple[float, ...]) -> None:
    row = rows.setdefault(key, [0] * len(values))
    for index, value in enumerate(values):
        row[index] += value
