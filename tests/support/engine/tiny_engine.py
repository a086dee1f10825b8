"""An engine of a very small model, equal in every process."""

from __future__ import annotations

import torch

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.models import Decoder, DecoderConfig

VOCAB = 50


def make(role: str) -> Engine:
    config = DecoderConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, mlp_hidden=40, ngram_buckets=64
    )  # fmt: skip
    model = Decoder(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.15)
    sizes = EngineConfig(
        block_size=8, max_num_seqs=8, max_model_len=4096, kv_cache_tokens=16384, max_num_batched_tokens=64
    )
    return Engine(model.eval(), sizes)


def other_weights(role: str) -> Engine:
    """Return an engine whose weights differ between the prefill and decode processes."""
    engine = make(role)
    if role == "prefill":
        with torch.no_grad():
            next(engine.model.parameters()).mul_(1.01)
    return engine


def broken(role: str) -> Engine:
    raise RuntimeError("no model here")
