"""Roles of ranks, and what the environment says about a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbgrpo.config import fields
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError
from zbgrpo.topology import env
from zbgrpo.topology.roles import RankInfo, Topology, cores_of_ranks, threads_per_rank
from zbgrpo.types import Role

ROOT = Path(__file__).resolve().parents[2]


def config_of(trainers: int, inferencer: int, ptp: int = 1, tp: int = 1, pp: int = 1) -> RunConfig:
    return fields.build(
        {
            "cluster.num_trainers": trainers,
            "cluster.num_inferencer": inferencer,
            "cluster.producer_tensor_parallel_size": ptp,
            "trainer.tensor_parallel_size": tp,
            "trainer.pipeline_parallel_size": pp,
        }
    )


class TestRoles:
    def test_consumers_take_the_lower_ranks(self) -> None:
        topology = Topology.build(config_of(2, 3), 5)
        assert topology.consumer_ranks == (0, 1)
        assert topology.producer_ranks == (2, 3, 4)
        assert topology[1] == RankInfo(1, Role.CONSUMER, index=1, dp_index=1, tp_index=0, pp_index=0)
        assert topology[4] == RankInfo(4, Role.PRODUCER, index=2, dp_index=2, tp_index=0, pp_index=0)
        assert str(topology[4]) == "producer 2 (rank 4)"

    def test_mesh_is_dp_pp_tp_with_tp_fastest(self) -> None:
        topology = Topology.build(config_of(8, 1, tp=2, pp=2), 9)
        mesh = [(info.dp_index, info.pp_index, info.tp_index) for info in topology.ranks[:8]]
        assert mesh == [(dp, pp, tp) for dp in range(2) for pp in range(2) for tp in range(2)]
        assert (topology.dp_size, topology.pp_size, topology.tp_size) == (2, 2, 2)

    def test_producers_of_several_ranks_are_consecutive(self) -> None:
        topology = Topology.build(config_of(1, 2, ptp=2), 5)
        assert topology.ranks_of_producer(0) == (1, 2)
        assert topology.ranks_of_producer(1) == (3, 4)
        assert [topology[rank].tp_index for rank in topology.producer_ranks] == [0, 1, 0, 1]

    def test_source_of_each_stage_is_its_first_consumer(self) -> None:
        topology = Topology.build(config_of(8, 2, tp=2, pp=2), 10)
        assert [topology.source_rank(stage) for stage in range(2)] == [0, 2]
        assert topology.weights_ranks(1) == (2, 8, 9)
        with pytest.raises(IndexError):
            topology.source_rank(2)

    @pytest.mark.parametrize(
        ("config", "world", "message"),
        [
            (config_of(2, 2), 5, r"2 \+ 2 x 1 = 4 ranks, but the world has 5"),
            (config_of(1, 2, ptp=2), 4, r"1 \+ 2 x 2 = 5"),
            (config_of(3, 1, tp=2), 4, "groups of 2"),
            (RunConfig(), 0, "0 consumers"),
        ],
    )
    def test_world_that_does_not_fit(self, config: RunConfig, world: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Topology.build(config, world)

    @given(
        dp=st.integers(1, 4),
        pp=st.integers(1, 3),
        tp=st.integers(1, 3),
        producers=st.integers(1, 4),
        ptp=st.integers(1, 3),
    )
    def test_every_rank_has_one_place(self, dp: int, pp: int, tp: int, producers: int, ptp: int) -> None:
        world = dp * pp * tp + producers * ptp
        topology = Topology.build(config_of(dp * pp * tp, producers, ptp, tp, pp), world)
        assert [info.rank for info in topology.ranks] == list(range(world))
        assert topology.world_size == world
        assert topology.consumer_ranks + topology.producer_ranks == tuple(range(world))
        places = {(info.role, info.dp_index, info.pp_index, info.tp_index) for info in topology.ranks}
        assert len(places) == world
        for stage in range(pp):
            source = topology[topology.source_rank(stage)]
            assert (source.dp_index, source.pp_index, source.tp_index) == (0, stage, 0)

    @pytest.mark.parametrize(
        ("cores", "ranks", "override", "expected"), [(8, 2, None, 4), (7, 2, None, 3), (2, 4, None, 1), (8, 2, 5, 5)]
    )
    def test_threads(self, cores: int, ranks: int, override: int | None, expected: int) -> None:
        assert threads_per_rank(cores, ranks, override) == expected


def test_the_cores_of_a_rank_are_its_share() -> None:
    assert cores_of_ranks(range(8), 3, 1, 2) == [6, 7]
    assert cores_of_ranks([4, 5, 6, 7], 1, 2, 1) == [5, 6], "two ranks together"
    assert cores_of_ranks([0, 1], 2, 1, 1) == [0], "more ranks than cores share them"
    assert cores_of_ranks([], 0, 1, 1) == [], "where the system does not tell"


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_ID": "77",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of its own, in place of the process's."""
    values: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", values)
    return values


