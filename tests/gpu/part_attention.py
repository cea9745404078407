"""The ways in which the trainer computes attention of packed rows, each against the definition in float64 on the CPU.

Those that this machine does not have are null, with the reason. Times are of forward and backward of one layer.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Optional

import numpy as np
import torch
from report import Report, part_options
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zbgrpo.algorithms.packing import Microbatch, PackingRules, pack
from zbgrpo.errors import ConfigError
from zbgrpo.trainer.attention import _Blocks, _Groups, _Sequences, _Shape, choose_kernel
from zbgrpo.types import FinishReason, GroupPayload

# Heads, key heads, size of a head; prompt and response lengths of each row.
_SHAPES = {
    "135m": (9, 3, 64, [(37, [250, 130, 199]), (80, [61, 300, 255, 17])]),
    "tiny": (4, 2, 12, [(5, [9, 4]), (3, [2, 7, 1])]),
}
_LIMITS = {torch.float32: 5e-5, torch.bfloat16: 3e-2}
_LIMIT_FLEX_FLOAT32 = 2e-3
"""Its kernel may multiply float32 as TF32, which has 11 bits."""
_NUM_TIMES = 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def microbatch(rows: list[tuple[int, list[int]]]) -> Microbatch:
    """One row per prompt."""
    groups = []
    for prompt, lengths in rows:
        num, total = len(lengths), sum(lengths)
        groups.append(
            GroupPayload(
                prompt_ids=np.ones(prompt, np.int32), response_ids=np.ones(total, np.int32),
                logprobs=np.full(total, -4.0, np.float32), lengths=np.array(lengths, np.int32),
                rewards=np.arange(num, dtype=np.float32), format_acc=np.ones(num, np.float32),
                ans_acc=np.ones(num, np.float32), finish=np.full(num, FinishReason.END_TOKEN, np.int32),
                spans=np.array([[n, 0, 0] for n in range(num)], np.int32),
            )
        )  # fmt: skip
    (batch,) = pack(groups, 0, PackingRules(100, 8, False))
    return batch


def masked(batch: Microbatch, dtype: torch.dtype, sharing: int) -> Attend:
    """All positions with all, under a mask; [B, heads, N, d] to [B, N, heads, d]."""
    mask = batch.attention_mask(dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    return attend


def make_attend(kind: str, batch: Microbatch, dtype: torch.dtype, sharing: int) -> Attend:
    """Attention of one kind over this microbatch, which is on its device."""
    device = batch.input_ids.device
    rows: Any
    if kind == "masked":
        return masked(batch, dtype, sharing)
    if kind == "grouped":
        rows = _Groups(_Shape.of(batch), device, dtype)
    elif kind == "flash":
        rows = _Sequences(_Shape.of(batch), device)
    else:
        rows = _Blocks(batch)
    return lambda query, key, value: rows.attend(query, key, value, None)


def why_not(kind: str, device: torch.device, dtype: torch.dtype) -> Optional[str]:
    """What is in the way of a kind here; None if nothing is."""
    if kind in ("masked", "grouped"):
        return None
    try:
        choose_kernel(kind, device, dtype)
    except ConfigError as error:
        return str(error)
    if kind == "flex":
        # It is compiled here, by Triton and a C compiler.
        if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
            return "there is no C compiler, without which Triton compiles nothing"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "the package triton is not installed"
    return None


def heads(shape: tuple[int, int, int, Any], batch: Microbatch) -> tuple[Tensor, ...]:
    """Query, key, value, and the gradient of the output; float64, on the CPU."""
    num_heads, kv_heads, size, _ = shape
    generator = torch.Generator().manual_seed(5)
    num_rows, length = batch.input_ids.shape
    sizes = [(num_heads, length), (kv_heads, length), (kv_heads, length), (length, num_heads)]
    return tuple(torch.randn(num_rows, *pair, size, generator=generator, dtype=torch.float64) for pair in sizes)


def run_once(attend: Attend, tensors: list[Tensor], real: Tensor) -> list[Tensor]:
    """Output and gradients. Padding (not `real`) takes no part."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    out = attend(query, key, value)
    out.backward(tensors[3] * real[:, :, None, None])
    found = [out * real[:, :, None, None], query.grad, key.grad, value.grad]
    return [tensor.detach().double().cpu() for tensor in found if tensor is not None]


def milliseconds(attend: Attend, tensors: list[Tensor], real: Tensor) -> float:
    """Median time of forward and backward."""
    times = []
    for _ in range(_NUM_TIMES):
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors[:3])
        torch.cuda.synchronize()
        start = time.monotonic()
        attend(query, key, value).backward(tensors[3])
        torch.cuda.synchronize()
        times.append(time.monotonic() - start)
    return 1e3 * median(times)


def check_dtype(report: Report, options: Any, dtype: torch.dtype) -> None:
    shape, device = _SHAPES[options.size], torch.device(options.device)
    on_host = microbatch(shape[3])
    batch, sharing = on_host.to(device), shape[0] // shape[1]
    rounded = [tensor.to(dtype) for tensor in heads(shape, on_host)]
    real = on_host.segments >= 0
    expected = run_once(masked(on_host, torch.float64, sharing), [x.double() for x in rounded], real)
    moved = [x.to(device) for x in rounded]
    for kind in ("masked", "grouped", "flash", "flex"):
        name = f"attention.{str(dtype).removeprefix('torch.')}.{kind}"
        reason = why_not(kind, device, dtype)
        if reason is not None:
            report.missing(f"{name}.ms", reason)
            continue
        try:
            attend = make_attend(kind, batch, dtype, sharing)
            found = run_once(attend, moved, real.to(device))
        except Exception as error:  # the other kinds are still to be looked at
            report.check(name, False, reason=f"{type(error).__name__}: {str(error)[:400]}")
            continue
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
        limit = _LIMIT_FLEX_FLOAT32 if kind == "flex" and dtype == torch.float32 else _LIMITS[dtype]
        report.within(name, max(errors), limit)
        if device.type == "cuda":
            report.figure(f"{name}.ms", milliseconds(attend, moved, real.to(device)))
        else:
            report.missing(f"{name}.ms", "timed on a GPU only")


def main() -> int:
    options = part_options(__doc__).parse_args()
    report = Report()
    for dtype in _LIMITS:
        check_dtype(report, options, dtype)
    report.write(options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
