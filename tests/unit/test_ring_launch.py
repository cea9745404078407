"""A node whose /dev/shm is too small for its ring: a launch says what it needs, in one line, and ends."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import FLAGS, Finished, make_workplace, start

SHARED_MEMORY_BYTES = 4 << 20


def launch(workplace: Path, flags: str) -> Finished:
    """A run where /dev/shm has 4 MiB, in a mount namespace of its own; behind its output, what is left there."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    script = (
        f"mount -t tmpfs -o size={SHARED_MEMORY_BYTES} tmpfs /dev/shm || exit 99; "
        f"{sys.executable} {torchrun} -m zbgrpo.launch {' '.join(FLAGS)} -t 1 -i 1 --max-steps 1 {flags}; status=$?; "
        'echo "left: $(ls /dev/shm)"; exit $status'
    )
    process = start(["unshare", "-m", "sh", "-c", script], workplace)
    output, _ = process.communicate(timeout=120)
    return Finished(process.returncode, output)


@pytest.mark.slow
def test_a_launch_with_too_little_shared_memory_names_the_size_and_one_that_obeys_runs(tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path)
    long_prompts = "-mpt 80000 -p shm"  # minibatches of largest groups: what the ring has room for if nothing is set
    failed = launch(workplace, long_prompts)
    assert failed.status not in (0, 99), failed.output[-3000:]
    lines = [line for line in failed.output.splitlines() if "failed: " in line and line.startswith("zbgrpo: ")]
    assert len(lines) == 1, failed.output[-3000:]
    found = re.search(rf"/dev/shm has {SHARED_MEMORY_BYTES} bytes free, but the ring .* needs (\d+): .*", lines[0])
    assert found and "transport.ring_bytes" in found[0] and "--shm-size" in found[0], lines[0]
    assert int(found[1]) > SHARED_MEMORY_BYTES
    # torchrun itself reports, behind the line, that a rank has failed; nothing of ours has a traceback.
    assert "Traceback" not in failed.output[: failed.output.index(lines[0])]
    assert not re.search(r'File ".*/zbgrpo/(engine|transport|launch)\b', failed.output), failed.output[-3000:]
    assert failed.output.rstrip().endswith("left:"), "the ring stays in /dev/shm"

    obeyed = launch(workplace, f"{long_prompts} transport.ring_bytes=2000000")
    assert obeyed.status == 0, obeyed.output[-3000:]
    assert obeyed.output.rstrip().endswith("left:")