class TestEnv:
    def test_torchrun(self, environ: dict[str, str]) -> None:
        environ.update(TORCHRUN)
        assert env.read_torchrun_env() == env.TorchrunEnv(5, 8, 1, 4, 1, "node0", 29500, "job7", 2)

    def test_torchrun_comes_before_slurm(self, environ: dict[str, str]) -> None:
        environ.update({**SLURM, **TORCHRUN})
        found = env.read_torchrun_env()
        assert found is not None and (found.rank, found.run_id) == (5, "job7")

    def test_slurm(self, environ: dict[str, str]) -> None:
        environ.update(SLURM)
        assert env.read_torchrun_env() == env.TorchrunEnv(9, 11, 1, 3, 2, "node0", 29500, "77", 0)

    def test_slurm_step_beats_job(self, environ: dict[str, str]) -> None:
        environ.update({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,2,7"})
        found = env.read_torchrun_env()
        assert found is not None and found.local_world_size == 7

    def test_no_launcher(self, environ: dict[str, str]) -> None:
        assert env.read_torchrun_env() is None
        environ.update({key: value for key, value in SLURM.items() if not key.startswith("MASTER")})
        assert env.read_torchrun_env() is None

    @pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
    def test_missing_variable_is_named(self, name: str, environ: dict[str, str]) -> None:
        environ.update({key: value for key, value in TORCHRUN.items() if key != name})
        with pytest.raises(ConfigError, match=f"^{name}: not set"):
            env.read_torchrun_env()

    @pytest.mark.parametrize(
        ("base", "change", "culprit"),
        [
            (TORCHRUN, {"RANK": "five"}, "RANK"),
            (TORCHRUN, {"RANK": "8"}, "RANK"),
            (TORCHRUN, {"LOCAL_RANK": "4"}, "LOCAL_RANK"),
            (TORCHRUN, {"MASTER_PORT": "auto"}, "MASTER_PORT"),
            (SLURM, {"SLURM_TASKS_PER_NODE": "4x2"}, "SLURM_TASKS_PER_NODE"),
            (SLURM, {"SLURM_NODEID": "3"}, "SLURM_TASKS_PER_NODE"),
            (SLURM, {"MASTER_PORT": ""}, "MASTER_PORT"),
        ],
    )
    def test_bad_variable_is_named(self, base: dict, change: dict, culprit: str, environ: dict[str, str]) -> None:
        environ.update({**base, **change})
        with pytest.raises(ConfigError, match=f"^{culprit}: "):
            env.read_torchrun_env()

    def test_optional_variables(self, environ: dict[str, str]) -> None:
        environ.update({k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC") and k != "GROUP_RANK"})
        found = env.read_torchrun_env()
        assert found is not None and (found.node_rank, found.run_id, found.restart_count) == (0, "none", 0)

    def test_threads(self, environ: dict[str, str]) -> None:
        env.set_thread_env(3)
        environ.pop("PYTEST_CURRENT_TEST", None)
        assert environ == {
            "OMP_NUM_THREADS": "3",
            "MKL_NUM_THREADS": "3",
            "TOKENIZERS_PARALLELISM": "false",
            "KINETO_LOG_LEVEL": "6",
        }

    def test_cores_follow_affinity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert env.available_cores() >= 1
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
        assert env.available_cores() == 3
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert env.available_cores() == 1

    def test_data_folder(self, environ: dict[str, str]) -> None:
        assert env.test_data_dir() is None
        environ["ZBGRPO_TEST_DATA"] = "/some/where"
        assert env.test_data_dir() == Path("/some/where")


def test_role_is_known_before_torch() -> None:
    code = (
        "import sys; from zbgrpo.topology import env, roles; sys.exit('torch' in sys.modules or 'zmq' in sys.modules)"
    )
    child = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], timeout=120, env=child, check=False).returncode == 0
