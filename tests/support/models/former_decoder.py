"""What was written of the decoder while it was a class of its own: flat fields, parameters named `attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whorl.models import TransformerConfig
from whorl.models.transformer_config import AttentionConfig

NAMES = (
    (".mixer_norm.", ".attention_norm."),
    (".mixer.smear.share", ".attention.smear"),
    (".mixer.", ".attention."),
)
SHARED = {"vocab_size", "d_model", "n_layers", "mlp", "mlp_hidden", "tie_embeddings", "trained_length"}


def former_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of `whorl_decoder` under the former names."""
    for new, old in NAMES:
        tensors = {name.replace(new, old): t for name, t in tensors.items()}
    return dict(tensors)


def former_fields(config: TransformerConfig) -> dict[str, Any]:
    """The flat configuration of a `whorl_decoder`."""
    (heads,) = config.mixers.values()
    assert isinstance(heads, AttentionConfig) and heads.rope is not None
    return {
        **config.model_dump(include=SHARED),
        **heads.model_dump(include={"n_heads", "n_kv_heads", "head_dim"}),
        "rope_base": heads.rope.base,
        "smear_keys": heads.smear,
        "ngram_orders": [] if config.ngram is None else list(config.ngram.orders),
        "ngram_buckets": 65_536 if config.ngram is None else config.ngram.buckets,
    }
