"""Evaluation beside training: each row once, by one version, at its own settings, also when the run is killed in it.

Scoring waits at gates that the tests open and shut, so that what happens during an evaluation never depends on speed.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from tests.support.launching import Run, write_rows
from zbgrpo.engine.check_ledger import check_logs

GATED = '''
"""Rewards that wait while the gate of their row is shut: a file beside this one."""

import time
from pathlib import Path

HERE = Path(__file__).parent


def gated(response, row, **_):
    while (HERE / row["gate"]).exists() and not (row["gate"] == "evaluation" and take_ticket()):
        time.sleep(0.01)
    characters = len(set(response))
    return characters / max(1, len(response)), 1.0, float(characters % 2)


def take_ticket():
    """Whether this response is among the few that pass a shut gate."""
    for ticket in HERE.glob("ticket-*"):
        try:
            ticket.unlink()
            return True
        except FileNotFoundError:
            pass
    return False
'''

SETS = {"first": 7, "second": 4}
GENERATIONS = 2


class Gates:
    """A project of its own in the workplace, whose training and evaluation rows wait at a gate each."""

    def __init__(self, workplace: Path, project: str, num_producers: int = 2) -> None:
        self.workplace, self.project, self.folder = workplace, project, workplace / f"task-{project}"
        self.num_producers = num_producers
        self.folder.mkdir()
        (self.folder / "gated.py").write_text(GATED)
        for name, gate, count in (("train", "training", 200), *((task, "evaluation", n) for task, n in SETS.items())):
            rows = [{"content": f"{name[0]}{n}+{n % 7}", "extra": {"gate": gate}} for n in range(count)]
            write_rows(self.folder / f"{name}.jsonl", rows)

    def flags(self, flags: str) -> list[str]:
        name = self.folder.name
        sets = json.dumps({task: f"{name}/{task}.jsonl" for task in SETS})
        own = (
            f"-t 1 -i {self.num_producers} -ei 2 -p {self.project} -d {name}/train.jsonl -rt {name}/gated.py:gated "
            f"evaluation.num_generations={GENERATIONS} reward.time_limit_seconds=60 observe.tensorboard=false {flags}"
        )
        return [*own.split(), "-ed", sets]

    def shut(self, gate: str, num_tickets: int = 0) -> None:
        for number in range(num_tickets):
            (self.folder / f"ticket-{number}").touch()
        (self.folder / gate).touch()

    def open(self, gate: str) -> None:
        (self.folder / gate).unlink()

    def log(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of a log of the project, which may be growing."""
        path = self.workplace / "logs" / self.project / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def accuracies(self) -> list[dict[str, Any]]:
        return self.log("eval.jsonl")

    def measured(self) -> list[tuple[int, str]]:
        """Step and task of every line of eval.jsonl."""
        return [(line["step"], line["task"]) for line in self.accuracies()]

    def rows(self, task: str, step: int) -> list[dict[str, Any]]:
        path = self.workplace / "eval" / self.project / task / f"step-{step}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def launch(self, flags: str) -> Run:
        return Run(self.workplace, 1 + self.num_producers, self.flags(flags))

    def start(self, flags: str) -> Run:
        """A run whose first evaluation is over and whose second one, of version 2, cannot end."""
        self.shut("training")
        earlier = {line["run"] for line in self.log("events/hub.jsonl") if line["kind"] == "started"}
        started = self.launch(flags)
        started.wait_until(lambda: self._first_evaluation_is_over(earlier))
        self.shut("evaluation", num_tickets=3 * GENERATIONS)
        self.open("training")
        return started

    def _first_evaluation_is_over(self, earlier: set[str]) -> bool:
        """Whether the evaluator of a new run, which is none of `earlier`, has got work for training."""
        hub = self.log("events/hub.jsonl")
        starts = [n for n, line in enumerate(hub) if line["kind"] == "started" and line["run"] not in earlier]
        return any(line["kind"] == "leased" and line["producer"] == 0 for n in starts[:1] for line in hub[n:])

    def wait_until_evaluating(self, started: Run) -> None:
        """Until a few rows of that evaluation have been answered."""
        started.wait_until(lambda: not any(self.folder.glob("ticket-*")))

    def check_files(self, steps: list[int]) -> None:
        """Every row of every set once, by the version of its step, and one line for each in eval.jsonl."""
        assert self.measured() == list(product(steps, SETS))
        for step, (task, count) in product(steps, SETS.items()):
            rows = self.rows(task, step)
            assert [row["row"] for row in rows] == list(range(count)), (task, step)
            assert all(row["version"] == step and row["task"] == task and row["error"] is None for row in rows)
            assert all(len(row["texts"]) == len(row["ans_acc"]) == GENERATIONS for row in rows)
        for line in self.accuracies():
            rows = self.rows(line["task"], line["step"])
            right = [sum(row["ans_acc"]) for row in rows]
            assert line["rows"] == len(rows) and line["errors"] == 0
            assert abs(line["accuracy"] - sum(right) / len(rows) / GENERATIONS) < 1e-9
            assert abs(line["pass@1"] - line["accuracy"]) < 1e-9
            assert abs(line["pass@2"] - sum(count > 0 for count in right) / len(rows)) < 1e-9


