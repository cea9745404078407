"""What new weights cost: `zbgrpo bench weights`. Real processes over gloo, with the tensors of a 135M-parameter model.

Three ratios, each the median over versions, measured in turn with its baseline in the same processes:

broadcast_ratio       bandwidth of `WeightPublisher` to `WeightSubscriber`, from the announcement until the version is
                      ready with its digest checked on every producer, to that of a bare `dist.broadcast` of the same
                      bytes as one flat tensor
consumer_stall_ratio  time that `publish` keeps the training thread, to one copy of the same bytes, flat to flat
producer_stall_ratio  time that `apply` keeps the decoding thread, to the same copy

Every process has a core of its own where there are enough. The figures at the top are the worst of the cases in which
weights go the way that a run chooses here (`--weight-transport auto`: on one node without GPUs, memory of the source):
float32 and bfloat16, one producer and two. The same cases with `--weight-transport gloo`, as between nodes, are beside
them (`gloo_broadcast_ratio` and so on, the worst of those). The baseline is a gloo broadcast everywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from zbgrpo.bench.common import finish, load_average, new_parser, pairs_summary, pinned_torchrun, rounded, run_program
from zbgrpo.config.load import load_config
from zbgrpo.errors import ZbgrpoError
from zbgrpo.topology.env import read_torchrun_env, usable_cores
from zbgrpo.topology.roles import Topology

if TYPE_CHECKING:
    import torch

_TIMEOUT_SECONDS = 300.0
_WAIT_SECONDS = 60.0
_NUM_WARM_UP = 2
_DTYPES = ("float32", "bfloat16")
_TRANSPORTS = ("auto", "gloo")


class ModelSize:
    """Sizes of a decoder with grouped-query attention, gated layers and tied embeddings."""

    def __init__(self, layers: int = 30, hidden: int = 576, inner: int = 1536, vocabulary: int = 49_152) -> None:
        self.layers, self.hidden, self.inner, self.vocabulary = layers, hidden, inner, vocabulary
        self.key_value = max(1, hidden // 3)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights."""
        hidden, inner, key_value = self.hidden, self.inner, self.key_value
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "self_attn.q_proj.weight": (hidden, hidden),
                prefix + "self_attn.k_proj.weight": (key_value, hidden),
                prefix + "self_attn.v_proj.weight": (key_value, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, hidden),
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "post_attention_layernorm.weight": (hidden,),
            }
        return shapes | {"model.norm.weight": (hidden,)}


SIZES = {"135m": ModelSize(), "tiny": ModelSize(2, 48, 96, 500)}


# ------------------------------------------------------------------------------------------------ one rank


