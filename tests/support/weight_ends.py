"""Both ends of a weight transfer for tests: a small model whose values tell the version, a source and a sink."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zbgrpo.weights.manifest import WeightManifest, named_weights
from zbgrpo.weights.publisher import Sent, WeightPublisher
from zbgrpo.weights.subscriber import Incoming, WeightSubscriber

TIMEOUT_SECONDS = 60.0
CPU = torch.device("cpu")
BUCKET_BYTES = 512
END = -1
SHARED_MEMORY = False
"""Whether the sources and sinks of this process use memory of the source, in place of broadcasts."""


class Net(nn.Module):
    """Odd sizes, a bias, buffers of several kinds, and a head that may be tied to the embedding."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, tied: bool = True, width: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(13, width)
        self.inner = nn.Linear(width, 9)
        self.head = nn.Linear(width, 13, bias=False)
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("count", torch.tensor([seed, 2**40 + seed]))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.scale):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)


def expected(version: int, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """What the live tensors of a sink must be when it uses this version."""
    return {name: tensor.detach() for name, tensor in named_weights(Net(version, **options).to(dtype))}


def same(live: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return live.keys() == wanted.keys() and all(torch.equal(live[n], wanted[n]) for n in wanted)


class Source:
    """A publisher that announces through the store."""

    def __init__(
        self,
        group: Any,
        store: Any,
        dtype: torch.dtype,
        rank: int = 0,
        before_sending: Callable[[int], None] = lambda version: None,
        **options: Any,
    ) -> None:
        self.sent: list[Sent] = []
        self.store, self.options = store, options
        self._before, self._announced = before_sending, 0
        self.publisher = WeightPublisher(
            group,
            rank,
            WeightManifest.of(Net(0, **options), dtype, BUCKET_BYTES),
            self._announce,
            device=CPU,
            timeout_seconds=TIMEOUT_SECONDS,
            shared=SHARED_MEMORY,
            on_sent=self.sent.append,
        )
        if self.publisher.shared is not None:
            store.set("staging", self.publisher.shared.handles)

    def _announce(self, broadcast: int, version: int) -> None:
        self._announced = broadcast
        self.store.set(f"announce/{broadcast}", str(version))
        self._before(version)

    def publish(self, version: int, **settings: Any) -> None:
        self.publisher.publish(version, named_weights(Net(version, **self.options)), **settings)

    def finish(self) -> dict[int, str]:
        assert self.publisher.flush(TIMEOUT_SECONDS)
        self.publisher.close()
        self.store.set(f"announce/{self._announced + 1}", str(END))
        return {sent.version: sent.digest for sent in self.sent}


class Sink:
    """A subscriber that learns of broadcasts from the store."""

    def __init__(self, group: Any, store: Any, dtype: torch.dtype, source: int = 0, **options: Any) -> None:
        self.model = Net(1000, **options).to(dtype)
        self.reports: list[tuple[int, str]] = []
        self._store, self._seen = store, 0
        manifest = WeightManifest.of(self.model, dtype, BUCKET_BYTES)
        self.subscriber = WeightSubscriber(
            group,
            source,
            manifest,
            dict(named_weights(self.model)),
            device=CPU,
            handles=store.get("staging") if SHARED_MEMORY else None,
            on_applied=lambda version, value: self.reports.append((version, value)),
        )

    @property
    def live(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in named_weights(self.model)}

    @property
    def places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.live.values()]

    def next_announced(self) -> int:
        self._seen += 1
        return int(self._store.get(f"announce/{self._seen}"))

    def wait(self, done: Callable[[], bool] | None = None) -> Incoming | None:
        """Poll until a version is READY (or `done`); raises what the subscriber raises."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            incoming = self.subscriber.ready()
            if done() if done is not None else incoming is not None:
                return incoming
            time.sleep(0.001)
        raise AssertionError("nothing came")

    def wait_for(self, version: int) -> None:
        self.wait(lambda: (self.subscriber.ready() or Incoming(END, "")).version == version)

    def take_all(self) -> list[int]:
        """Apply everything that is announced, one after the other, until the end."""
        versions = []
        while (version := self.next_announced()) != END:
            self.subscriber.expect(version)
            self.wait_for(version)
            applied = self.subscriber.apply()
            assert applied is not None
            versions.append(applied.version)
        return versions

    def close(self) -> list[tuple[int, str]]:
        self.subscriber.close()
        return self.reports
