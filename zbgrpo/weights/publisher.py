"""The sending side: one source consumer per pipeline stage, with a background thread.

States of each of the two staging sets: FREE -> WAITING (holds the newest version) -> SENDING -> FREE.
Invariant: at most one set is SENDING and at most one WAITING. `publish` replaces a WAITING version by a newer one
(that is the coalescing), unless it is pinned: a version due for evaluation is always sent.

Example: version 4 is SENDING when 5 commits: 5 is WAITING. 6 commits before 4 is through: 6 replaces 5, and the
producers go from 4 to 6.

On one machine the staging sets are in memory that the producers have opened (`shared`). Then a version does not travel:
they are told which set holds it, copy it from there, and the set is SENDING until all of them have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo import failpoints
from zbgrpo.errors import WeightSyncError, ZbgrpoError
from zbgrpo.groups.process_groups import reason_of
from zbgrpo.weights.manifest import WeightManifest, digest
from zbgrpo.weights.shared import SharedStaging
from zbgrpo.weights.streams import background_stream

_NUM_SETS = 2


class Sent(NamedTuple):
    """A finished broadcast."""

    version: int
    digest: str
    seconds: float


@dataclass
class _Staging:
    number: int
    buckets: list[Tensor]
    views: dict[str, Tensor]
    state: str = "FREE"
    version: int = -1
    pinned: bool = False
    ready: torch.cuda.Event | None = field(default=None)


class WeightPublisher:
    """See the module's text."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        source_rank: int,
        manifest: WeightManifest,
        announce: Callable[[int, int], None],
        *,
        device: torch.device,
        timeout_seconds: float,
        shared: bool = False,
        on_sent: Callable[[Sent], None] = lambda sent: None,
    ) -> None:
        """`announce(broadcast number, version)` tells the producers, who join the broadcast in a thread of theirs.

        `shared`: they have opened `self.shared.handles`. Raises `ResourceError` if there is no memory to share.
        """
        self._group, self._source_rank, self._manifest = group, source_rank, manifest
        self._announce, self._on_sent, self._timeout_seconds = announce, on_sent, timeout_seconds
        self._device = device
        pin = device.type == "cpu" and torch.cuda.is_available()
        self.shared = SharedStaging(manifest, device, _NUM_SETS) if shared else None
        sets = self.shared.sets if self.shared else [manifest.allocate(device, pin) for _ in range(_NUM_SETS)]
        self._staging = [_Staging(number, buckets, manifest.views(buckets)) for number, buckets in enumerate(sets)]
        self._condition = threading.Condition()
        self._closing = False
        self._failure: ZbgrpoError | None = None
        self._broadcasts = 0
        self.last: Sent | None = None
        self.coalesced = 0
        """Versions that a newer one replaced before they were sent."""
        self.stall_seconds = 0.0
        """Time that `publish` has spent so far: copying, and waiting for a pinned version to leave."""
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]], pinned: bool = False) -> None:
        """Copy the weights, each as it comes, and return; they are sent in the background, newest first. Raises an
        earlier failure, and `WeightSyncError` if the names are not those of the manifest."""
        start = time.monotonic()
        failpoints.fire("weights.publish")
        with self._condition:
            staging = self._claim(start)
        with torch.no_grad():
            names = set()
            for name, tensor in weights:
                staging.views[name].copy_(tensor.detach(), non_blocking=True)
                names.add(name)
        if names != staging.views.keys():
            raise WeightSyncError(f"version {version} lacks {sorted(staging.views.keys() - names)[:5]}")
        if torch.cuda.is_available():
            staging.ready = torch.cuda.Event()
            staging.ready.record()
        with self._condition:
            staging.state, staging.version, staging.pinned = "WAITING", version, pinned
            self._condition.notify_all()
        self.stall_seconds += time.monotonic() - start

    def _claim(self, start: float) -> _Staging:
        while True:
            self._check()
            waiting = next((s for s in self._staging if s.state == "WAITING"), None)
            if waiting is not None and not waiting.pinned:
                waiting.state = "FREE"
                self.coalesced += 1
                return waiting
            free = next((s for s in self._staging if s.state == "FREE"), None)
            if waiting is None and free is not None:
                return free
            self._condition.wait(1.0)
            if time.monotonic() - start > self._timeout_seconds:
                raise WeightSyncError(f"no broadcast has finished within {self._timeout_seconds:.0f} s")

    @property
    def is_idle(self) -> bool:
        """Whether everything that was published has been sent."""
        with self._condition:
            return all(staging.state == "FREE" for staging in self._staging)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything published has been sent; False if that took too long. Raises a failure."""
        deadline = time.monotonic() + timeout_seconds
        with self._condition:
            while any(s.state != "FREE" for s in self._staging):
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(min(1.0, left))
            self._check()
        return True

    def check(self) -> None:
        """Raise the failure of the background thread, if there was one."""
        with self._condition:
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop after the broadcast in work; what is WAITING is dropped."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(self._timeout_seconds)
        if self.shared:
            self.shared.close()

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while (staging := self._next()) is not None:
                sent = self._send(staging)
                with self._condition:
                    staging.state, self.last = "FREE", sent
                    self._condition.notify_all()
                self._on_sent(sent)
        except ZbgrpoError as error:
            self._fail(error)
        except (RuntimeError, dist.DistError) as error:
            self._fail(WeightSyncError(f"broadcast {self._broadcasts} of the weights failed: {reason_of(error)}"))

    def _fail(self, error: ZbgrpoError) -> None:
        with self._condition:
            self._failure = error
            self._condition.notify_all()

    def _next(self) -> _Staging | None:
        with self._condition:
            while not self._closing:
                for staging in self._staging:
                    if staging.state == "WAITING":
                        staging.state = "SENDING"
                        self._broadcasts += 1
                        return staging
                self._condition.wait(1.0)
        return None

    def _send(self, staging: _Staging) -> Sent:
        start = time.monotonic()
        self._announce(self._broadcasts, staging.version)
        wrong = failpoints.fire("weights.broadcast")
        with background_stream(self._device, staging.ready) as finish:
            if self.shared:
                finish()  # other processes know nothing of this one's streams
            parts = [torch.tensor([staging.number])] if self.shared else staging.buckets
            works = [self._broadcast(part) for part in parts]
            value = digest(staging.views)  # computed while the others receive, or copy
            device = torch.device("cpu") if self.shared else self._device
            works.append(self._broadcast(_trailer(staging.version, "1" * 15 if wrong else value, device)))
            for work in works:
                work.wait()
            if self.shared:
                dist.barrier(self._group)  # all have copied it
            finish()
        return Sent(staging.version, value, time.monotonic() - start)

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        return dist.broadcast(tensor, src=self._source_rank, group=self._group, async_op=True)


def _trailer(version: int, value: str, device: torch.device) -> Tensor:
    return torch.tensor([version, int(value, 16)], dtype=torch.int64, device=device)
