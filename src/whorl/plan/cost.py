"""Training cost of a model shape: parameters, FLOPs, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whorl.models import Transformer, TransformerConfig, make_model, whorl_decoder
from whorl.nn.compiler import meta_device

PROCESS_OVERHEAD_BYTES = 800e6  # measured: a training process with compiled graphs, allocator and loader


def decoder_config(d_model: int, n_layers: int, vocab_size: int, **fields: Any) -> TransformerConfig:
    """Return a `whorl_decoder` of a width and a depth: heads of 64 (32 where 64 does not divide), MLP width 4 d_model.

    fields: further arguments of `whorl_decoder`.
    """
    head_dim = 64 if d_model % 64 == 0 else 32
    heads = d_model // head_dim
    sizes = {"n_heads": heads, "n_kv_heads": heads, "head_dim": head_dim, "mlp_hidden": 4 * d_model}
    return whorl_decoder(vocab_size, d_model, n_layers, **{**sizes, **fields})


@dataclass(frozen=True)
class TrainingCost:
    """Training cost of a shape.

    Attributes:
        block_params: weights of the layers that a token uses.
        head_params: weights of the output matrix.
        lookup_params: weights that are looked up.
        total_params: all weights, unused experts included.
        token_flops: per token, forward + backward.
        peak_memory_bytes: of training.
        activation_bytes: part of them that the forward keeps for the backward; `pretrain.run.activation_budget` and
            `pretrain.train.micro_batch_size` lower it.
    """

    block_params: int
    head_params: int
    lookup_params: int
    total_params: int
    token_flops: float
    peak_memory_bytes: float
    activation_bytes: float

    @property
    def matmul_params(self) -> int:
        """Return the number of weights that a token is multiplied with."""
        return self.block_params + self.head_params


def training_cost(c: TransformerConfig, *, batch_size: int, seq_len: int, replicas: int) -> TrainingCost:
    """Return the cost of a shape in steps of `batch_size` rows over all replicas.

    Dense weights have an fp32 copy, a gradient per replica and two moments. N-gram tables count weights only, since their
    optimizer state is one number per row.
    """
    model = _network(c)
    sizes, head, tokens = model.params(), c.vocab_size * c.d_model, batch_size * seq_len
    kept = model.activation_bytes(batch_size, seq_len, device="cpu")
    weights = 4.0 * ((sizes["total"] - sizes["ngram"]) * (3 + replicas) + sizes["ngram"])
    return TrainingCost(
        block_params=model.matrix_params() - head,
        head_params=head,
        lookup_params=sizes["embedding"] - head + sizes["ngram"],
        total_params=sizes["total"],
        token_flops=model.flops_per_token(seq_len),
        peak_memory_bytes=weights + kept + 8.0 * tokens * c.d_model + PROCESS_OVERHEAD_BYTES * replicas,
        activation_bytes=kept,
    )


def _network(c: TransformerConfig) -> Transformer:
    """Return an untrained network, without memory where formulas give its cost; custom mixers are measured."""
    if c.has_custom_mixers:
        return make_model(c)
    with meta_device():
        return make_model(c)
