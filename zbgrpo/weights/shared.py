"""Memory of one process that others of its machine read: new weights then need not travel at all.

On the CPU it is an anonymous file in memory. It has no name anywhere, so nothing is left behind however the processes
end; others open it through the descriptor of the process that made it. On a GPU it is memory of the device, opened by
the handles of CUDA IPC. What others need to open either is plain numbers and bytes, told through the rendezvous store.
"""

from __future__ import annotations

import atexit
import errno
import os
from pathlib import Path
from typing import Union

import msgspec
import torch
from torch import Tensor

from zbgrpo.errors import ResourceError, WeightSyncError
from zbgrpo.weights.manifest import WeightManifest

_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


class MemoryFile:
    """An anonymous file of fixed size. What others have mapped stays with them after `close`."""

    def __init__(self, title: str, num_bytes: int) -> None:
        """All of it is reserved at once; raises `ResourceError` if there is no memory for it."""
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create(f"zbgrpo-{title}")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        reserved = False
        try:
            # A file that only grows with its first write would end this process by SIGBUS where memory runs out.
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            reserved = True
        except OSError as error:
            if error.errno in _NO_MEMORY:
                raise ResourceError(f"no memory for {num_bytes} bytes of weights ({title})") from error
            raise
        finally:
            if not reserved:
                os.close(self._descriptor)

    def map(self) -> Tensor:
        """All bytes, shared with everybody who has mapped them."""
        return map_file(self.path, self.num_bytes)

    def close(self) -> None:
        """Nobody can open it any more."""
        os.close(self._descriptor)


def map_file(path: str, num_bytes: int) -> Tensor:
    """The bytes of a `MemoryFile` of another process. Raises `WeightSyncError` if it cannot be opened or has another
    size."""
    try:
        size = os.stat(path).st_size
        if size != num_bytes:
            raise WeightSyncError(f"weights in shared memory: {size} bytes are there, not {num_bytes}")
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise WeightSyncError(f"weights in shared memory: {path} cannot be opened: {error}") from error


class _InFile(msgspec.Struct, frozen=True, tag="file"):
    """One set of staging buckets, one after the other."""

    path: str


_Handle = tuple[bytes, int, int, bytes, int, bytes, bool]
"""What `_share_cuda_` gives behind the number of the GPU: of the memory, its size and the offset in it; of a counter of
users, and the offset in that; of an event that is to be waited for, and whether it is."""


class _OnDevice(msgspec.Struct, frozen=True, tag="cuda"):
    """One set of staging buckets; of each what torch needs to open its storage."""

    gpu: str
    """Its UUID: a launcher may show a GPU to each process under another number."""
    buckets: list[_Handle]


_Sets = list[Union[_InFile, _OnDevice]]


class SharedStaging:
    """Sets of staging buckets that other processes can open. Made by the source of the weights."""

    def __init__(self, manifest: WeightManifest, device: torch.device, num_sets: int) -> None:
        """Raises `ResourceError` if there is no memory for them, or none that can be shared."""
        self._files: list[MemoryFile] = []
        self.sets: list[list[Tensor]] = []
        handles: _Sets = []
        for _ in range(num_sets):
            if device.type == "cuda":
                buckets, described = _share_on_device(manifest, device)
                handles.append(described)
            else:
                file = MemoryFile("weights", manifest.num_bytes)
                self._files.append(file)
                buckets = list(file.map().split(manifest.bucket_sizes))
                handles.append(_InFile(file.path))
            self.sets.append(buckets)
        self.handles = msgspec.msgpack.encode(handles)
        """What `open_staging` needs, in another process."""

    def close(self) -> None:
        """Nobody can open them any more; who has goes on having them."""
        for file in self._files:
            file.close()
        self._files.clear()


def open_staging(handles: bytes, manifest: WeightManifest) -> list[list[Tensor]]:
    """The sets of staging buckets of a `SharedStaging` with an equal manifest, in another process of its machine.

    Raises `WeightSyncError` where this process cannot reach that one's memory.
    """
    opened: list[list[Tensor]] = []
    for described in msgspec.msgpack.decode(handles, type=_Sets):
        if isinstance(described, _InFile):
            opened.append(list(map_file(described.path, manifest.num_bytes).split(manifest.bucket_sizes)))
        else:
            opened.append(_open_on_device(described))
    return opened


def _share_on_device(manifest: WeightManifest, device: torch.device) -> tuple[list[Tensor], _OnDevice]:
    handles: list[_Handle] = []
    try:
        buckets = manifest.allocate(device)
        for bucket in buckets:
            _, memory, size, offset, counters, place, event, is_awaited = bucket.untyped_storage()._share_cuda_()
            handles.append((memory, size, offset, counters, place, event, is_awaited))
            _unname(Path("/dev/shm", counters.decode().lstrip("/")))
    except RuntimeError as error:
        raise ResourceError(
            f"no memory of the GPU for {manifest.num_bytes} bytes of weights that others can open: {error}"
        ) from error
    return buckets, _OnDevice(str(torch.cuda.get_device_properties(device).uuid), handles)


_unnamed: set[Path] = set()


def _unname(counters: Path) -> None:
    """Take its name from the file in which torch counts who has opened memory of this process.

    Torch removes the file as the interpreter ends, so that a process that is killed, or ends by `os._exit`, would leave
    it behind. The name is for others only, who count down as they let the memory go; a name that is gone means to them
    that this process is. Here nobody waits for them: the memory stays until this process ends.
    """
    if counters not in _unnamed:
        _unnamed.add(counters)
        counters.unlink(missing_ok=True)
        atexit.register(counters.touch, 0o600)  # torch would abort the process if there were nothing to remove


def _open_on_device(described: _OnDevice) -> list[Tensor]:
    try:
        torch.cuda.init()
        gpus = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
        if described.gpu not in gpus:
            raise WeightSyncError(
                f"weights by CUDA IPC: the GPU of the source, {described.gpu}, cannot be seen here "
                "(CUDA_VISIBLE_DEVICES); use --weight-transport gloo"
            )
        number = gpus.index(described.gpu)
        storages = [torch.UntypedStorage._new_shared_cuda(number, *handle) for handle in described.buckets]
    except RuntimeError as error:
        raise WeightSyncError(
            f"weights by CUDA IPC: the memory of the source cannot be opened: {error}; use --weight-transport gloo"
        ) from error
    empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", number))
    return [empty.new_empty(0).set_(storage) for storage in storages]  # type: ignore[call-overload]
