"""Starts a hub (or the forwarder), producers and a consumer of `traffic`, and reads what the consumer has measured."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from zbgrpo.bench.common import rounded
from zbgrpo.bench.traffic import MAX_MESSAGE_BYTES, TIMING, Mark, Settings, Shape
from zbgrpo.engine.hub_process import ChildProcess
from zbgrpo.engine.hub_spec import HubSpec, ReaderSpec
from zbgrpo.errors import ZbgrpoError

HUB, FORWARDER = "zbgrpo.engine.hub", "zbgrpo.bench.forwarder"
_RUN_ID = "bench"
_START_SECONDS = 60.0
_RING_GROUPS = 256
_WARM_SHARE = 0.1


class Traffic(NamedTuple):
    """What the consumer of one run has measured."""

    groups: int
    marks: list[Mark]
    cpu_seconds: dict[str, float]
    """Of every process; of the hub with its start, which takes some tenths."""

    def groups_per_second(self) -> float:
        """Without the first tenth, in which everything is done for the first time."""
        first = next(mark for mark in self.marks if mark.groups >= _WARM_SHARE * self.groups)
        last = self.marks[-1]
        return (last.groups - first.groups) / (last.seconds - first.seconds)


def hub_spec(
    shape: Shape, num_groups: int, num_producers: int, leases: int, groups_per_step: int, events_path: Path
) -> HubSpec:
    """A run of one consumer in which `num_groups` groups are trained once."""
    return HubSpec(
        run_id=_RUN_ID,
        node=0,
        host=None,
        curve=False,
        timing=TIMING,
        ring_bytes=_RING_GROUPS * (shape.group_bytes + 1024),
        max_message_bytes=MAX_MESSAGE_BYTES,
        readers=[ReaderSpec(0, 0, 0)],
        events_path=str(events_path),
        num_rows=num_groups,
        groups_per_step=groups_per_step,
        groups_per_minibatch=shape.groups,
        num_producers=num_producers,
        leases_per_producer=leases,
        buffer_limit=groups_per_step,
    )


def run_traffic(module: str, spec: HubSpec, shape: Shape, timeout_seconds: float, tensors: bool) -> Traffic:
    """Run it to the end of the plan. Raises `ZbgrpoError`, and leaves no process, if anything fails or takes longer."""
    deadline = time.monotonic() + timeout_seconds
    hub = ChildProcess(module, spec, _START_SECONDS)
    peers: dict[str, subprocess.Popen[str]] = {}
    try:
        settings = Settings(
            spec.run_id,
            hub.started.address,
            shape,
            ring_path=hub.started.ring_path,
            ring_bytes=hub.started.ring_bytes,
            tensors=tensors,
            marks=max(1, spec.num_rows // 50),
        )
        peers["consumer"] = _start("consumer", settings)
        for index in range(spec.num_producers):
            peers[f"producer {index}"] = _start("producer", msgspec.structs.replace(settings, index=index))
        results = {name: _result(name, peer, deadline) for name, peer in peers.items()}
        before = _ended_children_seconds()
        hub.close(max(0.0, deadline - time.monotonic()))
        hub_seconds = _ended_children_seconds() - before
    finally:
        for peer in peers.values():
            peer.kill()
            peer.wait()
        hub.close(0.0)
    _check(results, spec, hub.poll())
    cpu_seconds = {name: result["cpu_seconds"] for name, result in results.items()} | {"hub": hub_seconds}
    marks = [Mark(*mark) for mark in results["consumer"]["marks"]]
    return Traffic(spec.num_rows, marks, {name: rounded(seconds) for name, seconds in cpu_seconds.items()})


def _ended_children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _start(role: str, settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zbgrpo.bench.traffic", role, msgspec.json.encode(settings).decode()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _result(name: str, peer: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    try:
        output, _ = peer.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ZbgrpoError(f"the {name} of the benchmark did not end in time") from None
    if peer.returncode != 0:
        raise ZbgrpoError(f"the {name} of the benchmark ended with status {peer.returncode}")
    result: dict[str, Any] = msgspec.json.decode(output.splitlines()[-1])
    return result


def _check(results: dict[str, dict[str, Any]], spec: HubSpec, hub_status: int | None) -> None:
    arrived = results["consumer"]["groups"]
    sent = sum(result["groups"] for name, result in results.items() if name != "consumer")
    if hub_status != 0 or not arrived == sent == spec.num_rows:
        raise ZbgrpoError(f"{arrived} of {spec.num_rows} groups arrived, {sent} were sent; hub status {hub_status}")
