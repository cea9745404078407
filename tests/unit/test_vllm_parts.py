"""What belongs to the vLLM engine and needs no vLLM: settings, the file of weights, losing an engine."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.support.engines import Endless, no_end, request_of
from tests.support.models import EOS, tiny_model, tiny_tokenizer
from zbgrpo.config.schema import InferenceConfig
from zbgrpo.errors import InfrastructureError, ModelError, ResourceError, WeightSyncError
from zbgrpo.inference import vllm_library
from zbgrpo.inference.vllm_backend import VllmBackend
from zbgrpo.inference.vllm_engine import CallFailedError, EngineDiedError, Job, Result, Update
from zbgrpo.inference.vllm_settings import (
    EngineSize,
    VllmSettings,
    engine_arguments,
    engine_environment,
)
from zbgrpo.inference.vllm_weights import EngineWeights, WeightFile
from zbgrpo.topology.env import changed_environment
from zbgrpo.types import FinishReason

SETTINGS = VllmSettings("folder", "folder", dtype="float32", max_restarts=2)


# ------------------------------------------------------------------------------------------------ settings


def test_arguments_of_the_engine() -> None:
    config = tiny_model().config  # 2 layers, 2 heads for keys and values of 16
    arguments = engine_arguments(SETTINGS, EngineSize(3, 100, False), config)
    # 3 slots of 4 blocks and one to spare each, and one; 32 tokens of keys and values in float32
    assert arguments["kv_cache_memory_bytes"] == (3 * 5 + 1) * 32 * 2 * 2 * 2 * 16 * 4
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["enforce_eager"]
    assert not arguments["enable_chunked_prefill"] and arguments["max_num_batched_tokens"] >= 100
    on_gpu = VllmSettings("folder", "folder", on_cpu=False)
    arguments = engine_arguments(on_gpu, EngineSize(3, 100, True), config)
    assert "kv_cache_memory_bytes" not in arguments and "block_size" not in arguments
    assert arguments["logprobs_mode"] == "raw_logprobs" and not arguments["enforce_eager"]
    assert arguments["enable_chunked_prefill"]


@pytest.mark.parametrize(("workers", "cores", "binding"), [
    (1, [0, 1], "auto"), (2, [0, 1], "0|1"), (2, [4, 5, 6, 7, 8], "4,5|6,7"), (2, [3], "nobind"),
])  # fmt: skip
def test_each_worker_has_cores_of_its_own(workers: int, cores: list[int], binding: str) -> None:
    settings = VllmSettings("folder", "folder", tensor_parallel_size=workers)
    assert engine_environment(settings, cores, "sockets")["VLLM_CPU_OMP_THREADS_BIND"] == binding


def test_an_engine_keeps_to_its_share() -> None:
    settings = VllmSettings("folder", "folder", cores=[3])
    assert engine_environment(settings, [0, 1, 2, 3], "sockets")["VLLM_CPU_OMP_THREADS_BIND"] == "3"
    settings = VllmSettings("folder", "folder", tensor_parallel_size=2, cores=[2, 3])
    assert engine_environment(settings, [0, 1, 2, 3], "sockets")["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("CHANGED", "1")
    monkeypatch.delenv("NEW", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), changed_environment({"CHANGED": "2", "NEW": "3"}):
        assert (os.environ["CHANGED"], os.environ["NEW"]) == ("2", "3")
        del os.environ["KEPT"]
        os.environ["LATER"] = "4"
        raise KeyError
    assert dict(os.environ) == before


# ------------------------------------------------------------------------------------------------ weights


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}


def test_another_process_reads_what_was_written_and_no_name_exists() -> None:
    weights = EngineWeights.of(tensors())
    with WeightFile(weights, tensors()) as file:
        assert os.stat(file.path).st_nlink == 0
        program = (
            "import sys; from zbgrpo.inference.vllm_weights import EngineWeights\n"
            "for name, tensor in EngineWeights.decode(sys.argv[2]).open(sys.argv[1]).items():\n"
            "    print(name, tensor.tolist(), tensor.dtype)"
        )
        run = [sys.executable, "-c", program, file.path, weights.encode()]
        done = subprocess.run(run, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        mapped = weights.open(file.path)
    assert done.stdout.splitlines() == [f"{n} {t.tolist()} {t.dtype}" for n, t in tensors().items()]
    assert not os.path.exists(file.path)
    assert all(torch.equal(mapped[n], t) for n, t in tensors().items()), "what is mapped stays"


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    weights, given = EngineWeights.of(tensors()), tensors()
    for wrong, message in [
        ({"a": given["a"], "c": given["c"]}, r"missing \['b'\]"),
        (given | {"extra": given["a"]}, r"not known \['extra'\]"),
        (given | {"a": given["a"].T}, r"a is float32\[3, 2\], not float32\[2, 3\]"),
        (given | {"b": given["b"].float()}, r"b is float32\[5\], not bfloat16\[5\]"),
    ]:
        with pytest.raises(WeightSyncError, match=message):
            WeightFile(weights, wrong)
    with WeightFile(weights, given) as file, pytest.raises(WeightSyncError, match="bytes are there"):
        EngineWeights.of({"a": given["a"]}).open(file.path)


def test_no_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ResourceError, match=r"no memory for \d+ bytes"):
        WeightFile(EngineWeights.of(tensors()), tensors())
    assert len(os.listdir("/proc/self/fd")) == opened


# ------------------------------------------------------------------------------------------------ an engine that dies


class FakeEngine:
    """Serves at once; the test says what comes back and when it dies."""

    made: ClassVar[list[FakeEngine]] = []

    def __init__(self, settings: Any, size: Any, model_config: Any) -> None:
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.failure: str | None = None
        self.processes = [1, 2]
        self.jobs: list[Job] = []
        self.versions: list[int] = []
        self.update_error: Exception | None = None
        self.is_started = True
        self.closed = False
        FakeEngine.made.append(self)

    def wait_started(self, timeout_seconds: float) -> bool:
        return self.is_started

    def submit(self, job: Job, rule: Any) -> None:
        assert self.versions, "generates without weights"
        self.jobs.append(job)

    def update(self, file: Any, version: int) -> Update:
        if self.update_error is not None:
            raise self.update_error
        self.versions.append(version)
        return Update(0.5, [])

    def close(self) -> None:
        self.closed = True

    def finish(self, job: Job, token: int = 20, is_full: bool = True) -> None:
        self.results.put(Result(job.name, [9, token], [-1.0, -2.0], [(0, 3)], is_full, not is_full))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> VllmBackend:
    return backend_of(monkeypatch)


def backend_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> VllmBackend:
    monkeypatch.setattr(vllm_library, "require_vllm", lambda: None)
    monkeypatch.setattr(FakeEngine, "made", [])
    config = InferenceConfig(num_generations=2, inference_microbatch_size=2, max_new_tokens=8, **options)
    model = no_end(tiny_model())
    return VllmBackend(model, Endless(tiny_tokenizer()), config, (), 16, SETTINGS, FakeEngine)  # type: ignore[arg-type]


def test_a_dead_engine_loses_what_it_had_and_nothing_else(backend: VllmBackend) -> None:
    backend.weights_changed(3)
    for key in range(4):
        backend.submit(request_of(key, [key], 2))
    first = FakeEngine.made[0]
    assert backend.step() == [] and [len(first.jobs), backend.num_active, backend.num_unstarted] == [4, 4, 4]
    first.finish(first.jobs[0])
    assert [(r.key, r.response_index) for r in backend.step()] == [(0, 0)]
    assert backend.num_active == 4, "the free slot is taken at once"
    FakeEngine.made[0].failure = "killed"
    assert backend.step() == [] and first.closed
    assert backend.take_lost() == [0, 1, 2] and backend.take_lost() == []
    assert (backend.num_active, backend.num_unstarted) == (0, 2)
    second = FakeEngine.made[1]
    first.finish(first.jobs[1])  # too late
    assert backend.step() == [] and second.versions == [3]
    assert [list(job.prompt_ids) for job in second.jobs] == [[3], [3]]


def test_weights_that_come_while_an_engine_starts_are_the_ones_it_serves_with(backend: VllmBackend) -> None:
    backend.weights_changed(1)
    FakeEngine.made[0].failure = "killed"
    backend.step()
    second = FakeEngine.made[1]
    second.is_started = False
    backend.submit(request_of(0, [5], 1))
    assert backend.step() == [] and backend.num_active == 0
    backend.weights_changed(2)
    assert second.versions == []
    second.is_started = True
    backend.step()
    assert second.versions == [2] and backend.num_active == 1


def test_deaths_in_a_row_end_the_run_and_a_response_starts_the_count_again(backend: VllmBackend) -> None:
    backend.weights_changed(0)

    def die() -> None:
        FakeEngine.made[-1].failure = "killed"
        backend.step()
        backend.step()

    die()
    die()
    backend.submit(request_of(0, [5], 1))
    backend.step()
    FakeEngine.made[-1].finish(FakeEngine.made[-1].jobs[0])
    assert len(backend.step()) == 1
    die()
    die()
    with pytest.raises(InfrastructureError, match="has died 3 times in a row; at last: killed"):
        die()


def test_a_failed_update_is_the_death_of_the_engine_but_the_first_one_is_an_error(backend: VllmBackend) -> None:
    FakeEngine.made[0].update_error = CallFailedError("no parameter x")
    with pytest.raises(WeightSyncError, match="no parameter x"):
        backend.weights_changed(0)
    FakeEngine.made[0].update_error = None
    backend.weights_changed(0)
    for error in (CallFailedError("worker failed"), EngineDiedError("gone")):
        FakeEngine.made[-1].update_error = error
        backend.weights_changed(1)
        backend.step()
        assert FakeEngine.made[-1].versions == [1]


def test_nothing_is_generated_before_the_first_weights(backend: VllmBackend) -> None:
    backend.submit(request_of(0, [5], 1))
    assert backend.step() == [] and backend.num_active == 0


def test_an_engine_that_does_not_start_is_an_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "wait_started", lambda self, seconds: setattr(self, "failure", "no heads") or True)
    with pytest.raises(ModelError, match="folder: the vLLM engine: no heads"):
        backend_of(monkeypatch)


def test_how_a_response_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_library, "require_vllm", lambda: None)
    monkeypatch.setattr(FakeEngine, "made", [])
    config = InferenceConfig(num_generations=3, inference_microbatch_size=1, max_new_tokens=8)
    made: Any = VllmBackend(tiny_model(), tiny_tokenizer(), config, ("x",), 16, SETTINGS, FakeEngine)  # type: ignore[arg-type]
    made.weights_changed(0)
    made.submit(request_of(0, [5], 3))
    made.step()
    engine = FakeEngine.made[0]
    engine.finish(engine.jobs[0], token=EOS, is_full=True)  # the end token wins over the limit
    engine.finish(engine.jobs[1], is_full=False)
    engine.finish(engine.jobs[2], is_full=True)
    assert [r.finish for r in made.step()] == [FinishReason.END_TOKEN, FinishReason.STOP_STRING, FinishReason.LENGTH]


def test_logprobs_that_are_not_known_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation at another temperature in an engine for truncated sampling."""
    backend = backend_of(monkeypatch, top_k=3)
    backend.weights_changed(0)
    for key, temperature in enumerate([1.0, 0.0, 0.6]):
        backend.submit(request_of(key, [5], 1, temperature))
    backend.step()
    for job in FakeEngine.made[0].jobs:
        FakeEngine.made[0].finish(job)
    known = [bool(np.isfinite(r.logprobs).all()) for r in backend.step()]
    assert known == [True, True, False]
