"""The compute types that follow from a job's `dtype`: activations, matrix products, loss, optimizer.

    dtype       activations   blocks' products       loss           Muon's products
    float32     float32       float32                unscaled       float32
    bfloat16    bfloat16      bfloat16               unscaled       bfloat16
    float16     float16       float16                scaled         float32
    float8      bfloat16      E4M3, backward E5M2    unscaled       bfloat16

Master weights, summed gradients and moments are fp32 in all four. With `bf16_weights` the blocks' matrices are stored
in bf16 instead. See `loss_scaler.py`, `nn/float8.py`, `stochastic_rounding.py`, and `machine/device_probe.py` for the
choice of the type. Cost in bits per byte: `bench/train/precision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from whorl.errors import ConfigError
from whorl.nn.float8 import use_float8
from whorl.train.learner.update import ParamOptim
from whorl.train.optim.stochastic_rounding import Rounding, RoundingMode


def activation_dtype(dtype: str) -> torch.dtype:
    """The dtype of activations for a job's `dtype`."""
    found: torch.dtype = getattr(torch, "bfloat16" if dtype == "float8" else dtype)
    return found


def set_products(model: nn.Module, dtype: str) -> None:
    """Let the blocks' products run in a job's `dtype`."""
    if dtype == "float8":
        use_float8(model)


def muon_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of Muon's products. fp16 would flush a gradient's small entries to zero."""
    return torch.float32 if dtype == torch.float16 else dtype


def make_rounding(
    mode: RoundingMode | None, seed: int, param_optims: Mapping[str, ParamOptim]
) -> Rounding | None:
    """Return the rounding of bf16 weights, or None for fp32 weights.

    Raises:
        ConfigError: a rounding is set, but Muon trains no parameter.
    """
    if mode is None:
        return None
    if not any(t.optimizer == "muon" for t in param_optims.values()):
        raise ConfigError(
            f"bf16_weights is {mode!r}, but no parameter is trained by Muon",
            expected="block matrices under Muon: only they can be stored in bfloat16",
            do="remove it: --set pretrain.bf16_weights=null",
        )
    return Rounding(mode, seed)
