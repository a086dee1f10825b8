"""What a shape costs before anything is built: parameters, FLOPs, memory."""

from __future__ import annotations

from dataclasses import dataclass

from whorl.models import DecoderConfig, ModelConfig, make_model
from whorl.models.decoder import flops_per_token, matrix_params

PROCESS_OVERHEAD_BYTES = (
    800e6  # a training process with compiled graphs and what its allocator keeps, and its loader, seen here
)


def decoder_config(
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


def lookup_params(c: DecoderConfig) -> int:
    """Weights that are looked up: n-gram tables and, unless tied, the token embedding."""
    tables = len(c.ngram_orders) * c.ngram_buckets * c.d_model
    return tables + (0 if c.tie_embeddings else c.vocab_size * c.d_model)


def decoder_memory_bytes(c: DecoderConfig, *, tokens: int, seq_len: int, replicas: int) -> float:
    """Peak memory of training, all replicas together; `tokens` a step.

    fp32 weights, gradients of each replica and two moments for what is dense; weights alone for tables (their state is
    one number a row); activations in the compute type, taken as fp32.
    """
    dense = matrix_params(c) + c.vocab_size * c.d_model
    weights = 4.0 * (dense * (3 + replicas) + lookup_params(c))
    activations = decoder_activation_bytes(c, tokens=tokens, seq_len=seq_len)
    return weights + activations + 8.0 * tokens * c.vocab_size + PROCESS_OVERHEAD_BYTES * replicas


def decoder_activation_bytes(c: DecoderConfig, *, tokens: int, seq_len: int) -> float:
    """Bytes that the forwards of a step keep for their backwards, logits left out, taken as fp32."""
    per_token = 14 * c.d_model + 2 * c.mlp_hidden + 2 * c.n_heads * seq_len
    return 4.0 * tokens * c.n_layers * per_token


@dataclass(frozen=True)
class TrainingCost:
    """What a training run of a shape costs. blocks: weights of the layers that a token meets; head: of the output;
    tables: weights that are looked up; flops: a token, forward + backward; memory: bytes at most; activations: those of
    them that the forward keeps for the backward, which `pretrain.activation_budget` and `pretrain.micro_rows` lower."""

    block_params: int
    head_params: int
    lookup_params: int
    total_params: int
    token_flops: float
    peak_memory_bytes: float
    activation_bytes: float

    @property
    def matmul_params(self) -> int:
        """Weights that a token is multiplied with."""
        return self.block_params + self.head_params


def training_cost(c: ModelConfig, *, batch_size: int, seq_len: int, replicas: int) -> TrainingCost:
    """The cost of a shape in steps of `rows` rows over all replicas; a `Transformer` is built and asked."""
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
