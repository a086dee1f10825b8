"""What a shape costs before anything is built: parameters, FLOPs, memory."""

from __future__ import annotations

from whorl.models import DecoderConfig
from whorl.models.decoder import matrix_params

PROCESS_BYTES = (
    800e6  # a training process with compiled graphs and what its allocator keeps, and its loader, seen here
)


def shape(
    d_model: int,
    n_layers: int,
    vocab_size: int,
    *,
    ngram_buckets: int = 65_536,
    ngram_orders: tuple[int, ...] = (2, 3),
) -> DecoderConfig:
    """The house's decoder of a width and a depth: heads of 64 (32 where 64 does not divide), MLP four times as wide."""
    head_dim = 64 if d_model % 64 == 0 else 32
    n_heads = d_model // head_dim
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        mlp_hidden=4 * d_model,
        ngram_orders=ngram_orders,
        ngram_buckets=ngram_buckets,
    )


def table_params(c: DecoderConfig) -> int:
    """Weights that are looked up: n-gram tables and, unless tied, the token embedding."""
    tables = len(c.ngram_orders) * c.ngram_buckets * c.d_model
    return tables + (0 if c.tie_embeddings else c.vocab_size * c.d_model)


def memory_bytes(c: DecoderConfig, *, tokens: int, length: int, replicas: int) -> float:
    """Peak memory of training, all replicas together; `tokens` a step.

    fp32 weights, gradients of each replica and two moments for what is dense; weights alone for tables (their state is
    one number a row); activations in the compute type, taken as fp32.
    """
    dense = matrix_params(c) + c.vocab_size * c.d_model
    weights = 4.0 * (dense * (3 + replicas) + table_params(c))
    per_token = c.n_layers * (14 * c.d_model + 2 * c.mlp_hidden + 2 * c.n_heads * length) + 2 * c.vocab_size
    return weights + 4.0 * tokens * per_token + PROCESS_BYTES * replicas
