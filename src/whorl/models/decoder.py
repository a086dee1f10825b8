"""The small decoder of the quickstart recipe, tuned as a whole.

    x   = rms(embedding[ids] + n-gram embedding[ids])              [B, T, d_model]
    x  += attention(rms(x));  x += mlp(rms(x))                     n_layers times
    logits = rms(x) head^T                                         [B, T, vocab]

`prepare` does the look-ups (sparse gradients, no products) and is never compiled. `trunk` does the products, and
`torch.compile` sees only it. The objective computes logits in chunks; `logits` serves the sampler.

Context extension: with `trained_length`, longer rows use YaRN tables (Peng et al. 2023, arXiv:2309.00071;
`nn/positions/rotary.py`) for up to `YARN_FACTOR` times that length. Slow waves are slowed down, because their angles would
leave the trained range; scores are sharpened, because a softmax over more keys is flatter. The tables depend on the
capacity of a row and not on its current length, since the cache holds rotated keys. Training never uses them.

Decoding: `state = decoder.new_state(batch, capacity)`, then `forward(ids, state=state)` with any number of ids at a time.
The state also holds the past ids and keys that n-grams and smeared keys read, so the logits equal those of one forward
over the whole text (tested).

The interface is described in `language_model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.activation_checkpointing import checkpointed
from whorl.models.language_model import LanguageModel, check_ids, saved_bytes
from whorl.nn import MLP, Attention, LayerState, NGramEmbedding, RMSNorm, Rotary
from whorl.nn.mixer import check_state
from whorl.nn.mlp import GATED, Activation
from whorl.nn.positions.rotary import RopeScaling

YARN_FACTOR = 4.0  # longest row as a multiple of the trained length


class DecoderConfig(BaseModel):
    """The shape of a `Decoder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(ge=2)
    d_model: int = Field(ge=8)
    n_layers: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(default=64, ge=2)
    mlp: Activation = "relu2"
    mlp_hidden: int = Field(ge=8)
    rope_base: float = Field(default=10_000.0, gt=1)
    smear_keys: bool = True
    tie_embeddings: bool = False
    ngram_orders: tuple[int, ...] = (2, 3)
    ngram_buckets: int = Field(default=65_536, ge=1)
    trained_length: int | None = Field(
        default=None,
        ge=2,
        description="positions per row in training; longer rows use YaRN",
    )

    @model_validator(mode="after")
    def _validate(self) -> DecoderConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even: rotary embedding rotates pairs of features"
            )
        return self


@dataclass
class DecoderState:
    """Decoding state: one `LayerState` per layer, and the last ids for the n-grams."""

    layers: list[LayerState]
    last_ids: Tensor  # [B, reach], -1 where there were none
    capacity: int

    @property
    def length(self) -> int:
        """Return the number of filled positions."""
        return self.layers[0].length

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all layers at full capacity and of the ids."""
        return (
            sum(t.nbytes for layer in self.layers for t in (layer.k, layer.v, layer.last_key))
            + self.last_ids.nbytes
        )


class DecoderBlock(nn.Module):
    """The pre-norm residual block: x + attention(rms(x)), then x + mlp(rms(x))."""

    def __init__(self, config: DecoderConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            smear_keys=config.smear_keys,
            generator=generator,
        )
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = MLP(config.d_model, config.mlp_hidden, config.mlp, generator)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], segments: Tensor | None, state: LayerState | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, segments, state)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(LanguageModel):
    """A decoder-only transformer (see the top of this file).

    Args:
        config: its shape.
        generator: draws the initial weights; the same seed gives the same network.
        dtype: type of the activations; weights stay fp32.
    """

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        # Embeddings are normalized after the look-up, so this scale only sets how far a gradient step rotates them.
        self.embedding = nn.Parameter(
            torch.randn(config.vocab_size, config.d_model, generator=generator) * 0.7
        )
        self.memory = (
            NGramEmbedding(config.ngram_orders, config.ngram_buckets, config.d_model)
            if config.ngram_orders
            else None
        )
        self.rotary = self.yarn_rotary = Rotary(config.head_dim, config.rope_base, dtype)
        if config.trained_length is not None:
            yarn = RopeScaling("yarn", YARN_FACTOR, config.trained_length, low=0.5, high=4.0)
            self.yarn_rotary = Rotary(config.head_dim, config.rope_base, dtype, yarn)
        self.embedding_norm = RMSNorm(config.d_model)
        self.blocks = nn.ModuleList([DecoderBlock(config, generator) for _ in range(config.n_layers)])
        self.final_norm = RMSNorm(config.d_model)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Parameter(torch.randn(config.vocab_size, config.d_model, generator=generator) * 0.02)
        )

    def embed(self, ids: Tensor, segments: Tensor | None = None, state: DecoderState | None = None) -> Tensor:
        """Embed ids [B, T] -> [B, T, d_model] in the compute type."""
        x = F.embedding(ids, self.embedding)
        if self.memory is not None:
            prefix_ids = None if state is None else state.last_ids
            x = x + self.memory(ids, segments, prefix_ids)
            if state is not None:
                reach = state.last_ids.shape[1]
                state.last_ids = torch.cat([state.last_ids, ids], dim=1)[:, -reach:]
        return x

    @property
    def eval_window(self) -> int:
        """Return the longest row that the rotary tables are made for."""
        trained = self.config.trained_length
        return super().eval_window if trained is None else int(YARN_FACTOR * trained)

    @property
    def default_context(self) -> int | None:
        """Return `eval_window`, if the trained length is stored."""
        return None if self.config.trained_length is None else self.eval_window

    @property
    def ngram_context(self) -> int:
        """Return the number of ids before a position that its n-grams read."""
        return max(self.config.ngram_orders, default=1) - 1

    def prepare_joined(
        self, ids: Tensor, positions: Tensor, previous_ids: Tensor | None, capacity: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Look up joined rows; with n-grams, each position is a separate row after the ids before it."""
        where = self.rotary_for(capacity).tables_at(positions[None])
        if previous_ids is None:
            return self.embed(ids[None]), where
        state = DecoderState([], previous_ids, capacity)
        return self.embed(ids[:, None], None, state).transpose(0, 1), where

    def rotary_for(self, capacity: int) -> Rotary:
        """Return the rotary tables for rows of `capacity` positions."""
        trained = self.config.trained_length
        return self.rotary if trained is None or capacity <= trained else self.yarn_rotary

    def prepare(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: DecoderState | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Look up ids [B, T] -> (embedded [B, T, d_model], rotary tables of their positions)."""
        check_ids(ids, self.config.vocab_size, segments)
        if state is not None:
            if segments is not None:
                raise ConfigError(
                    "segments are given together with a state",
                    expected="one document per row while decoding",
                )
            check_state(ids.shape[0], ids.shape[1], len(state.last_ids), state.length, state.capacity)
        if positions is None:
            start = 0 if state is None else state.length
            capacity = (self.context_hint or ids.shape[1]) if state is None else state.capacity
            rotary = self.rotary_for(capacity).tables_between(start, start + ids.shape[1], ids.device)
        else:
            rotary = self.rotary_for(self.context_hint or 0).tables_at(positions)
        return self.embed(ids, segments, state), rotary

    def trunk(
        self,
        x: Tensor,
        positions: tuple[Tensor, Tensor],
        segments: Tensor | None = None,
        state: DecoderState | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """Compute normalized hidden states [B, T, d_model] in the compute type from embeddings and rotary tables."""
        x = self.embedding_norm(x).to(self.dtype)
        n_checkpointed = self.n_checkpointed(state)
        for number, block in enumerate(self.blocks):
            rest = positions, segments, None if state is None else state.layers[number]
            x = checkpointed(block, x, *rest) if number < n_checkpointed else block(x, *rest)
        return cast(Tensor, self.final_norm(x))

    def new_state(self, batch: int, capacity: int) -> DecoderState:
        """Return an empty state for `batch` rows of up to `capacity` positions."""
        c, device = self.config, self.embedding.device
        shape = (batch, c.n_kv_heads, capacity, c.head_dim)
        layers = [
            LayerState(
                k=torch.empty(shape, dtype=self.dtype, device=device),
                v=torch.empty(shape, dtype=self.dtype, device=device),
                last_key=torch.zeros(batch, 1, c.n_kv_heads, c.head_dim, dtype=self.dtype, device=device),
            )
            for _ in range(c.n_layers)
        ]
        reach = max(c.ngram_orders, default=2) - 1
        return DecoderState(
            layers, torch.full((batch, reach), -1, dtype=torch.int64, device=device), capacity
        )

    def params(self) -> dict[str, int]:
        """Count parameters: total; active (n-gram tables count only the rows that a token reads); embedding (token embedding
        and head); ngram (n-gram tables); matmul (the rest).
        """
        total = sum(p.numel() for p in self.parameters())
        embedding = self.embedding.numel() + (0 if self.head is None else self.head.numel())
        memory = 0 if self.memory is None else sum(p.numel() for p in self.memory.parameters())
        return {
            "total": total,
            "active": total - memory + len(self.config.ngram_orders) * self.config.d_model,
            "embedding": embedding,
            "ngram": memory,
            "matmul": total - embedding - memory,
        }

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of the matrix products of one training token: forward + backward."""
        return flops_per_token(self.config, length)

    def kv_bytes_per_token(self) -> int:
        """Return the bytes that the state grows by with each token of a sequence."""
        c = self.config
        return 2 * c.n_layers * c.n_kv_heads * c.head_dim * torch.finfo(self.dtype).bits // 8

    def activation_bytes(self, batch: int, length: int, device: str | None = None) -> int:
        """Return the bytes that the forward keeps for the backward, without logits and loss.

        Measured on the model's own device: what autograd saves for two rows minus what it saves for one.
        """

        def saved(rows: int) -> int:
            ids = torch.zeros(rows, length, dtype=torch.int64, device=self.embedding.device)
            return saved_bytes(lambda: self(ids), self.parameters())

        return batch * (saved(2) - saved(1))


def matrix_params(c: DecoderConfig) -> int:
    """Count the weights that every token is multiplied with: the head included, look-up tables excluded."""
    attention = c.d_model * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    mlp = c.d_model * c.mlp_hidden * (3 if c.mlp in GATED else 2)
    return c.n_layers * (attention + mlp) + c.vocab_size * c.d_model


def flops_per_token(c: DecoderConfig, length: int) -> float:
    """Return 6 x matrix weights + 12 x layers x width x length / 2 for causal attention.

    Kaplan et al. 2020, arXiv:2001.08361, table 1, with the backward counted as twice the forward. Under a causal mask a
    token attends to half of the row on average.
    """
    return 6.0 * matrix_params(c) + 6.0 * c.n_layers * c.n_heads * c.head_dim * length
