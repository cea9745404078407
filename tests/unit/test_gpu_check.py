"""The check for machines with a GPU, as far as it runs without one, and how GPU memory is told to other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from zbgrpo.errors import WeightSyncError
from zbgrpo.weights import shared
from zbgrpo.weights.manifest import TensorSpec, WeightManifest
from zbgrpo.weights.streams import background_stream

GPU_CHECK = Path(__file__).parents[1] / "gpu"


def program(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(GPU_CHECK / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_all_of_it_holds_on_a_cpu() -> None:
    done = program("check.py", "--device", "cpu", "--size", "tiny")
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and result["ok"], done.stderr[-4000:]
    assert {name.split(".")[0] for name in result["checks"]} == {"run", "transfer", "numerics", "attention"}
    assert result["checks"]["transfer.ipc.ends"]["transport"] == "ipc"
    assert result["checks"]["run.digests_are_equal"]["versions"] > 2
    without = {name for name, value in result["figures"].items() if value is None}
    assert without == set(result["reasons"]), "every figure that is not there has a reason, and no other"
    assert result["figures"]["run.train_tokens_per_s"] > 0


def test_a_machine_without_a_gpu_is_said_so() -> None:
    done = program("check.py", CUDA_VISIBLE_DEVICES="")
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and not result["ok"]
    assert result["checks"]["gpu"]["reason"]


def test_missing_packages_are_found(tmp_path: Path) -> None:
    """By an interpreter without any packages, and by one with an old release of one."""
    bare = [sys.executable, "-I", "-S", str(GPU_CHECK / "packages.py")]
    missing = subprocess.run([*bare, "missing"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"torch", "transformers>=4.51", "msgspec"} <= set(missing)
    assert program("packages.py", "missing").stdout.split() == []
    old = tmp_path / "transformers-4.9.2.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.9.2\n")
    assert program("packages.py", "missing", PYTHONPATH=str(tmp_path)).stdout.split() == ["transformers>=4.51"]
    torch_is_kept = f"torch=={torch.__version__}"
    assert torch_is_kept in program("packages.py", "constraints").stdout.splitlines()


# ------------------------------------------------------------------------------------- memory of a GPU, without one


class _FakeCuda:
    """What `zbgrpo.weights.shared` uses of torch.cuda: GPUs by their UUIDs."""

    def __init__(self, *uuids: str) -> None:
        self._uuids = uuids

    def init(self) -> None: ...

    def device_count(self) -> int:
        return len(self._uuids)

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(uuid=self._uuids[device if isinstance(device, int) else device.index])


def handle_of(gpu: str) -> bytes:
    bucket = (b"memory", 128, 0, b"/torch_1_2_3", 0, b"event", True)
    return msgspec.msgpack.encode([shared._OnDevice(gpu, [bucket])])


MANIFEST = WeightManifest([TensorSpec("w", [32], "float32")], 1 << 20)


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source calls it 0; here it is number 1, and that is the one which is opened."""
    asked: list[Any] = []

    def opened(*arguments: Any) -> Any:
        asked.append(arguments)
        raise RuntimeError("far enough")

    monkeypatch.setattr(torch, "cuda", _FakeCuda("other", "wanted"))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    with pytest.raises(WeightSyncError, match="far enough; use --weight-transport gloo"):
        shared.open_staging(handle_of("wanted"), MANIFEST)
    assert asked == [(1, b"memory", 128, 0, b"/torch_1_2_3", 0, b"event", True)]
    with pytest.raises(WeightSyncError, match="cannot be seen here"):
        shared.open_staging(handle_of("hidden"), MANIFEST)


def test_the_counters_of_torch_lose_their_name_and_get_it_back_at_the_end(tmp_path: Path) -> None:
    counters = tmp_path / "torch_1_2_3"
    text = (
        "import sys; from pathlib import Path; from zbgrpo.weights.shared import _unname\n"
        "path = Path(sys.argv[1]); path.write_bytes(b'counters')\n"
        "_unname(path); assert not path.exists(); _unname(path)\n"
    )
    for ending, is_there in (("", True), ("import os; os._exit(0)", False)):
        counters.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-c", text + ending, str(counters)], check=True, timeout=100)
        assert counters.exists() == is_there


def test_copies_out_of_a_gpu_are_waited_for_on_the_host() -> None:
    waited = []
    event: Any = SimpleNamespace(synchronize=lambda: waited.append(True))
    with background_stream(torch.device("cpu"), event) as finish:
        assert waited == [True]
        finish()