class _Rank:
    """A rank of the measured world: 0 trains, the others generate. All of them go through the same calls."""

    def __init__(self, group: Any, store: Any, size: ModelSize, dtype_name: str, bucket_bytes: int) -> None:
        """`group` is that of the weights; the baseline and barriers have the world's. `store`: for the handles of the
        source's memory; None if weights are broadcast."""
        import torch
        import torch.distributed as dist

        from zbgrpo.weights.manifest import TensorSpec, WeightManifest

        self.rank, self.device = dist.get_rank(), torch.device("cpu")
        self.group, self.store = group, store
        self.dtype: torch.dtype = getattr(torch, dtype_name)
        shapes = size.shapes()
        self.weights = {name: torch.full(shape, 0.5, dtype=self.dtype) for name, shape in shapes.items()}
        specs = [TensorSpec(name, list(shape), dtype_name) for name, shape in shapes.items()]
        self.manifest = WeightManifest(specs, bucket_bytes)
        self.flat = torch.zeros(self.manifest.num_bytes, dtype=torch.uint8)
        self.flat_copy = torch.zeros_like(self.flat)

    def barrier(self) -> None:
        """All ranks meet."""
        import torch.distributed as dist

        dist.barrier()

    def bare_broadcast(self) -> float:
        """Seconds until all ranks have the flat bytes."""
        import torch.distributed as dist

        self.barrier()
        start = time.monotonic()
        dist.broadcast(self.flat, src=0)
        self.barrier()
        return time.monotonic() - start

    def plain_copy(self) -> float:
        """Seconds of one copy of all bytes."""
        start = time.monotonic()
        self.flat_copy.copy_(self.flat)
        return time.monotonic() - start

    def train(self, version: int) -> None:
        """What a step does to the weights, as far as it matters here: other values."""
        for tensor in self.weights.values():
            tensor.view(-1)[:: max(1, tensor.numel() // 64)] = version

    def source(self, num_versions: int) -> list[dict[str, float]]:
        """Rank 0: seconds of the baselines, of each broadcast and of each stall."""
        from zbgrpo.weights.publisher import WeightPublisher

        publisher = WeightPublisher(
            self.group,
            0,
            self.manifest,
            _nobody_is_told,
            device=self.device,
            timeout_seconds=_WAIT_SECONDS,
            shared=self.store is not None,
        )
        if publisher.shared:
            self.store.set(f"staging/{self.dtype}", publisher.shared.handles)
        found = []
        for version in range(num_versions):
            self.train(version)
            bare = self.bare_broadcast()
            copy = self.plain_copy()
            self.barrier()
            start = time.monotonic()
            publisher.publish(version, self.weights.items())
            stall = time.monotonic() - start
            self.barrier()  # all producers have it
            found.append({"bare": bare, "sent": time.monotonic() - start - stall, "stall": stall, "copy": copy})
            publisher.flush(_WAIT_SECONDS)
            self.barrier()
        publisher.close()
        return found

    def producer(self, num_versions: int) -> list[dict[str, float]]:
        """Any other rank: seconds of the copy and of each stall."""
        from zbgrpo.weights.subscriber import WeightSubscriber

        reported = threading.Event()
        subscriber = WeightSubscriber(
            self.group,
            0,
            self.manifest,
            self.weights,
            device=self.device,
            handles=None if self.store is None else self.store.get(f"staging/{self.dtype}"),
            on_applied=lambda version, value: reported.set(),
        )
        found = []
        for version in range(num_versions):
            self.bare_broadcast()
            copy = self.plain_copy()
            self.barrier()
            subscriber.expect(version)
            wait_for_version(lambda: subscriber.ready() is not None)
            self.barrier()
            start = time.monotonic()
            subscriber.apply()
            found.append({"stall": time.monotonic() - start, "copy": copy})
            if any(float(tensor.view(-1)[0]) != version for tensor in self.weights.values()):
                raise ZbgrpoError(f"version {version} was applied and is not there")
            reported.wait(_WAIT_SECONDS)  # of the digest of what is in use; so that it disturbs no measurement
            reported.clear()
            self.barrier()
        subscriber.close()
        return found


def _nobody_is_told(broadcast: int, version: int) -> None:
    """The producers of this benchmark know what comes next."""


def wait_for_version(done: Callable[[], bool]) -> None:
    """Look again and again; raises `ZbgrpoError` when it takes too long."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise ZbgrpoError("a version did not come in time")
        time.sleep(0.0005)


def _run_rank(folder: Path, size: str, num_versions: int, transport: str) -> None:
    """A rank of torchrun: all dtypes, one after the other."""
    import torch

    from zbgrpo.groups.process_groups import connect, disconnect, make_groups

    env = read_torchrun_env()
    assert env is not None, "started by torchrun"
    torch.set_num_threads(1)
    config = load_config(["-t", "1", "-i", str(env.world_size - 1), "--weight-transport", transport]).config
    store = connect(env, config)
    groups = make_groups(store, Topology.build(config, env.world_size), config)
    shared = groups.weights_transport == "ipc"
    found = {}
    for dtype in _DTYPES:
        rank = _Rank(groups.weights[0], store if shared else None, SIZES[size], dtype, config.weights.bucket_bytes)
        measure = rank.source if env.rank == 0 else rank.producer
        found[dtype] = measure(num_versions + _NUM_WARM_UP)[_NUM_WARM_UP:]
    (folder / f"rank-{env.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    disconnect()


# ------------------------------------------------------------------------------------------------ all of it


def read_case(folder: Path, dtype: str, num_producers: int, num_bytes: int) -> dict[str, Any]:
    """The figures of one dtype and one world, from what its ranks have written."""
    source, *producers = (
        json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))[dtype]
        for rank in range(1 + num_producers)
    )
    stalls = [version["stall"] / version["copy"] for producer in producers for version in producer]
    return {
        **pairs_summary([version["bare"] / version["sent"] for version in source], "broadcast_ratio"),
        **pairs_summary([version["stall"] / version["copy"] for version in source], "consumer_stall_ratio"),
        **pairs_summary(stalls, "producer_stall_ratio"),
        "gb_per_s": rounded(num_bytes / median(version["sent"] for version in source) / 1e9),
        "bare_gb_per_s": rounded(num_bytes / median(version["bare"] for version in source) / 1e9),
        "copy_gb_per_s": rounded(num_bytes / median(version["copy"] for version in source) / 1e9),
        "num_bytes": num_bytes,
        "num_versions": len(source),
    }


def worst(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures that a promise is about, over cases."""
    return {
        "broadcast_ratio": min(case["broadcast_ratio"] for case in cases),
        "consumer_stall_ratio": max(case["consumer_stall_ratio"] for case in cases),
        "producer_stall_ratio": max(case["producer_stall_ratio"] for case in cases),
    }


def measure(size: str, num_versions: int) -> dict[str, Any]:
    """All cases. Raises `ZbgrpoError` if a world fails."""
    found = {transport: _measure_transport(size, num_versions, transport) for transport in _TRANSPORTS}
    broadcast = worst(list(found["gloo"].values()))
    return {
        **worst(list(found["auto"].values())),
        **{f"gloo_{name}": value for name, value in broadcast.items()},
        "cases": found["auto"],
        "gloo_cases": found["gloo"],
        "load": load_average(),
    }


def _measure_transport(size: str, num_versions: int, transport: str) -> dict[str, dict[str, Any]]:
    cores, cases = usable_cores(), {}
    numbers = sum(math.prod(shape) for shape in SIZES[size].shapes().values())
    for num_producers in (1, 2):
        with tempfile.TemporaryDirectory(prefix="zbgrpo-bench-") as folder:
            places = [cores[rank % len(cores)] for rank in range(1 + num_producers)]
            arguments = ["--as-rank", folder, "--size", size, "--versions", str(num_versions), "--transport", transport]
            run_program(pinned_torchrun(places, "zbgrpo.bench.weights", arguments), _TIMEOUT_SECONDS)
            for dtype in _DTYPES:
                num_bytes = numbers * (4 if dtype == "float32" else 2)
                name = f"{dtype}, {num_producers} producer{'s' if num_producers > 1 else ''}"
                cases[name] = read_case(Path(folder), dtype, num_producers, num_bytes)
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    parser = new_parser("weights", __doc__)
    parser.add_argument("--versions", type=int, default=7, metavar="N", help="versions per case (%(default)s)")
    parser.add_argument("--size", choices=list(SIZES), default="135m", help="of the model (%(default)s)")
    parser.add_argument("--as-rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--transport", choices=_TRANSPORTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_rank is not None:
        _run_rank(options.as_rank, options.size, options.versions, options.transport)
        return 0
    return finish(lambda: measure(options.size, max(1, options.versions)))


if __name__ == "__main__":
    sys.exit(main())
