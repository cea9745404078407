"""The trainer of a consumer rank, from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from zbgrpo.algorithms.packing import PackingRules
from zbgrpo.checkpoint.model_folder import load_model, open_model
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.common import device_of, dtype_of
from zbgrpo.engine.rank import Rank
from zbgrpo.trainer.base import TrainerBackend
from zbgrpo.trainer.layout import Layout, check_tensor_parallel
from zbgrpo.trainer.pipeline import check_pipeline_parallel
from zbgrpo.trainer.schedule import schedule_steps
from zbgrpo.trainer.torch_backend import TorchTrainer


def build_trainer(
    rank: Rank,
    group: dist.ProcessGroup | None,
    mesh: Any,
    num_schedule_rows: int,
    wait: Callable[[], AbstractContextManager[Any]],
) -> TrainerBackend:
    """The trainer of this rank, with the weights of the configured model. `group` has all consumers, `mesh` is theirs;
    `wait()` is entered while other ranks are waited for."""
    config, layout = rank.config, Layout.of(mesh)
    common: dict[str, Any] = {
        "rules": PackingRules(
            config.trainer.train_microbatch_size, config.ledger.max_token_lag, bool(config.algorithm.mask_truncated)
        ),
        "num_schedule_steps": schedule_steps(config.data.num_episodes, num_schedule_rows, config.groups_per_step),
        "group": group,
        "wait": wait,
        "layout": layout,
    }
    if config.trainer.backend == "colossalai":
        return _colossalai_trainer(config, layout, common)
    device, dtype = device_of(rank), dtype_of(config)
    # What a zero stage spreads are the float32 master weights; the weights that it gathers are made of them.
    sharded = config.trainer.zero_stage > 0 and layout.mesh.dp > 1
    spread = sharded or layout.mesh.tp > 1 or layout.mesh.pp > 1
    load = open_model if spread else _load_whole  # what is spread is read piece by piece
    model, files = load(config.model.path, torch.float32 if sharded else dtype, device)
    if layout.mesh.tp > 1:
        check_tensor_parallel(model, layout.mesh.tp, config.model.path)
    if layout.mesh.pp > 1:
        check_pipeline_parallel(model, layout.mesh.pp, config.model.path)
    reference = None
    if config.algorithm.kl_coeff:
        reference = load(config.model.path, dtype, device)[0].eval().requires_grad_(False)
    return TorchTrainer(model, reference, config.trainer, config.algorithm, device=device, files=files, **common)


def _colossalai_trainer(config: RunConfig, layout: Layout, common: dict[str, Any]) -> TrainerBackend:
    from zbgrpo.trainer.colossalai_backend import ColossalaiTrainer
    from zbgrpo.trainer.colossalai_model import check_model, check_settings

    check_settings(config.trainer, layout.mesh)
    path, dtype, host = config.model.path, dtype_of(config), torch.device("cpu")
    model = load_model(path, dtype, host)  # whole: ColossalAI spreads it itself
    check_model(model, layout.mesh, path)
    reference = None
    if config.algorithm.kl_coeff:
        reference = load_model(path, dtype, host).eval().requires_grad_(False)
    return ColossalaiTrainer(model, reference, config.trainer, config.algorithm, **common)


def _load_whole(path: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, None]:
    return load_model(path, dtype, device), None
