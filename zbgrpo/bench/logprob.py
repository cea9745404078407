"""Log-probs and entropies from hidden states, against whole logits: `zbgrpo bench logprob`.

Both sides compute log-probs, entropies and the gradients of the log-probs in hidden states and weight: 4,096 tokens, a
vocabulary of 151,936, 896 hidden dimensions, float32. The baseline writes down what a reader would write:
logits = hidden @ weight.T, log_softmax, gather, entropy, backward.

memory_ratio  extra memory at the peak (the most that is resident, minus inputs and what Python and torch take, minus
              the gradient of the weight, which both must have), each side in a process of its own
time_ratio    seconds forward and backward, median over interleaved pairs, each side in a process of its own
cpu_ratio     the same in seconds of CPU, which other load on the machine changes less
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from zbgrpo.bench.common import finish, load_average, new_parser, pairs_summary, rounded
from zbgrpo.config.schema import TrainerConfig
from zbgrpo.errors import ResourceError, ZbgrpoError

if TYPE_CHECKING:
    import torch

_SIDES = ("chunked", "whole")
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "0",
}
"""So that a large tensor's memory goes back as soon as the tensor is gone, and what is resident is what is in use."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """Sizes, and how many rows of logits the chunked side has at a time."""

    num_tokens: int = 4096
    vocabulary: int = 151_936
    hidden: int = 896
    chunk_tokens: int = TrainerConfig().logprob_chunk_tokens
    num_threads: int = 1
    temperature: float = 1.0


class Run(NamedTuple):
    """One forward and backward pass."""

    seconds: float
    cpu_seconds: float
    extra_bytes: int
    checksum: float
    """Of the log-probs, entropies and gradients: both sides must agree."""


# ------------------------------------------------------------------------------------------------ one process


def whole_logits(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The baseline: log-probs at the temperature, and entropies at temperature 1 without a gradient."""
    import torch

    logits = hidden @ weight.t()
    log_all = torch.log_softmax(logits, dim=-1)
    scaled = log_all if temperature == 1.0 else torch.log_softmax(logits / temperature, dim=-1)
    logprobs = scaled.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy = -(log_all.exp() * log_all).sum(dim=-1)
    return logprobs, entropy


def run_side(side: str, problem: Problem, tensors: Sequence[torch.Tensor]) -> Run:
    """One pass over (hidden, weight, targets, upstream gradient)."""
    from zbgrpo.algorithms.logprobs import token_logprobs

    hidden, weight, targets, upstream = tensors
    hidden.grad = weight.grad = None
    before = _resident_bytes()
    _forget_peak()
    start, cpu_start = time.monotonic(), time.process_time()
    if side == "chunked":
        logprobs, entropy = token_logprobs(hidden, weight, targets, problem.temperature, problem.chunk_tokens)
    else:
        logprobs, entropy = whole_logits(hidden, weight, targets, problem.temperature)
    logprobs.backward(upstream)  # type: ignore[no-untyped-call]
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    extra = _resident_bytes(peak=True) - before - weight.numel() * weight.element_size()
    assert hidden.grad is not None and weight.grad is not None
    sums = (logprobs.detach(), entropy, hidden.grad.abs(), weight.grad.abs())
    return Run(seconds, cpu_seconds, extra, float(sum(tensor.double().sum() for tensor in sums)))


def _serve_side(side: str, problem: Problem) -> int:
    """A pass for every line of the input, its result as a line of the output."""
    import torch

    torch.set_num_threads(problem.num_threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(problem.num_tokens, problem.hidden, generator=generator).requires_grad_()
    weight = torch.randn(problem.vocabulary, problem.hidden, generator=generator).mul_(0.05).requires_grad_()
    targets = torch.randint(0, problem.vocabulary, (problem.num_tokens,), generator=generator)
    upstream = torch.randn(problem.num_tokens, generator=generator)
    small = Problem(8, 64, problem.hidden, 4)
    inputs = [
        hidden[:8].detach().requires_grad_(),
        weight[:64].detach().requires_grad_(),
        targets[:8] % 64,
        upstream[:8],
    ]
    run_side(side, small, inputs)  # what is loaded at first use is not part of the memory
    for _ in sys.stdin:
        print(json.dumps(run_side(side, problem, (hidden, weight, targets, upstream))), flush=True)
    return 0


def _resident_bytes(peak: bool = False) -> int:
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ both


class Side:
    """A process that computes one side when it is asked to."""

    def __init__(self, side: str, problem: Problem) -> None:
        changes = [f"{name}={value}" for name, value in _ALLOCATOR.items()]
        command = ["env", *changes, sys.executable, "-m", "zbgrpo.bench.logprob", "--side", side]
        command += ["--problem", msgspec.json.encode(problem).decode()]
        self._side = side
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self) -> Run:
        """One pass. Raises `ResourceError` if the process has died, most likely for lack of memory."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ResourceError(f"the side with {self._side} logits has died: it needs more memory than there is")
        return Run(*json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def measure(problem: Problem, num_pairs: int) -> dict[str, Any]:
    """Interleaved pairs. Raises `ZbgrpoError` if the results of the two sides differ."""
    sides = {side: Side(side, problem) for side in _SIDES}
    try:
        pairs = [{side: process.run() for side, process in sides.items()} for _ in range(num_pairs)]
    finally:
        for process in sides.values():
            process.close()
    for pair in pairs:
        chunked, whole = pair["chunked"].checksum, pair["whole"].checksum
        if abs(chunked - whole) > 1e-4 * abs(whole):
            raise ZbgrpoError(f"the sides disagree: {chunked} with chunks, {whole} with whole logits")
    return {
        **pairs_summary([pair["chunked"].extra_bytes / pair["whole"].extra_bytes for pair in pairs], "memory_ratio"),
        **pairs_summary([pair["chunked"].seconds / pair["whole"].seconds for pair in pairs], "time_ratio"),
        **pairs_summary([pair["chunked"].cpu_seconds / pair["whole"].cpu_seconds for pair in pairs], "cpu_ratio"),
        **{f"{side}_seconds": rounded(median(pair[side].seconds for pair in pairs)) for side in _SIDES},
        **{f"{side}_extra_mb": rounded(median(pair[side].extra_bytes for pair in pairs) / 1e6) for side in _SIDES},
        "problem": msgspec.structs.asdict(problem),
        "pairs": num_pairs,
        "load": load_average(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object as the last line; returns the exit status."""
    default = Problem()
    parser = new_parser("logprob", __doc__)
    parser.add_argument("--tokens", type=int, default=default.num_tokens, metavar="N", help="(%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=default.vocabulary, metavar="N", help="(%(default)s)")
    parser.add_argument("--hidden", type=int, default=default.hidden, metavar="N", help="(%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=default.chunk_tokens, metavar="N", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=default.num_threads, metavar="N", help="(%(default)s)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--side", choices=_SIDES, help="only serve one side")
    parser.add_argument("--problem", help="of that side, as JSON")
    options = parser.parse_args(arguments)
    if options.side is not None:
        return _serve_side(options.side, msgspec.json.decode(options.problem, type=Problem))
    problem = Problem(options.tokens, options.vocabulary, options.hidden, options.chunk_tokens, options.threads)
    return finish(lambda: measure(problem, max(1, options.pairs)))


if __name__ == "__main__":
    sys.exit(main())
