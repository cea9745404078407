"""ColossalAI 0.5.0 as this project uses it: the one place that imports it, and the repairs that it needs.

Its requirements say torch<=2.5.1, and its tests ran on CUDA only. Each repair below has its reason and is applied only
where that reason holds: with a later torch, or without an accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbgrpo.errors import ConfigError


class Library(NamedTuple):
    """What is used of ColossalAI."""

    Booster: Any
    HybridParallelPlugin: Any
    LowLevelZeroPlugin: Any
    HybridParallelModule: Any
    LowLevelZeroOptimizer: Any
    clear_layout_converter: Any
    is_distributed_tensor: Any
    get_sharding_spec: Any


@functools.lru_cache(maxsize=1)
def library() -> Library:
    """Import ColossalAI and repair it, once. Raises `ConfigError` where it is missing."""
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")  # about optional kernels that nothing here uses
        try:
            from colossalai.accelerator import get_accelerator
            from colossalai.booster import Booster
            from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
            from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule
            from colossalai.logging import get_dist_logger
            from colossalai.pipeline import p2p
            from colossalai.tensor.d_tensor import get_sharding_spec, is_distributed_tensor
            from colossalai.tensor.d_tensor.api import clear_layout_converter
            from colossalai.zero.low_level import LowLevelZeroOptimizer
        except ImportError as error:
            raise ConfigError(
                f"--trainer colossalai: {error}; `bash launch/install.sh colossalai` makes an environment for it, and "
                "--consumer-python names its interpreter"
            ) from error
    get_dist_logger().set_level("ERROR")  # its logger writes to the terminal, which is that of the run
    for old in ("broadcast_buffers", r"torch\.distributed\.\w+_tensor", r"isinstance\(treespec, LeafSpec\)"):
        warnings.filterwarnings("ignore", f"`{old}` is deprecated", FutureWarning)  # what it calls still works
    accelerator = get_accelerator()
    _repair_pipeline(p2p, accelerator)
    if accelerator.name == "cpu":
        _repair_random_numbers(type(accelerator))
        _repair_zero(type(accelerator), LowLevelZeroOptimizer)
    return Library(
        Booster,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        HybridParallelModule,
        LowLevelZeroOptimizer,
        clear_layout_converter,
        is_distributed_tensor,
        get_sharding_spec,
    )


# ------------------------------------------------------------------------------------------------ repairs


def _repair_pipeline(p2p: Any, accelerator: Any) -> None:
    """Between stages it asks `torch.distributed.is_hccl_available`, which only torch for Ascend has, and takes a group
    with two backends (cpu:gloo,cuda:nccl) for one without NCCL, so that a GPU would receive into host memory. What it
    wants to know is the device that activations live on."""
    if hasattr(dist, "is_hccl_available"):
        return
    device = accelerator.get_current_device()
    p2p._check_device = lambda group: (device, device.type != "cpu")


def _repair_random_numbers(accelerator: Any) -> None:
    """Tensor-parallel layers fork the device's random numbers. On a CPU, `get_rng_state` hands torch an argument that
    it does not take, and `manual_seed` is not supported; the CPU's generator is torch's own."""
    accelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
    accelerator.manual_seed = lambda self, seed: torch.manual_seed(seed)


def _repair_zero(accelerator: Any, optimizer: Any) -> None:
    """ZeRO refuses to run without an accelerator, and asks for streams even where it overlaps nothing. On a CPU every
    operation is done when its call returns, so that one stream that does nothing is right."""

    def all_of_one_dtype(self: Any) -> None:
        for group in self.optim.param_groups:
            assert all(parameter.dtype == self.dtype for parameter in group["params"])

    optimizer._sanity_checks = all_of_one_dtype
    accelerator.Stream = lambda self, device=None, priority=0, **settings: None
    accelerator.current_stream = lambda self, device=None: None
    accelerator.stream = lambda self, stream: contextlib.nullcontext()


@contextmanager
def as_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, `group` is the default group: ColossalAI takes the whole world for its own, makes groups of it and waits
    for it, and the producers know nothing of that.

    Ranks mean the same inside and outside, for the consumers are the lowest ranks of the world. Only what asks for the
    default group is affected: other threads that use groups by name, as the weights' broadcasts do, are not. Groups of
    the whole world are to be made before: their names are counted, and from here on consumers count on.
    """
    from torch.distributed import distributed_c10d as c10d

    world = c10d._get_default_group()
    if group is world:
        yield
        return
    assert dist.get_process_group_ranks(group) == list(range(group.size())), "consumers are the lowest ranks"
    c10d._update_default_pg(group)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        c10d._update_default_pg(world)  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices that packages log while they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
