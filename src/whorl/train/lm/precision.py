"""What a job's type of products means for the parts of training: activations, matrices, the loss, the optimiser.

    dtype       activations   blocks' products       loss           Muon's products
    float32     float32       float32                as it is       float32
    bfloat16    bfloat16      bfloat16               as it is       bfloat16
    float16     float16       float16                scaled         float32
    float8      bfloat16      E4M3, backward E5M2    as it is       bfloat16

Master weights, their gradients as they are summed, and moments are fp32 in all four; with a `rounding` the blocks' matrices
are kept in bf16 instead, whatever the products' type. Each has its file: `scaling.py`, `nn/float8.py`, `rounding.py`. Which
type is chosen: `machine/device_probe.py`. What each costs in bits per byte: `bench/train/precision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from whorl.errors import ConfigError
from whorl.train.learner.update import ParamOptim
from whorl.train.optim.stochastic_rounding import Rounding, RoundingMode


def activation_dtype(dtype: str) -> torch.dtype:
    """The type that a model of a job's `dtype` is made in."""
    found: torch.dtype = getattr(torch, "bfloat16" if dtype == "float8" else dtype)
    return found


def muon_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of Muon's products, given that of activations: in fp16 the small entries of a gradient would be zeros."""
    return torch.float32 if dtype == torch.float16 else dtype


def make_rounding(
    mode: RoundingMode | None, seed: int, param_optims: Mapping[str, ParamOptim]
) -> Rounding | None:
    """How narrow weights are rounded; None if they are fp32.

    Raises:
        ConfigError: a rounding is asked for, and there is nothing to be rounded.
    """
    if mode is None:
        return None
    if not any(t.optimizer == "muon" for t in param_optims.values()):
        raise ConfigError(
            f"rounding is {mode!r}, but no parameter is trained by Muon",
            expected="matrices of blocks under Muon: they are what can be kept in bfloat16",
            do="leave the rounding out: --set pretrain.rounding=null",
        )
    return Rounding(mode, seed)
