"""An engine of a very small model, equal in every process."""

from __future__ import annotations

import torch

from tests.support.engine.parity import config, decoder
from whorl.engine.engine import Engine


def make(role: str) -> Engine:
    sizes = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Engine(decoder(), config(**sizes, max_model_len=4096, kv_cache_tokens=16384))


def other_weights(role: str) -> Engine:
    """Return an engine whose weights differ between the prefill and decode processes."""
    engine = make(role)
    if role == "prefill":
        with torch.no_grad():
            next(engine.model.parameters()).mul_(1.01)
    return engine


def broken(role: str) -> Engine:
    raise RuntimeError("no model here")
