"""Dynamic sampling: steps are made of effective groups alone, and what is left out is counted."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Finished, events, metrics, run, summary, write_rows
from zbgrpo.engine.check_ledger import check_logs

KINDS = '''
"""Rewards by the kind of a row; every verdict is written down in a file of the scoring process."""

import json
import os
from pathlib import Path

HERE = Path(__file__).parent


def by_kind(response, row, **_):
    characters = len(set(response))
    right = {"right": 1.0, "wrong": 0.0, "open": float(characters % 2), "half": 0.5}[row["kind"]]
    with open(HERE / f"scored-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps([row["number"], right]) + "\\n")
    return right + characters / 100, 1.0, right
'''

G, S = 4, 4  # of the common flags, with one consumer


def _make_task(workplace: Path, name: str, kinds: list[str]) -> tuple[Path, str]:
    """A folder with a row for each kind; flags for it."""
    folder = workplace / f"task-{name}"
    folder.mkdir()
    (folder / "kinds.py").write_text(KINDS)
    rows = [{"content": f"{n}+{n % 7}", "extra": {"kind": kind, "number": n}} for n, kind in enumerate(kinds)]
    write_rows(folder / "train.jsonl", rows)
    flags = f"-t 1 -i 1 -a DAPO -d {folder.name}/train.jsonl -rt {folder.name}/kinds.py:by_kind"
    return folder, f"{flags} observe.tensorboard=false"


def _verdicts(folder: Path) -> dict[int, list[float]]:
    """Accuracies of all responses to a row, as the reward function wrote them down."""
    verdicts = defaultdict(list)
    for path in folder.glob("scored-*.jsonl"):
        for line in path.read_text().splitlines():
            number, right = json.loads(line)
            verdicts[number].append(right)
    return verdicts


def _lines(workplace: Path, project: str, log: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in events(workplace, project, log) if line["kind"] == kind]


def test_steps_are_made_of_effective_groups_alone(workplace: Path) -> None:
    folder, flags = _make_task(workplace, "mixed", ["right", "open", "wrong"] * 120)
    finished = run(workplace, 2, f"{flags} -p mixed --max-steps 4 -tMbs 2 algorithm.filter_range=[0.25,0.75]")
    assert finished.status == 0, finished.output[-3000:]
    assert check_logs(workplace / "logs" / "mixed").ok

    verdicts = _verdicts(folder)
    rows = {line["lease"]: line["uid"][1] for line in _lines(workplace, "mixed", "hub", "leased")}
    mean = {lease: sum(verdicts[row]) / G for lease, row in rows.items() if len(verdicts[row]) == G}
    planned = defaultdict(list)
    for entry in _lines(workplace, "mixed", "hub", "plan"):
        if entry["entry"] == "train":
            planned[entry["version"]] += [lease for leases in entry["ranks"] for lease in leases]
    assert sorted(planned) == list(range(4))
    for step, leases in planned.items():
        trained = [line["lease"] for line in _lines(workplace, "mixed", "rank-0", "trained") if line["step"] == step]
        assert sorted(leases) == sorted(trained) and len(set(trained)) == S
        assert all(0.25 < mean[lease] < 0.75 for lease in leases), {lease: mean[lease] for lease in leases}

    filtered = {line["lease"]: line["accuracy"] for line in _lines(workplace, "mixed", "hub", "filtered")}
    assert filtered == {lease: mean[lease] for lease in filtered}
    assert {0.0, 0.25, 0.75, 1.0} >= set(filtered.values()) >= {0.0, 1.0}  # the ends of the range are outside
    trained_rows = {line["uid"][1] for line in _lines(workplace, "mixed", "rank-0", "trained")}
    assert not trained_rows & {rows[lease] for lease in filtered}
    assert summary(workplace, "mixed")["ledger"]["filtered"] == len(filtered)
    _check_metrics(workplace, "mixed", planned, filtered, mean)


def _check_metrics(
    workplace: Path, project: str, planned: dict[int, list[int]], filtered: dict[int, float], mean: dict[int, float]
) -> None:
    """A step's figures are over the groups that it trained and those that were filtered since the step before."""
    since: list[list[int]] = [[]]
    for line in events(workplace, project, "hub"):
        if line["kind"] == "filtered":
            since[-1].append(line["lease"])
        elif line["kind"] == "commit":
            since.append([])
    num_filtered = 0
    for step, line in enumerate(metrics(workplace, project)):
        groups = [*planned[step], *since[step]]
        num_filtered += len(since[step])
        assert line["rollout/effective_groups"] == pytest.approx(S / len(groups))
        assert line["ledger/filtered"] == num_filtered
        assert line["reward/ans_acc"] == pytest.approx(sum(mean[lease] for lease in groups) / len(groups))
    assert num_filtered > 0


@pytest.fixture(scope="module")
def extreme(workplace: Path) -> Finished:
    """A run over two episodes of 11 rows, none of which is ever effective."""
    _, flags = _make_task(workplace, "extreme", ["right", "wrong", "wrong"] * 3 + ["right", "wrong"])
    return run(workplace, 2, f"{flags} -p extreme -e 2", timeout_seconds=60)


def test_run_without_any_effective_group_ends_by_itself_and_says_why(workplace: Path, extreme: Finished) -> None:
    assert extreme.status == 1 and "exitcode  : 1" in extreme.output, extreme.output[-3000:]
    assert "no group was effective" in extreme.first_line, extreme.output[-3000:]
    assert "22 groups were filtered (8 all right, 14 all wrong)" in extreme.first_line
    assert summary(workplace, "extreme")["ledger"]["filtered"] == 22
    assert not [line for line in events(workplace, "extreme", "hub") if line["kind"] in ("buffered", "commit")]
    assert check_logs(workplace / "logs" / "extreme").ok


def test_steps_cross_the_end_of_an_episode(workplace: Path) -> None:
    """9 of 11 rows are effective, so that the third step of 4 groups takes one of episode 0 and three of episode 1."""
    _, flags = _make_task(workplace, "crossing", ["wrong", "half", "half", "right", *["half"] * 7])
    finished = run(workplace, 2, f"{flags} -p crossing -e 2 --max-staleness 0")
    assert finished.status == 0, finished.output[-3000:]
    assert [line["step"] for line in metrics(workplace, "crossing")] == [1, 2, 3, 4]
    totals = summary(workplace, "crossing")
    counts = {"leased": 22, "consumed": 16, "filtered": 4, "dropped": 2, "returned": 0, "live": 0}
    assert totals["ledger"] == counts and totals["dropped_by_reason"]["end"] == 2
    third = [line["uid"][0] for line in _lines(workplace, "crossing", "rank-0", "trained") if line["step"] == 2]
    assert sorted(third) == [0, 1, 1, 1]
    assert check_logs(workplace / "logs" / "crossing").ok


def test_order_of_an_episode_depends_on_the_seed_and_its_number_alone(workplace: Path, extreme: Finished) -> None:
    """The runs above have one seed and 11 rows each; all else is different."""
    if not (workplace / "logs" / "crossing").exists():
        test_steps_cross_the_end_of_an_episode(workplace)
    orders = [
        [tuple(line["uid"]) for line in _lines(workplace, project, "hub", "leased")]
        for project in ("extreme", "crossing")
    ]
    assert orders[0] == orders[1]
    first, second = ([row for episode, row in orders[0] if episode == number] for number in range(2))
    assert sorted(first) == sorted(second) == list(range(11)) and first != second
