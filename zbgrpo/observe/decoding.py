"""What decode steps cost, added up for the event log: `zbgrpo plan --from` fits its rates to these sums."""

from __future__ import annotations


class DecodeStatistics:
    """Sums over decode steps, apart by how full the slots were and by how many responses were started in them.

    A row is `[steps, occupied, started, finished, seconds, occupied_seconds]`: decode steps, the sum of their occupied
    slots, responses started and finished in them, their seconds, and the sum of occupied slots x seconds. Steps with
    1, 2-3, 4-7, 8-15 ... occupied slots have rows of their own, so that what a step costs by itself and what a slot
    adds can be told apart; and so have steps that start none, 1, 2-3, 4-7 ... responses, which may compute prompts.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[float]] = {}

    def add(self, *, occupied: int, started: int, finished: int, seconds: float) -> None:
        """One decode step."""
        row = self._rows.setdefault((occupied.bit_length(), started.bit_length()), [0, 0, 0, 0, 0.0, 0.0])
        for index, value in enumerate((1, occupied, started, finished, seconds, occupied * seconds)):
            row[index] += value

    def take(self) -> list[list[float]]:
        """The rows since the last call, fullest slots last."""
        rows = [[*row[:4], round(row[4], 6), round(row[5], 6)] for _, row in sorted(self._rows.items())]
        self._rows.clear()
        return rows
