"""Model configurations for tests: attention heads, a mixture of experts, a tiny transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whorl.models import TransformerConfig

HEADS = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}
EXPERTS = {"n_experts": 4, "top_k": 2, "hidden": 32, "bias_balance": True, "scoring": "sigmoid"}


def shape(mixer: dict[str, Any], **more: Any) -> TransformerConfig:
    return TransformerConfig.model_validate(
        {"vocab_size": 300, "d_model": 32, "n_layers": 2, "mixers": {"m": mixer}, "mlp_hidden": 64, **more}
    )


def disturbed(model: nn.Module, scale: float) -> Any:
    """The model with noise on every parameter."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=draw) * scale)
    return model
