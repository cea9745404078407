"""What runs inside the worker processes of a vLLM engine: taking new weights, and ending when nobody is left.

vLLM imports this module in each worker and adds `WorkerExtension` to its worker class.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
from typing import Any

from torch import Tensor

from zbgrpo.errors import WeightSyncError
from zbgrpo.inference import vllm_library
from zbgrpo.inference.vllm_weights import EngineWeights
from zbgrpo.topology.env import EngineOwner, engine_owner
from zbgrpo.weights.manifest import digest


class WorkerExtension:
    """Methods that the rank calls in all workers at once. Their names must not be among vLLM's own."""

    zbgrpo_tensors: dict[str, Tensor] | None = None

    def zbgrpo_processes(self) -> list[int]:
        """Process ids of this worker and of the engine core that it belongs to."""
        return [os.getpid(), os.getppid()]

    def zbgrpo_map(self, path: str, weights: str) -> str:
        """Map new weights. Changes nothing in the model; a text says what is wrong with them, an empty one nothing."""
        try:
            self.zbgrpo_tensors = EngineWeights.decode(weights).open(path)
        except (WeightSyncError, OSError) as error:
            return str(error)
        return ""

    def zbgrpo_load(self, with_digest: bool) -> str:
        """Generate with the mapped weights from now on. Returns their digest, or an empty text without.

        After an error the model is half old, half new: the engine must not be used again.
        """
        worker: Any = self
        assert self.zbgrpo_tensors is not None, "no weights are mapped"
        tensors, self.zbgrpo_tensors = self.zbgrpo_tensors, None
        vllm_library.load_weights(worker.model_runner.get_model(), worker.vllm_config, tensors)
        return digest(tensors) if with_digest else ""


def _end_with(owner: EngineOwner) -> None:
    """End the engine core and this worker when the rank that they work for has ended, and this worker with its core.

    vLLM's own processes notice neither: they stay for minutes, with all their memory. SIGKILL, because a worker in
    the middle of a collective listens to nothing else.
    """
    core = os.getppid()
    watched: dict[int, int] = {}
    poll = select.poll()
    for process in {owner.process, core}:
        try:
            watched[process] = os.pidfd_open(process)
        except ProcessLookupError:
            break  # it has ended already
        poll.register(watched[process], select.POLLIN)
    else:
        poll.poll()
    if core != owner.process and core in watched:
        signal.pidfd_send_signal(watched[core], signal.SIGKILL)
    shutil.rmtree(owner.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if (_owner := engine_owner()) is not None and _owner.process != os.getpid():
    threading.Thread(target=_end_with, args=(_owner,), name="zbgrpo-watch", daemon=True).start()
