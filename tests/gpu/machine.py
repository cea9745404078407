"""Which machine this is: versions, the GPU, its peak rate and how much of its memory is in use."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
from types import TracebackType
from typing import Any, Optional

PEAK_TFLOPS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200", 989.0), ("GH200", 989.0), ("H800", 989.0),
    ("H20", 148.0), ("B200", 2250.0), ("GB200", 2500.0), ("A100", 312.0), ("A800", 312.0), ("A40", 149.7),
    ("A30", 165.0), ("A10G", 70.0), ("A10", 125.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
    ("RTX A6000", 154.8), ("RTX 6000 Ada", 364.2), ("RTX 3090", 71.0), ("RTX 4090", 165.2), ("RTX 5090", 209.5),
)  # fmt: skip
"""Dense bf16 products with float32 sums, from the makers' data sheets, by words of the device's name."""
_QUERY_SECONDS = 20.0


def peak_tflops(name: str) -> Optional[float]:
    """The longest entry all of whose words are words of the name; None for a device that the table lacks.

    Example: "NVIDIA H100 PCIe" is an "H100 PCIe", and "NVIDIA H100 80GB HBM3" an "H100".
    """
    words = set(name.replace("-", " ").split())
    found = [(len(entry), peak) for entry, peak in PEAK_TFLOPS if set(entry.split()) <= words]
    return max(found)[1] if found else None


def describe(device: str) -> dict[str, Any]:
    """Versions and the device; null where there is none."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "driver": None,
        "device": None,
        "capability": None,
        "memory_gib": None,
        "peak_bf16_tflops": None,
        "nccl": None,
        "kernel": platform.release(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "driver": query("driver_version"),
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "peak_bf16_tflops": peak_tflops(properties.name),
        }
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def query(what: str) -> Optional[str]:
    """What nvidia-smi says of the GPU that is used; None if it says nothing."""
    command = [
        "nvidia-smi",
        f"--query-gpu={what}",
        "--format=csv,noheader,nounits",
        f"--id={os.environ['CUDA_VISIBLE_DEVICES']}",
    ]
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


class MemoryWatch:
    """Inside it, the most memory of the GPU that is in use, by all processes, is looked up every half second."""

    def __init__(self) -> None:
        self.peak_mib: Optional[float] = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_QUERY_SECONDS)

    def _run(self) -> None:
        while True:
            used = query("memory.used")
            if used is None or not used.replace(".", "").isdigit():
                return
            self.peak_mib = max(self.peak_mib or 0.0, float(used))
            if self._ended.wait(0.5):
                return