def test_two_sets_are_evaluated_by_one_version_each_while_training_goes_on(workplace: Path) -> None:
    gates = Gates(workplace, "two-sets")
    started = gates.start("--max-steps 5 -si 1 evaluation.temperature=0")
    started.wait_for_step("two-sets", 4)
    assert (2, "evaluated") not in _story(gates), "the gate leaks"
    gates.open("evaluation")
    finished = started.wait()
    assert finished.status == 0, finished.output[-3000:]
    gates.check_files([0, 2, 4, 5])

    story = _story(gates)
    for step in (0, 2, 4, 5):
        during = story[story.index((step, "applied")) + 1 : story.index((step, "evaluated"))]
        assert "applied" not in {kind for _, kind in during}, f"the evaluator left version {step}: {during}"
    during = story[story.index((2, "commit")) + 1 : story.index((2, "evaluated"))]
    # Up to the next version that is due, and no further.
    assert [version for version, kind in during if kind == "commit"] == [3, 4]
    assert check_logs(workplace / "logs" / "two-sets").ok

    _check_greedy(gates, [0, 2, 4, 5])
    sampled = [json.loads(line) for line in (workplace / "rollouts" / "two-sets" / "step-0.jsonl").open()]
    assert all(len({response["text"] for response in group["responses"]}) > 1 for group in sampled)


def _story(gates: Gates) -> list[tuple[int, str]]:
    """What the hub saw of commits, evaluations and the versions of the evaluator, in order."""
    return [
        (line["version"], line["kind"])
        for line in gates.log("events/hub.jsonl")
        if line["kind"] in ("commit", "evaluated") or (line["kind"] == "applied" and line["producer"] == 0)
    ]


def _check_greedy(gates: Gates, steps: list[int]) -> None:
    """At temperature 0 the responses are what the saved model of that step says, computed by transformers itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    workplace = gates.workplace
    tokenizer = AutoTokenizer.from_pretrained(workplace / "model")
    prompts = [json.loads(line)["messages"] for line in (gates.folder / "first.jsonl").open()]
    said = {}
    for step in steps:
        folder = workplace / "model_out" / gates.project / f"step-{step}" if step else workplace / "model"
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        for row, message in zip(gates.rows("first", step), prompts, strict=True):
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            assert row["texts"] == [answer] * GENERATIONS, (step, row["row"])
            said.setdefault(row["row"], set()).add(answer)
    assert any(len(answers) > 1 for answers in said.values()), "no version answers differently: nothing was shown"


def test_run_killed_in_evaluations_has_each_of_them_once(workplace: Path) -> None:
    """Killed twice while version 2 is evaluated: before there is any state, and with version 2 as the newest one."""
    gates = Gates(workplace, "killed", num_producers=1)
    first = gates.start("--max-steps 6 -si 100")
    gates.wait_until_evaluating(first)
    first.kill_all()
    assert gates.measured() == [(0, task) for task in SETS]

    gates.open("evaluation")
    second = gates.start("--max-steps 2 -si 2")
    gates.wait_until_evaluating(second)
    second.wait_until((workplace / "model_out" / "killed" / "state-2").exists)
    second.kill_all()
    assert (2, "evaluated") not in _story(gates)

    gates.open("evaluation")
    finished = gates.launch("--max-steps 4 -si 2").wait()
    assert finished.status == 0 and "going on from" in finished.output, finished.output[-3000:]
    gates.check_files([0, 2, 4])
    assert any(len(set(row["texts"])) > 1 for row in gates.rows("first", 0)), "sampled at a temperature above 0"
    assert any(line["pass@2"] > line["pass@1"] for line in gates.accuracies())
    assert check_logs(workplace / "logs" / "killed").ok


def test_run_killed_in_an_evaluation_that_a_state_has_overtaken(workplace: Path) -> None:
    """Training has gone on and saved while version 2 is evaluated, so that a resume has its weights no more: that is
    said, and nothing else is missing."""
    gates = Gates(workplace, "overtaken")
    started = gates.start("--max-steps 4 -si 1")
    gates.wait_until_evaluating(started)
    started.wait_for_step("overtaken", 4)
    started.kill_all()
    gates.open("evaluation")
    finished = gates.launch("--max-steps 4 -si 1").wait()
    assert finished.status == 0, finished.output[-3000:]
    assert check_logs(workplace / "logs" / "overtaken").ok
    gates.check_files([0, 4])
    assert "the evaluation of step 2 was cut off" in finished.output
