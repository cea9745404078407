"""Engine processes that are killed, and a rank that is: nothing lost, nothing twice, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import (
    MAX_PROMPT_TOKENS,
    Endless,
    assert_logprobs,
    load,
    no_end,
    prompts_of,
    request_of,
    vllm_settings,
)
from tests.support.models import perturbed, tiny_tokenizer
from tests.support.models import tiny_model as tiny_model_of
from tests.support.processes import is_alive, wait_until_ended
from tests.vllm.owner import READY
from zbgrpo.config.schema import InferenceConfig
from zbgrpo.errors import InfrastructureError
from zbgrpo.inference.base import Response
from zbgrpo.inference.vllm_backend import VllmBackend

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 240.0
tiny_model = partial(tiny_model_of, hidden_size=128)


@pytest.fixture(scope="module")
def model() -> Any:
    return no_end(tiny_model("qwen2"))


@pytest.fixture(scope="module")
def backend(model: Any) -> Any:
    """With an engine of its own."""
    config = InferenceConfig(num_generations=2, inference_microbatch_size=2, max_new_tokens=200)
    settings = vllm_settings(model, max_restarts=2)
    before = dict(os.environ)
    made = VllmBackend(tiny_copy(model), Endless(tiny_tokenizer()), config, (), MAX_PROMPT_TOKENS, settings)
    assert dict(os.environ) == before
    made.weights_changed(0)
    yield made
    made.close()


def tiny_copy(model: Any) -> Any:
    return perturbed(model, seed=0, scale=0.0)


def step_until(backend: Any, done: list[Response], condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the engine did not come back"
        done += backend.step()


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_process_is_replaced_and_the_rest_of_the_work_is_done(backend: Any, model: Any, victim: str) -> None:
    version = 1 if victim == "core" else 2
    newer = perturbed(model, seed=version, scale=0.05)
    load(backend, newer, version)
    prompts = prompts_of([6, 30, 11, 8, 4], seed=version)
    requests = [request_of(key, prompt, 2) for key, prompt in enumerate(prompts)]
    for request in requests:
        backend.submit(request)
    done: list[Response] = []
    step_until(backend, done, lambda: len(done) >= 1)
    processes = backend.engine_processes
    parents = {p: int(Path(f"/proc/{p}/stat").read_text().rsplit(")", 1)[1].split()[1]) for p in processes}
    chosen = next(p for p in processes if (parents[p] == os.getpid()) == (victim == "core"))
    os.kill(chosen, signal.SIGKILL)
    lost: list[int] = []
    step_until(backend, done, lambda: lost.extend(backend.take_lost()) or lost)
    early = [r for r in done if r.key in lost]
    done = [r for r in done if r.key not in lost]  # as a producer does that hands the lease back
    assert wait_until_ended(processes, 5.0) == []
    assert backend.num_active == 0 and backend.engine_processes == []
    for key in lost:
        backend.submit(requests[key])
    step_until(backend, done, lambda: not backend.num_active and not backend.num_unstarted)
    assert backend.take_lost() == []
    assert sorted((r.key, r.response_index) for r in done) == [(k, n) for k in range(5) for n in range(2)]
    again = {(r.key, r.response_index): r for r in done}
    for response in done:
        assert_logprobs(newer, prompts[response.key], response, 1.0)
        assert response.spans == [(0, version)]
    for response in early:  # the same stream, the same weights
        assert again[response.key, response.response_index].token_ids.tolist() == response.token_ids.tolist()
    assert set(backend.engine_processes).isdisjoint(processes)


def test_an_engine_that_dies_in_an_update_is_replaced_with_the_new_weights(backend: Any, model: Any) -> None:
    newer = perturbed(model, seed=9, scale=0.05)
    processes = backend.engine_processes
    for process in processes:
        os.kill(process, signal.SIGSTOP)  # so that the update is pending when they die
    killer = subprocess.Popen(
        [sys.executable, "-c", f"import time, os; time.sleep(1); [os.kill(p, 9) for p in {processes}]"]
    )
    load(backend, newer, 9)
    assert killer.wait(10) == 0
    prompt = prompts_of([14])[0]
    backend.submit(request_of(0, prompt))
    done: list[Response] = []
    step_until(backend, done, lambda: done)
    assert done[0].spans == [(0, 9)]
    assert_logprobs(newer, prompt, done[0], 1.0)


def test_an_engine_that_does_not_stay_alive_ends_the_run(backend: Any) -> None:
    with pytest.raises(InfrastructureError, match="has died 3 times in a row"):
        for _ in range(4):
            done: list[Response] = []
            step_until(backend, done, lambda: backend.engine_processes)
            backend.submit(request_of(0, [5, 6, 7], 2))
            step_until(backend, done, lambda: backend.num_active)
            os.kill(backend.engine_processes[0], signal.SIGKILL)
            step_until(backend, done, lambda: not backend.num_active)
            assert done == [] and backend.take_lost() == [0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_stays_when_the_rank_is_killed(how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.owner", "keep"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        said = next(line for line in owner.stdout if line.startswith(READY))  # vLLM says a line of its own now and then
        folder, *numbers = said.removeprefix(READY).split()
        processes = [int(text) for text in numbers]
        assert Path(folder).is_dir()
        assert len(processes) == 2 and all(is_alive(p) for p in processes)
        time.sleep(0.3)
        owner.send_signal(how)
        assert wait_until_ended(processes, 5.0) == []
        assert not Path(folder).exists()
    finally:
        owner.kill()
        owner.wait()


def test_a_signal_to_the_group_ends_only_who_listens_to_it(backend_processes: list[int]) -> None:
    for process in backend_processes:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(process, number)
    time.sleep(1.0)
    assert all(is_alive(p) for p in backend_processes)


@pytest.fixture
def backend_processes(model: Any) -> Any:
    from tests.support.engines import Setup, vllm_backend

    made: Any = vllm_backend(Setup(model, Endless(tiny_tokenizer())))
    made.weights_changed(0)
    yield made.engine_processes
    made.submit(request_of(0, [5, 6, 7]))
    done: list[Response] = []
    step_until(made, done, lambda: done)
    assert np.isfinite(done[0].logprobs).all()
