"""A user's own reward function, with a file beside it and a memory: what it cannot score is dropped, and said."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launching import events, metrics, run, summary, write_rows
from zbgrpo.engine.check_ledger import check_logs

OWN = '''
"""Share of characters that a table beside this file likes. Some rows it cannot score, on purpose."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIKED = set(json.loads((HERE / "table.json").read_text())["liked"])


@dataclass
class Memory:
    calls: int = 0


MEMORY = Memory()


def own(response: str, gt_answer: str, row: dict):
    MEMORY.calls += 1
    (HERE / f"calls-{os.getpid()}").write_text(str(MEMORY.calls))
    assert gt_answer == "1"
    if row["trouble"] == "raises":
        raise LookupError(f"no entry for question {row['number']}")
    if row["trouble"] == "nan":
        return float("nan")
    if row["trouble"] == "infinite":
        return float("-inf"), 1.0, 0.0
    if row["trouble"] == "nonsense":
        return "very good"
    return sum(character in LIKED for character in response) / max(1, len(response)) + len(response) / 1000
'''

TROUBLES = {3: "raises", 8: "raises", 13: "nan", 17: "infinite", 21: "nonsense"}
REASONS = {"raises": "reward_error", "nonsense": "reward_error", "nan": "non_finite", "infinite": "non_finite"}
NUM_ROWS, S, G = 29, 4, 4  # 24 groups are left: six steps


def test_own_function_with_a_table_and_a_memory_that_fails_for_some_rows(workplace: Path) -> None:
    folder = workplace / "task-own"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "table.json").write_text(json.dumps({"liked": "abcdefgh"}))
    rows = [
        {"content": f"{n}+{n % 7}", "extra": {"number": n, "trouble": TROUBLES.get(n, "")}} for n in range(NUM_ROWS)
    ]
    write_rows(folder / "train.jsonl", rows)
    name = folder.name
    flags = f"-t 1 -i 1 -p own -d {name}/train.jsonl -rt {name}/own.py:own observe.tensorboard=false"
    finished = run(workplace, 2, flags)
    assert finished.status == 0, finished.output[-3000:]

    hub = events(workplace, "own", "hub")
    dropped = {line["uid"][1]: line for line in hub if line["kind"] == "dropped"}
    assert {row: line["reason"] for row, line in dropped.items()} == {n: REASONS[t] for n, t in TROUBLES.items()}
    trained = [line["uid"][1] for line in events(workplace, "own", "rank-0") if line["kind"] == "trained"]
    assert sorted(trained) == sorted(set(range(NUM_ROWS)) - TROUBLES.keys())
    assert check_logs(workplace / "logs" / "own").ok

    totals = summary(workplace, "own")
    assert totals["ledger"]["dropped"] == len(TROUBLES) and totals["ledger"]["consumed"] == NUM_ROWS - len(TROUBLES)
    assert {reason: n for reason, n in totals["dropped_by_reason"].items() if n} == {"reward_error": 3, "non_finite": 2}
    lines = metrics(workplace, "own")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and lines[-1]["ledger/dropped"] == len(TROUBLES)
    assert all(line["reward/mean"] is not None and line["train/skipped"] == 0 for line in lines)

    log = (workplace / "logs" / "own" / "rank-1.log").read_text().splitlines()
    for number, trouble in TROUBLES.items():
        named = [line for line in log if f"row {number + 1}:" in line]
        assert named, f"row {number + 1} is not named"
        message = {"raises": f"LookupError: no entry for question {number}", "nonsense": "TypeError: expected a number"}
        assert message.get(trouble, "not finite") in named[0]

    calls = [int(path.read_text()) for path in folder.glob("calls-*")]
    assert sum(calls) == NUM_ROWS * G and max(calls) > G, f"the memory does not last: {calls}"
