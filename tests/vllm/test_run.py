"""Whole runs that generate with vLLM."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import by_hand
from tests.support.launching import TEMPLATE, Run, events, make_workplace, metrics, run, summary
from tests.support.models import tiny_model, tiny_tokenizer
from tests.support.processes import wait_until_ended
from zbgrpo.engine.check_ledger import check_logs
from zbgrpo.inference.base import Response
from zbgrpo.observe.rolloutlog import read_rollouts
from zbgrpo.types import FinishReason

FLAGS = (
    "-b vllm -t 1 -i 1 -mnt 200 -imbs 2 -ibs 4 -si 1 vllm.start_timeout_seconds=300 "
    "observe.rollout_interval=1 observe.rollout_tokens=true"
)
PATIENCE_SECONDS = 400.0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As that of the other whole runs, with a model whose heads are large enough for vLLM, and one without an end."""
    folder = make_workplace(tmp_path_factory.mktemp("vllm"))
    model, tokenizer = tiny_model(hidden_size=128), tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name in ("model", "endless"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    return folder


def test_responses_live_through_new_weights(workplace: Path) -> None:
    """Each token's log-prob is that of the version that its span names, over what the versions before have cached, and
    not that of the other version."""
    # Nearly all groups may be generated far ahead, one after the other, 400 tokens that nothing ends sooner; each is a
    # step. So the first version comes while something is being decoded, unless training takes 15 times as long.
    ahead = "--max-steps 18 --max-staleness 16 --max-token-lag 16 -cbsl 18"
    finished = run(
        workplace, 2, f"{FLAGS} -m endless -imbs 1 -tbs 1 -tMbs 1 -mnt 400 {ahead} -p spans", PATIENCE_SECONDS
    )
    assert finished.status == 0, finished.output[-3000:]
    totals = summary(workplace, "spans")["ledger"]
    assert totals["returned"] == totals["dropped"] == 0, "no response was given up"
    assert check_logs(workplace / "logs" / "spans").ok
    lines = metrics(workplace, "spans")
    gaps = [line["rollout/logprob_gap"] for line in lines if line["rollout/logprob_gap"] is not None]
    assert gaps and max(gaps) < 1e-2
    assert any(line["weights/producers_blocked"] for line in lines)
    models = _versions(workplace, "spans", 18)
    num_spanning = 0
    for path in sorted((workplace / "rollouts" / "spans").glob("step-*.jsonl")):
        for group in read_rollouts(path):
            for response in group.responses:
                if len(response.versions) > 1:
                    num_spanning += 1
                    _check_spans(models, group.prompt_ids, response)
    assert num_spanning > 0, "no response spans two versions"


def _versions(workplace: Path, project: str, last: int) -> dict[int, Any]:
    from transformers import AutoModelForCausalLM

    folders = {0: workplace / "endless"} | {
        step: workplace / "model_out" / project / f"step-{step}" for step in range(1, last + 1)
    }
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in folders.items()
    }


def _check_spans(models: dict[int, Any], prompt: Any, response: Any) -> None:
    tokens = np.array(response.token_ids, np.int32)
    recorded = np.array(response.logprobs, np.float32)

    def recomputed(spans: list[tuple[int, int]]) -> np.ndarray:
        full = by_hand(models, prompt, Response(0, 0, tokens, recorded, spans, FinishReason.LENGTH), 1.0)
        return full[torch.arange(len(tokens)), torch.as_tensor(tokens).long()].numpy()

    np.testing.assert_allclose(recorded, recomputed(response.versions), atol=1e-3, rtol=0)
    (_, first), (start, second) = response.versions[:2]
    end = response.versions[2][0] if len(response.versions) > 2 else len(tokens)
    swapped = recomputed([(0, second), (start, first), *response.versions[2:]])
    assert np.abs(recorded[:start] - swapped[:start]).max() > 1e-3, "the other version fits the first span too"
    assert np.abs(recorded[start:end] - swapped[start:end]).max() > 1e-3, "the other version fits the second span too"


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_an_engine_that_is_killed_costs_nothing_but_time(workplace: Path, victim: str) -> None:
    project = f"killed-{victim.lower()}"
    started = Run(workplace, 2, f"{FLAGS} --max-steps 6 -p {project}")
    started.wait_for_step(project, 2, PATIENCE_SECONDS)
    (pid,) = _descendants(started.process.pid, victim)
    os.kill(pid, signal.SIGKILL)
    finished = started.wait(PATIENCE_SECONDS)
    assert finished.status == 0, finished.output[-3000:]
    totals = summary(workplace, project)["ledger"]
    assert totals["consumed"] == 24 and totals["live"] == 0
    assert check_logs(workplace / "logs" / project).ok
    assert "the vLLM engine has died" in (workplace / "logs" / project / "rank-1.log").read_text()


def test_a_producer_that_is_killed_leaves_no_engine(workplace: Path) -> None:
    started = Run(workplace, 2, f"{FLAGS} --max-steps 6 -p orphans")
    started.wait_for_step("orphans", 1, PATIENCE_SECONDS)
    engine = [pid for name in ("EngineCore", "Worker") for pid in _descendants(started.process.pid, name)]
    assert len(engine) == 2
    os.kill(started.ranks()[1], signal.SIGKILL)
    assert started.wait(PATIENCE_SECONDS).status != 0
    assert wait_until_ended(engine, 5.0) == []


def test_two_ranks_of_one_producer(workplace: Path) -> None:
    finished = run(workplace, 3, f"{FLAGS} -ptp 2 --max-steps 2 -p pair", PATIENCE_SECONDS)
    assert finished.status == 0, finished.output[-3000:]
    assert check_logs(workplace / "logs" / "pair").ok
    published = {
        line["version"]: line["digest"] for line in events(workplace, "pair", "rank-0") if line["kind"] == "published"
    }
    workers = [line for line in events(workplace, "pair", "rank-1") if line["kind"] == "worker_digests"]
    assert workers
    for line in workers:
        assert len(line["digests"]) == 2 and set(line["digests"]) == {published[line["version"]]}


def _descendants(root: int, name: str) -> list[int]:
    """Processes below `root` whose title holds `name`."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
            titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
    found = []
    for pid, title in titles.items():
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and "VLLM" in title and name in title:
            found.append(pid)
    return found
