"""New weights from one process to another on one device: `WeightPublisher` to `WeightSubscriber`, by ipc and by gloo.

Bytes per second from the call of `publish` until the publisher has heard that all of it has arrived, with the digest
checked by the other process, and until it is in use there; beside it, a plain copy of the same bytes on the device.
After each version the other process looks whether every tensor has the values of that version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import REPOSITORY, Report, part_options
from torch import Tensor

from zbgrpo.bench.common import run_program
from zbgrpo.bench.weights import SIZES, wait_for_version
from zbgrpo.config.load import load_config
from zbgrpo.errors import ZbgrpoError
from zbgrpo.groups.process_groups import connect, disconnect, make_groups
from zbgrpo.topology.env import read_torchrun_env
from zbgrpo.topology.roles import Topology
from zbgrpo.weights.manifest import TensorSpec, WeightManifest
from zbgrpo.weights.publisher import WeightPublisher
from zbgrpo.weights.subscriber import WeightSubscriber

_WAIT_SECONDS = 60.0
_RUN_SECONDS = 90.0
_NUM_WARM_UP = 2
_NUM_VERSIONS = {"135m": 12, "tiny": 4}


class _Rank:
    """What both sides have: a model's weights on the device, and an appointment after each step."""

    def __init__(self, transport: str, size: str, device: torch.device) -> None:
        import torch.distributed as dist

        env = read_torchrun_env()
        assert env is not None, "started by torchrun"
        self.rank, self.device, self.barrier = env.rank, device, dist.barrier
        config = load_config(["-t", "1", "-i", "1", "--weight-transport", transport]).config
        self.store = connect(env, config)
        self.groups = make_groups(self.store, Topology.build(config, env.world_size), config)
        self.weights = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
            for name, shape in SIZES[size].shapes().items()
        }
        specs = [TensorSpec(name, list(tensor.shape), "bfloat16") for name, tensor in self.weights.items()]
        self.manifest = WeightManifest(specs, config.weights.bucket_bytes)

    def values(self, version: int) -> dict[str, Tensor]:
        """The weights of a version: random numbers, of no two versions the same, but the same in all processes."""
        generator = torch.Generator(self.device).manual_seed(version)
        return {
            name: torch.randn(tensor.shape, generator=generator, device=self.device).to(torch.bfloat16)
            for name, tensor in self.weights.items()
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def copy_seconds(self) -> float:
        """Of one copy of all bytes on the device."""
        source = torch.ones(self.manifest.num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = []
        for _ in range(5):
            self.synchronize()
            start = time.monotonic()
            target.copy_(source)
            self.synchronize()
            times.append(time.monotonic() - start)
        return median(times)


def run_source(rank: _Rank, num_versions: int) -> dict[str, Any]:
    """Publish version after version; seconds of each."""
    publisher = WeightPublisher(
        rank.groups.weights[0], 0, rank.manifest, lambda broadcast, version: None, device=rank.device,
        timeout_seconds=_WAIT_SECONDS, shared=rank.groups.weights_transport == "ipc",
    )  # fmt: skip
    if publisher.shared:
        rank.store.set("staging", publisher.shared.handles)
    found: dict[str, Any] = {"copy": rank.copy_seconds(), "sent": [], "stall": [], "transport": ""}
    found |= {"transport": rank.groups.weights_transport, "num_bytes": rank.manifest.num_bytes}
    for version in range(num_versions):
        for name, value in rank.values(version).items():
            rank.weights[name].copy_(value)
        rank.synchronize()
        rank.barrier()
        start = time.monotonic()
        publisher.publish(version, rank.weights.items())
        found["stall"].append(time.monotonic() - start)
        for tensor in rank.weights.values():
            tensor.fill_(-1)  # as the next step does: what was published is to stay as it was
        if not publisher.flush(_WAIT_SECONDS):
            raise ZbgrpoError(f"version {version} did not get through")
        found["sent"].append(time.monotonic() - start)
        rank.barrier()
    publisher.close()
    return found


def run_receiver(rank: _Rank, num_versions: int) -> dict[str, Any]:
    """Apply version after version; which of them were wrong."""
    reported = threading.Event()
    subscriber = WeightSubscriber(
        rank.groups.weights[0], 0, rank.manifest, rank.weights, device=rank.device,
        handles=rank.store.get("staging") if rank.groups.weights_transport == "ipc" else None,
        on_applied=lambda version, value: reported.set(),
    )  # fmt: skip
    found: dict[str, Any] = {"wrong": [], "apply": []}
    for version in range(num_versions):
        rank.barrier()
        subscriber.expect(version)
        wait_for_version(lambda: subscriber.ready() is not None)
        start = time.monotonic()
        subscriber.apply()
        found["apply"].append(time.monotonic() - start)
        found["wrong"] += [
            f"{version}: {name}"
            for name, value in rank.values(version).items()
            if not torch.equal(rank.weights[name], value)
        ]
        if not reported.wait(_WAIT_SECONDS):
            raise ZbgrpoError(f"version {version}: the digest of what is in use did not come")
        reported.clear()
        rank.barrier()
    subscriber.close()
    return found


def as_rank(folder: Path, transport: str, size: str, device_name: str) -> None:
    device = torch.device("cuda", 0) if device_name == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    rank = _Rank(transport, size, device)
    found = (run_source if rank.rank == 0 else run_receiver)(rank, _NUM_VERSIONS[size] + _NUM_WARM_UP)
    found["memory"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    (folder / f"{transport}-{rank.rank}.json").write_text(json.dumps(found))
    rank.barrier()
    disconnect()


def measure(report: Report, folder: Path, transport: str, options: argparse.Namespace) -> None:
    """One world of two ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        "--nproc-per-node", "2", __file__, "--as-rank", transport, "--folder", str(folder), "--size", options.size,
        "--device", options.device, "--report", str(options.report),
    ]  # fmt: skip
    name = f"transfer.{transport}"
    try:
        run_program(command, _RUN_SECONDS, environment={"OMP_NUM_THREADS": "1"})
    except ZbgrpoError as error:
        report.check(f"{name}.ends", False, reason=str(error))
        return
    source, receiver = (json.loads((folder / f"{transport}-{rank}.json").read_text()) for rank in range(2))
    report.check(f"{name}.ends", source["transport"] == transport, transport=source["transport"])
    report.check(f"{name}.values_arrive", not receiver["wrong"], wrong=receiver["wrong"][:5])
    num_bytes, sent = source["num_bytes"], source["sent"][_NUM_WARM_UP:]
    report.figure(f"{name}.bytes", num_bytes)
    for key, seconds in (("gb_per_s", median(sent)), ("gb_per_s_min", max(sent)), ("gb_per_s_max", min(sent))):
        report.figure(f"{name}.{key}", num_bytes / seconds / 1e9)
    report.figure(f"{name}.plain_copy_gb_per_s", num_bytes / source["copy"] / 1e9)
    report.figure(f"{name}.publish_ms", 1e3 * median(source["stall"][_NUM_WARM_UP:]))
    report.figure(f"{name}.apply_ms", 1e3 * median(receiver["apply"][_NUM_WARM_UP:]))
    for side, found in (("source", source), ("receiver", receiver)):
        memory = found["memory"] / 2**20 if found["memory"] is not None else None
        report.figure(f"{name}.memory_allocated_{side}_mib", memory, "the rank had no GPU")


def main() -> int:
    parser = part_options(__doc__)
    parser.add_argument("--as-rank", metavar="TRANSPORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        as_rank(options.folder, options.as_rank, options.size, options.device)
        return 0
    os.environ["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    report = Report()
    for transport in ("ipc", "gloo"):
        measure(report, options.folder, transport, options)
    report.write(options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
