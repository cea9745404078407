"""What a producer says in its log about golds that cannot be parsed: each row once, with a count."""

from __future__ import annotations

from typing import Any

import pytest

from zbgrpo.config.schema import RunConfig
from zbgrpo.data.rows import Row
from zbgrpo.engine.producer import Producer
from zbgrpo.engine.work import PromptSource, Work
from zbgrpo.ledger.records import Lease
from zbgrpo.observe.timeledger import TimeLedger
from zbgrpo.rewards.messages import RewardSpec, ScoreOutcome, ScoreRequest
from zbgrpo.rewards.score import build_scorer


def _outcome(gold: str) -> ScoreOutcome:
    return build_scorer(RewardSpec("boxed")).score(ScoreRequest(r"\boxed{4}", gold))


def test_each_unparsable_gold_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    parts: dict[str, Any] = dict.fromkeys(
        ("backend", "pool", "channel", "subscriber", "profiler", "events", "stop_requested")
    )
    prompts = PromptSource([], [], lambda messages: [1], str, {})
    producer = Producer(RunConfig(), prompts=prompts, ledger=TimeLedger(), **parts)
    bad, good = _outcome(r"\frac{{{"), _outcome("4")
    assert bad.gold_unparsable and not good.gold_unparsable
    for line, outcomes in ((1, [good, bad]), (1, [bad, bad]), (2, [good, good]), (3, [bad, good])):
        row = Row([{"role": "user", "content": "?"}], "x", None, {}, line)
        producer._note_unparsable_gold(Work(Lease(0, 0, 0, 0), row, [1], 2), outcomes)
    said = [record.getMessage() for record in caplog.records]
    assert [text[:6] for text in said] == ["row 1:", "row 3:"]
    assert said[-1].endswith("2 such rows so far")
