"""The receiving side: one per producer rank, with a background thread that fills a shadow copy, from what the source
broadcasts or from its memory.

States of the shadow copy: EMPTY -> RECEIVING -> READY -> EMPTY (applied, or overwritten by a newer version).
Invariants: a version becomes READY only when all its buckets and its trailer have arrived and its digest agrees, and
`apply` takes READY versions only: half a version is never used. Versions that are applied never go back. A version
that was announced to be kept (it is due for evaluation) is not overwritten before it has been applied: the broadcast
of the next one waits for that, in this thread and in the source's, while decoding and training go on.

Example: version 3 is READY while the producer stays with version 2, which is evaluated; version 4 arrives and
overwrites 3; after the evaluation the producer goes from 2 to 4. Were 3 to be kept, 4 would arrive after it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbgrpo import failpoints
from zbgrpo.errors import WeightSyncError, ZbgrpoError
from zbgrpo.groups.process_groups import reason_of
from zbgrpo.weights.manifest import WeightManifest, digest
from zbgrpo.weights.shared import open_staging
from zbgrpo.weights.streams import background_stream


class Incoming(NamedTuple):
    """A complete version in the shadow copy."""

    version: int
    digest: str
    keep: bool = False
    """Announced as due for evaluation here: whoever applies it stays with it until told otherwise."""


class _Arriving(Mapping[str, Tensor]):
    """The tensors of a version that is being received, in the order in which they travel. Asking for one waits for its
    bucket."""

    def __init__(self, manifest: WeightManifest, buckets: list[Tensor], works: Sequence[dist.Work]) -> None:
        self._views, self._works = manifest.views(buckets), works
        self._bucket = {slot.spec.name: slot.bucket for slot in manifest.slots}
        self._num_arrived = 0

    def __getitem__(self, name: str) -> Tensor:
        while self._num_arrived <= self._bucket[name]:
            self._works[self._num_arrived].wait()
            self._num_arrived += 1
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class _Copied(Mapping[str, Tensor]):
    """The same for a version in memory of the source. Asking for a tensor copies it, and gives the copy."""

    def __init__(self, manifest: WeightManifest, source: list[Tensor], buckets: list[Tensor]) -> None:
        self._source, self._views = manifest.views(source), manifest.views(buckets)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name].copy_(self._source[name], non_blocking=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class WeightSubscriber:
    """See the module's text."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        source_rank: int,
        manifest: WeightManifest,
        live: Mapping[str, Tensor],
        *,
        device: torch.device,
        handles: bytes | None = None,
        on_applied: Callable[[int, str], None] = lambda version, live_digest: None,
    ) -> None:
        """`live`: the engine's own tensors, whose storage is exchanged with the shadow copy's at each apply.

        `handles`: of the source's staging sets, if they can be opened here (`SharedStaging.handles`); raises
        `WeightSyncError` if they cannot.

        `on_applied(version, digest of the live tensors)` is called from the background thread after each apply.
        """
        self._group, self._source_rank, self._manifest = group, source_rank, manifest
        self._live, self._device, self._on_applied = dict(live), device, on_applied
        self._sets = open_staging(handles, manifest) if handles is not None else None
        self._shadow = manifest.allocate(device)
        self._current = manifest.allocate(device)
        for name, view in manifest.views(self._current).items():
            view.copy_(self._live[name].detach())
            self._live[name].data = view
        self._lock = threading.Condition()
        self._ready: Incoming | None = None
        self._unreported: int | None = None  # applied, and its live digest not yet taken
        self._failure: ZbgrpoError | None = None
        self._jobs: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()
        self._closing = False
        self.applied_version = -1
        self._thread = threading.Thread(target=self._run, name="weight-subscriber", daemon=True)
        self._thread.start()

    def expect(self, version: int, keep: bool = False) -> None:
        """The source has begun to broadcast this version: join in, in the background. From any thread."""
        self._jobs.put(("receive", version, keep))

    def ready(self) -> Incoming | None:
        """The complete version in the shadow copy, if there is one; raises a failure of the background thread."""
        if self._failure is not None:
            raise self._failure
        return self._ready

    def held(self) -> AbstractContextManager[Any]:
        """Inside it, what is READY stays so."""
        return self._lock

    def apply(self) -> Incoming | None:
        """Generate with the READY version from now on; None if there is none. Takes no copy: storages change places.

        Call it between two decode steps only.
        """
        with self._lock:
            incoming = self._ready
            if incoming is None:
                return None
            if incoming.version <= self.applied_version:
                raise WeightSyncError(f"version {incoming.version} arrived after {self.applied_version}")
            for name, view in self._manifest.views(self._shadow).items():
                self._live[name].data = view
            self._shadow, self._current = self._current, self._shadow
            self._ready, self.applied_version = None, incoming.version
            self._unreported = incoming.version
            self._lock.notify_all()
        self._jobs.put(("report", incoming.version, False))
        return incoming

    def close(self) -> None:
        """Stop after the broadcast in work."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._jobs.put(("close", 0, False))
        self._thread.join(5.0)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while (job := self._jobs.get())[0] != "close":
                kind, version, keep = job
                if kind == "receive":
                    self._receive(version, keep)
                else:
                    self._report()
        except ZbgrpoError as error:
            self._failure = error
        except (RuntimeError, dist.DistError) as error:
            self._failure = WeightSyncError(f"receiving new weights failed: {reason_of(error)}")

    def _report(self) -> None:
        """Tell the digest of what was applied last. Runs before the next version can be READY, so that nothing is
        applied meanwhile and every report is of the tensors of its own version."""
        with self._lock:
            version, self._unreported = self._unreported, None
        if version is not None:
            self._on_applied(version, digest({spec.name: self._live[spec.name] for spec in self._manifest.specs}))

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        return dist.broadcast(tensor, src=self._source_rank, group=self._group, async_op=True)

    def _receive(self, version: int, keep: bool) -> None:
        with self._lock:
            while self._ready is not None and self._ready.keep and not self._closing:
                self._lock.wait(1.0)
            if self._closing:
                return
            self._ready = None
            shadow = self._shadow
        failpoints.fire("weights.receive")
        self._report()
        with background_stream(self._device) as finish:
            if self._sets is None:
                trailer = torch.zeros(2, dtype=torch.int64, device=self._device)
                works = [self._broadcast(tensor) for tensor in (*shadow, trailer)]
                value = digest(_Arriving(self._manifest, shadow, works))  # computed while later buckets travel
                for work in works:
                    work.wait()
                finish()
            else:
                number, trailer = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
                self._broadcast(number).wait()
                value = digest(_Copied(self._manifest, self._sets[int(number)], shadow))
                finish()
                self._broadcast(trailer).wait()
                dist.barrier(self._group)  # the source may write to it again
            sent_version, sent_digest = trailer.tolist()
        if sent_version != version or f"{sent_digest:016x}" != value:
            raise WeightSyncError(
                f"version {version} arrived damaged: digest {value}, but {sent_digest:016x} of {sent_version} was sent"
            )
        with self._lock:
            self._ready = Incoming(version, value, keep)
