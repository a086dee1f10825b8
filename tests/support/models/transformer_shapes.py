"""Tiny models that several rooms test: a `Transformer` of each kind of layer."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models.initialization import add_noise
from tests.support.tiny import make_decoder
from whorl.models import LanguageModel
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import (
    MIXERS,
    AttentionConfig,
    CustomMixer,
    MLAConfig,
    MoEConfig,
    Rope,
    TransformerConfig,
)

HEADS = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8)


def heads(**changes: Any) -> AttentionConfig:
    return HEADS.model_copy(update=changes)


INTERLEAVED = Rope(layout="interleaved")
LOCAL = heads(window=3, rope=Rope(base=500.0))
LATENT = MLAConfig(n_heads=4, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, v_dim=8, rope=INTERLEAVED)
EXPERTS: dict[str, Any] = {"n_experts": 4, "top_k": 2, "hidden": 24}
ROUTED = MoEConfig(**EXPERTS, shared_hidden=16, shared_gate=True, dense_layers=(0,))
GROUPED = MoEConfig(**EXPERTS, scoring="sigmoid", scale=2.5, bias_balance=True, groups=(2, 1))
OPTIONS: dict[str, Any] = {"linear": {"n_heads": 4}, "pointwise": {"n_heads": 4}, "mamba": {"d_state": 4}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt": {
        "norm": "layer", "mlp": "gelu_tanh", "mlp_bias": True, "learned_positions": True, "tie_embeddings": True,
        "mixers": {"full": heads(rope=None, bias=True, out_bias=True)},
    },
    "gemma": {
        "mixers": {"local": LOCAL.model_copy(update={"qk_norm": True}), "full": heads(qk_norm=True)}, "mlp": "geglu",
        "pattern": ("local", "local", "full"), "sandwich": True, "norm_offset": 1.0, "embedding_scale": 5.6,
    },
    "capped": {"mixers": {"full": heads(softcap=4.0, sink=True)}, "logit_softcap": 3.0},
    "alibi": {"mixers": {"full": heads(rope=None, alibi=True)}, "parallel": True},
    "sparse": {"mixers": {"far": heads(stride=3, smear=True), "near": heads(block=4)}},
    "post": {"post_norm": True, "norm": "layer", "mlp": "gelu"},
    "olmo": {"mixers": {"full": heads(qk_norm="all_heads")}, "sandwich": True, "pre_norm": False},
    "shared keys": {"mixers": {"full": heads(smear=True, qk_norm=True, window=6)}, "kv_sharing_factor": 2},
    "experts": {"experts": ROUTED},
    "latent": {"mixers": {"latent": LATENT}, "experts": GROUPED, "parallel": True},
    "mixed": {"mixers": {"fast": CustomMixer(kind="linear", options={"n_heads": 4}), "full": HEADS}},
    **{kind: {"mixers": {kind: CustomMixer(kind=kind, options=OPTIONS.get(kind, {}))}} for kind in MIXERS},
}  # fmt: skip


def config(**changes: Any) -> TransformerConfig:
    shape = {"vocab_size": 50, "d_model": 32, "n_layers": 3, "mlp_hidden": 40, "max_length": 64}
    return TransformerConfig(**{"mixers": {"full": HEADS}, **shape, **changes})


def made(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    """Return a model with noise on every weight: zeros would hide their part of the network."""
    model = Transformer(config(**changes), torch.Generator().manual_seed(0), dtype)
    return add_noise(model, 0.15, torch.Generator().manual_seed(1))


def network(kind: str, **changes: Any) -> LanguageModel:
    """Return the model of a kind: "decoder", or one of `KINDS`."""
    if kind == "decoder":
        model = make_decoder(vocab_size=50, n_layers=3, **changes)
        return add_noise(model, 0.1, torch.Generator().manual_seed(1))
    return made(**KINDS[kind], **changes)
