"""The tensors of a state: torch's distributed checkpoint, saved by all ranks of a group and read by those of any other.

Its values are read as tensors only. Its index is a pickle, which could name any function to call, so it is read with a
list of what an index is made of; anything else in it is an error.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbgrpo.errors import RunFolderError

_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
}  # fmt: skip
"""Classes and functions by module, beside the dtypes of torch."""


class _IndexReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        known = global_name in _INDEX.get(module_name, ())
        if known or (module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)):
            return super().find_class(module_name, global_name)
        raise RunFolderError(f"the index of the state names {module_name}.{global_name}: it was not written by a run")


def save_tensors(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of `state`; every rank of the group calls this with its parts. None: this rank alone."""
    import torch.distributed.checkpoint as dcp  # loads slowly

    dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)  # type: ignore[attr-defined]


def load_tensors(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state` from what any group of ranks has saved. Raises RunFolderError for an index that
    cannot be read or holds more than an index does."""
    import torch.distributed.checkpoint as dcp  # loads slowly
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    index = read_index(folder / ".metadata")  # outside of dcp, which would wrap the error

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            index.storage_meta = index.storage_meta or StorageMeta()
            index.storage_meta.load_id = self.load_id
            return index  # type: ignore[no-any-return]

    reader = Reader(folder)
    dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)  # type: ignore[attr-defined]


def read_index(path: Path) -> Any:
    """The index of a distributed checkpoint. Raises RunFolderError."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with path.open("rb") as file:
            index = _IndexReader(file).load()
        if not isinstance(index, Metadata):
            raise ValueError(f"it is a {type(index).__name__}")
        return index
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise RunFolderError(f"{path}: the index of the state cannot be read: {error}") from error
