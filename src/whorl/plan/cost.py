"""Training cost of a model shape: parameters, FLOPs, memory."""

from __future__ import annotations

from dataclasses import dataclass

from whorl.models import DecoderConfig, ModelConfig, make_model
from whorl.models.decoder import flops_per_token, matrix_params

PROCESS_OVERHEAD_BYTES = 800e6  # measured: a training process with compiled graphs, allocator and loader


def decoder_config(
    d_model: int,
    n_layers: int,
    vocab_size: int,
    *,
    ngram_buckets: int = 65_536,
    ngram_orders: tuple[int, ...] = (2, 3),
) -> DecoderConfig:
    """Return a `Decoder` shape of a width and a depth: heads of 64 (32 where 64 does not divide), MLP width 4 d_model."""
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


def lookup_params(c: DecoderConfig) -> int:
    """Count the weights that are looked up: n-gram tables and, unless tied, the token embedding."""
    tables = len(c.ngram_orders) * c.ngram_buckets * c.d_model
    return tables + (0 if c.tie_embeddings else c.vocab_size * c.d_model)


def decoder_memory_bytes(c: DecoderConfig, *, tokens: int, seq_len: int, replicas: int) -> float:
    """Return the peak memory of training in bytes, all replicas together, with `tokens` per step.

    Dense weights have an fp32 copy, a gradient per replica and two moments. Tables count weights only, since their
    optimizer state is one number per row. Activations in the compute type count as fp32.
    """
    dense = matrix_params(c) + c.vocab_size * c.d_model
    weights = 4.0 * (dense * (3 + replicas) + lookup_params(c))
    activations = decoder_activation_bytes(c, tokens=tokens, seq_len=seq_len)
    return weights + activations + 8.0 * tokens * c.vocab_size + PROCESS_OVERHEAD_BYTES * replicas


def decoder_activation_bytes(c: DecoderConfig, *, tokens: int, seq_len: int) -> float:
    """Return the bytes that the forwards of a step keep for the backward, without logits, counted as fp32."""
    per_token = 14 * c.d_model + 2 * c.mlp_hidden + 2 * c.n_heads * seq_len
    return 4.0 * tokens * c.n_layers * per_token


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
        activation_bytes: part of them that the forward keeps for the backward; `pretrain.activation_budget` and
            `pretrain.micro_batch_size` lower it.
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


def training_cost(c: ModelConfig, *, batch_size: int, seq_len: int, replicas: int) -> TrainingCost:
    """Return the cost of a shape in steps of `batch_size` rows over all replicas; a `Transformer` is built to profile it."""
    head = c.vocab_size * c.d_model
    if isinstance(c, DecoderConfig):
        memory = decoder_memory_bytes(c, tokens=batch_size * seq_len, seq_len=seq_len, replicas=replicas)
        blocks = matrix_params(c) - head
        total = matrix_params(c) + lookup_params(c)
        kept = decoder_activation_bytes(c, tokens=batch_size * seq_len, seq_len=seq_len)
        return TrainingCost(blocks, head, lookup_params(c), total, flops_per_token(c, seq_len), memory, kept)
    model = make_model(c)
    sizes = model.params()
    tables = 0 if c.tie_embeddings else sizes["embedding"] - head
    kept = model.activation_bytes(batch_size, seq_len)
    memory = 4.0 * (sizes["total"] * (3 + replicas)) + kept
    memory += 8.0 * batch_size * seq_len * c.d_model + PROCESS_OVERHEAD_BYTES * replicas
    blocks = sizes["active"] - head - tables
    return TrainingCost(blocks, head, tables, sizes["total"], model.flops_per_token(seq_len), memory, kept)
