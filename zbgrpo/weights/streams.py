"""CUDA streams of the background threads, so that a broadcast never queues in front of computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def background_stream(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[Callable[[], None]]:
    """Work inside runs on a stream of its own, behind the event `after`; the function given waits for all of it.

    On a CPU there are no streams. What is to be waited for there are copies out of a GPU, and they are at once.
    """
    if device.type != "cuda":
        if after is not None:
            after.synchronize()
        yield lambda: None
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield stream.synchronize
