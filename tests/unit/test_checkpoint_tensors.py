"""The tensors of a state, and an index that would run something."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from zbgrpo.checkpoint.tensors import load_tensors, save_tensors
from zbgrpo.errors import RunFolderError


def state_of(fill: float) -> dict[str, Any]:
    return {
        "master": {"weight": torch.full((3, 2), fill), "bias": torch.full((2,), fill, dtype=torch.bfloat16)},
        "counters": torch.full((3,), int(fill), dtype=torch.int64),
    }


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    save_tensors(state_of(7.0), tmp_path, None)
    found = state_of(0.0)
    load_tensors(found, tmp_path, None)
    torch.testing.assert_close(found, state_of(7.0), rtol=0, atol=0)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def test_an_index_that_names_a_function_is_refused_before_it_is_called(tmp_path: Path) -> None:
    save_tensors(state_of(1.0), tmp_path / "state", None)
    index, mark = tmp_path / "state" / ".metadata", tmp_path / "was here"
    whole = pickle.loads(index.read_bytes())  # noqa: S301
    whole.planner_data = Hostile(mark)
    index.write_bytes(pickle.dumps(whole))
    with pytest.raises(RunFolderError, match=r"names posix.mkdir"):
        load_tensors(state_of(0.0), tmp_path / "state", None)
    assert not mark.exists()
    pickle.loads(index.read_bytes())  # noqa: S301
    assert mark.exists(), "the index was not hostile at all"


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04K\x01."])
def test_an_index_that_is_none_is_an_error(tmp_path: Path, content: bytes) -> None:
    save_tensors(state_of(1.0), tmp_path, None)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"\.metadata"):
        load_tensors(state_of(0.0), tmp_path, None)
