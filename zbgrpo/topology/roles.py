"""The role of every rank: a pure function of the configuration and the size of the world.

    ranks   0 .. num_trainers - 1                  consumers, as a (dp, pp, tp) mesh, tp fastest
            num_trainers .. world - 1              producers, ptp consecutive ranks each

Consumers take the lower ranks, so that a library that thinks the world is its own finds its group ranks equal to
ranks. For num_trainers 4, tp 2 and 2 producers of 1 rank: ranks 0, 1 are data-parallel group 0, ranks 2, 3 group 1,
rank 4 is producer 0 and rank 5 producer 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError
from zbgrpo.types import Role


@dataclass(frozen=True)
class RankInfo:
    """What one rank is."""

    rank: int
    role: Role
    index: int
    """Place among the consumers; or the producer that the rank belongs to."""
    dp_index: int
    """Data-parallel group of a consumer; a producer's own index."""
    tp_index: int
    """Place in the tensor-parallel group, of the trainer or of the producer."""
    pp_index: int
    """Pipeline stage of a consumer; 0 for a producer."""

    def __str__(self) -> str:
        return f"{self.role.value} {self.index} (rank {self.rank})"


@dataclass(frozen=True)
class Topology:
    """All ranks of a run. `ranks[r].rank == r`; consumers first."""

    ranks: tuple[RankInfo, ...]
    dp_size: int
    pp_size: int
    tp_size: int
    num_producers: int
    producer_tp_size: int

    @staticmethod
    def build(config: RunConfig, world: int) -> Topology:
        """The topology of a resolved configuration. Raises ConfigError unless it fills `world` ranks exactly."""
        cluster, trainer = config.cluster, config.trainer
        num_consumers, num_producers = cluster.num_trainers or 0, cluster.num_inferencer or 0
        ptp, tp, pp = (
            cluster.producer_tensor_parallel_size,
            trainer.tensor_parallel_size,
            trainer.pipeline_parallel_size,
        )
        if num_consumers + num_producers * ptp != world:
            raise ConfigError(
                f"-t/--num-trainers, -i/--num-inferencer: {num_consumers} + {num_producers} x {ptp} = "
                f"{num_consumers + num_producers * ptp} ranks, but the world has {world}"
            )
        if num_consumers < 1 or num_producers < 1 or num_consumers % (tp * pp):
            raise ConfigError(
                f"-t/--num-trainers: {num_consumers} consumers and {num_producers} producers; there must be some of "
                f"both, and consumers in groups of {tp * pp} (tp x pp)"
            )
        consumers = (
            RankInfo(rank, Role.CONSUMER, rank, rank // (pp * tp), rank % tp, rank // tp % pp)
            for rank in range(num_consumers)
        )
        producers = (
            RankInfo(num_consumers + place, Role.PRODUCER, place // ptp, place // ptp, place % ptp, 0)
            for place in range(num_producers * ptp)
        )
        return Topology((*consumers, *producers), num_consumers // (tp * pp), pp, tp, num_producers, ptp)

    def __getitem__(self, rank: int) -> RankInfo:
        return self.ranks[rank]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def consumer_ranks(self) -> tuple[int, ...]:
        """Ranks that train, ascending from 0."""
        return tuple(info.rank for info in self.ranks if info.role is Role.CONSUMER)

    @property
    def producer_ranks(self) -> tuple[int, ...]:
        """Ranks that generate, ascending."""
        return tuple(info.rank for info in self.ranks if info.role is Role.PRODUCER)

    def ranks_of_producer(self, producer: int) -> tuple[int, ...]:
        """Ranks of one producer in the order of their tp_index; the first speaks to the hub."""
        return tuple(info.rank for info in self.ranks if info.role is Role.PRODUCER and info.index == producer)

    def source_rank(self, stage: int) -> int:
        """The consumer that sends the weights of pipeline stage `stage`: dp 0, tp 0 of that stage."""
        if not 0 <= stage < self.pp_size:
            raise IndexError(f"stage {stage} of {self.pp_size}")
        return stage * self.tp_size

    def weights_ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of the group in which the weights of a stage travel: its source, then the first rank of every producer,
        whose engine has them for all its ranks."""
        firsts = (self.ranks_of_producer(producer)[0] for producer in range(self.num_producers))
        return (self.source_rank(stage), *firsts)


def threads_per_rank(num_cores: int, local_world_size: int, override: int | None) -> int:
    """CPU threads for each rank of a node: `override`, or an equal share of the node's cores, at least 1."""
    return override or max(1, num_cores // local_world_size)


def cores_of_ranks(cores: Sequence[int], local_rank: int, num_ranks: int, threads: int) -> list[int]:
    """The cores of a node that `num_ranks` ranks from `local_rank` on have for themselves, with `threads` each. Where
    there are fewer cores than threads, ranks share them.

    Example: 8 cores, 4 ranks with 2 threads each: those of rank 3 are the last two.
    """
    first, last = local_rank * threads, (local_rank + num_ranks) * threads
    return sorted({cores[number % len(cores)] for number in range(first, last)}) if cores else []
