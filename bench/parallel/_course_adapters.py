"""Adapters of Stanford CS336's assignment 2 (systems), of its versions from 2025 and 2026, to parallel/explained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whorl.parallel.explained.ddp import DDP
from whorl.parallel.explained.fsdp import FSDP
from whorl.parallel.explained.sharded_optimizer import ShardedOptimizer


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    return DDP(module, bucket_mb=0)


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    return DDP(module, bucket_size_mb)


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return FSDP(module, compute_dtype)


def on_after_backward(model: Any = None, optimizer: Any = None, *, ddp_model: Any = None) -> None:
    (ddp_model or model).finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: `finish_gradient_synchronization` has reset all."""


def fsdp_gather_full_params(fsdp_model: FSDP) -> dict[str, torch.Tensor]:
    return fsdp_model.gather_full_params()


get_ddp, get_sharded_optimizer = get_ddp_individual_parameters, ShardedOptimizer
ddp_on_after_backward = ddp_individual_parameters_on_after_backward = on_after_backward
ddp_bucketed_on_after_backward = fsdp_on_after_backward = on_after_backward
