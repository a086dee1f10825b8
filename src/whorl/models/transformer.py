"""The configurable decoder: every published architecture that can be exchanged is a configuration of this class.

    x = embedding[ids] * embedding_scale  (+ positions[p]) (+ n-gram embedding)     [B, T, d_model]
    x = norm(x)  with embedding_norm
    n_layers times, with the mixer that `pattern` names for the layer and an MLP or a mixture of experts:
        pre-norm   x += mixer(norm(x));         x += mlp(norm(x))                   GPT-2, arXiv:2002.04745
        sandwich   x += norm(mixer(norm(x)));   x += norm(mlp(norm(x)))             Gemma 2, arXiv:2408.00118
        outer only x += norm(mixer(x));         x += norm(mlp(x))                   OLMo 2, arXiv:2501.00656
        parallel   h = norm(x);                 x += mixer(h) + mlp(h)              PaLM, arXiv:2204.02311, section 2
        post-norm  x = norm(x + mixer(x));      x = norm(x + mlp(x))                arXiv:1706.03762; no norm at the end
    logits = softcap(norm(x) head^T)                                                [B, T, vocab]

Subtle point: the embedding scale is rounded to the activation type before use, because models with a scale were trained
that way (in bf16, sqrt(3072) is 55.5).

A mixer is any module with the interface of `nn/mixer.py`; `transformer_config.py` assigns mixers to layers. The interface
of the model is in `language_model.py`, the layers in `transformer_block.py`.

`prepare` does the look-ups (n-gram tables have sparse gradients) and is never compiled. `trunk` does the products, and
`torch.compile` sees only it. Where all layers have the same rotary positions, `prepare` also looks up their tables.

Context extension: with `trained_length`, longer rows use YaRN tables (Peng et al. 2023, arXiv:2309.00071;
`nn/rotary.py`) for up to `YARN_FACTOR` times that length. Slow waves are slowed down, because their angles would
leave the trained range; scores are sharpened, because a softmax over more keys is flatter. Training never uses them.

Decoding: the state also holds the last ids, which n-grams read, so the logits equal those of one forward (tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models import transformer_cost
from whorl.models.activation_checkpointing import checkpointed
from whorl.models.language_model import LanguageModel, check_ids
from whorl.models.transformer_block import YARN_FACTOR, TransformerBlock, make_norm, make_rotaries
from whorl.models.transformer_config import TransformerConfig
from whorl.nn.attention.paged import PagedState
from whorl.nn.attention.state import KeyValues
from whorl.nn.experts import MixtureOfExperts
from whorl.nn.mixer import MixerState, check_state
from whorl.nn.ngram import NGramEmbedding
from whorl.nn.rotary import Positions, Rotary

__all__ = ["Transformer", "TransformerBlock", "TransformerConfig", "TransformerState"]


@dataclass
class TransformerState:
    """Decoding state: one state per layer, and the last ids [B, ngram_context], -1 where there were none."""

    layers: list[MixerState]
    capacity: int
    last_ids: Tensor | None = None

    @property
    def length(self) -> int:
        """Return the number of positions processed so far."""
        return self.layers[0].length

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all layers and of the ids."""
        return sum(layer.n_bytes for layer in self.layers) + (
            0 if self.last_ids is None else self.last_ids.nbytes
        )


class Transformer(LanguageModel):
    """The configurable decoder (see the top of this file).

    Args:
        config: its shape.
        generator: draws the initial weights; the same seed gives the same network.
        dtype: type of the activations; weights stay fp32.
    """

    config: TransformerConfig

    def __init__(
        self,
        config: TransformerConfig,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.logit_softcap = config, dtype, config.logit_softcap
        self.max_positions = config.max_length if config.learned_positions else None
        dropless = config.experts is None or config.experts.routing == "dropless"
        self.batch_independent = dropless and config.masked is None

        def random_table(rows: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, config.d_model, generator=generator) * std)

        # Below a norm, the scale of the embedding only sets how far a gradient step rotates it.
        self.embedding = random_table(config.vocab_size, 0.7 if config.embedding_norm else 0.02)
        self.positions = random_table(config.max_length) if config.learned_positions else None
        ngram = config.ngram
        self.memory = None if ngram is None else NGramEmbedding(ngram.orders, ngram.buckets, config.d_model)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        rotaries = make_rotaries(config, dtype)
        self.rotary: Rotary | None = None  # of all layers, where they have the same positions
        if config.shared_rope is not None:
            self.rotary = next(iter(rotaries.values()))
        self.blocks = nn.ModuleList(
            [
                TransformerBlock(config, n, rotaries[name], generator)
                for n, name in enumerate(config.layer_names())
            ]
        )
        self.final_norm = nn.Identity() if config.post_norm else make_norm(config)
        self.head = None if config.tie_embeddings else random_table(config.vocab_size)

    @property
    def eval_window(self) -> int:
        """Return the longest row that the rotary tables are made for; without a trained length, a shorter default."""
        trained = self.config.trained_length
        return min(super().eval_window, self.declared_length) if trained is None else self.declared_length

    @property
    def declared_length(self) -> int:
        """Return `max_length` (in a folder of `transformers`, max_position_embeddings), or the length of YaRN tables."""
        trained = self.config.trained_length
        return self.config.max_length if trained is None else int(YARN_FACTOR * trained)

    @property
    def ngram_context(self) -> int:
        """Return the number of ids before a position that its n-grams read."""
        return 0 if self.config.ngram is None else max(self.config.ngram.orders) - 1

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        start: int = 0,
        segments: Tensor | None = None,
        prefix_ids: Tensor | None = None,
    ) -> Tensor:
        """Embed ids [B, T] -> [B, T, d_model] in the compute type, or in fp32 below an embedding norm.

        Args:
            start: the first position if `positions` is None.
            segments: [B, T] documents, whose borders n-grams do not cross.
            prefix_ids: [B, ngram_context] ids before the row, for n-grams; None: there are none.

        Raises:
            ConfigError: learned positions, and a position is outside their table.
        """
        x = F.embedding(ids, self.embedding) if self.look_up is None else self.look_up(ids)
        if not self.config.embedding_norm:
            x = x.to(self.dtype)
        if self.config.embedding_scale != 1.0:
            x = x * torch.full((), self.config.embedding_scale, dtype=self.dtype, device=x.device)
        if self.positions is not None:
            if positions is None:
                stop = start + ids.shape[1]
                if stop > self.config.max_length:
                    raise ConfigError(
                        f"a row of {stop} positions",
                        expected=f"at most max_length = {self.config.max_length}",
                    )
                x = x + self.positions[start:stop].to(x.dtype)
            else:
                low, high = (0, 0) if positions.is_cuda else (int(p) for p in positions.aminmax())
                if low < 0 or high >= self.config.max_length:
                    raise ConfigError(
                        f"position {low if low < 0 else high}",
                        expected=f"from 0, below max_length = {self.config.max_length}",
                    )
                x = x + F.embedding(positions, self.positions).to(x.dtype)
        if self.memory is not None:
            x = x + self.memory(ids, segments, prefix_ids).to(x.dtype)
        return x

    def prepare_joined(
        self, ids: Tensor, positions: Tensor, previous_ids: Tensor | None, capacity: int
    ) -> tuple[Tensor, Positions]:
        """Look up joined rows; with n-grams, each position is a separate row after the ids before it."""
        where: Positions = positions[None]
        if self.rotary is not None:
            where = self.rotary.for_capacity(capacity).tables_at(positions[None])
        if previous_ids is None:
            return self.embed(ids[None], positions[None]), where
        x = self.embed(ids[:, None], positions[:, None], prefix_ids=previous_ids)
        return x.transpose(0, 1), where

    def prepare(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: TransformerState | None = None,
    ) -> tuple[Tensor, Positions]:
        """Look up ids [B, T] -> (embedded [B, T, d_model], rotary tables that all layers share, or positions as given).

        A packed row with learned positions needs `positions`: they restart at 0 with every document.

        Raises:
            ConfigError: ids outside the vocabulary; with a state, ids that it has no room for, or documents of n-grams.
        """
        check_ids(ids, self.config.vocab_size, segments)
        start, length = 0, ids.shape[1]
        last_ids = None if state is None else state.last_ids
        if state is not None:
            start = state.length
            if last_ids is not None:
                if segments is not None:
                    raise ConfigError(
                        "segments are given together with a state",
                        expected="one document per row while decoding: n-grams read the ids before it",
                    )
                check_state(len(ids), length, len(last_ids), start, state.capacity)
        x = self.embed(ids, positions, start, segments, last_ids)
        if state is not None and last_ids is not None:
            state.last_ids = torch.cat([last_ids, ids], dim=1)[:, -last_ids.shape[1] :]
        if self.rotary is None:
            return x, positions
        if positions is not None:
            return x, self.rotary.for_capacity(self.context_hint or 0).tables_at(positions)
        capacity = (self.context_hint or length) if state is None else state.capacity
        return x, self.rotary.for_capacity(capacity).tables_between(start, start + length, ids.device)

    def trunk(
        self,
        x: Tensor,
        positions: Positions,
        segments: Tensor | None = None,
        state: TransformerState | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """Compute normalized hidden states [B, T, d_model] in the compute type from the results of `prepare`."""
        x = self.embedding_norm(x).to(self.dtype)
        shared_kv: list[KeyValues | PagedState] = []
        n_checkpointed = self.n_checkpointed(state)
        for n, block in enumerate(self.blocks):
            rest = positions, segments, None if state is None else state.layers[n], routings, shared_kv
            x = checkpointed(block, x, *rest) if n < n_checkpointed else block(x, *rest)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def new_state(self, batch: int, capacity: int) -> TransformerState:
        """Return an empty state for `batch` rows of up to `capacity` positions."""
        state = self._state(batch, capacity, str(self.embedding.device))
        if self.ngram_context:
            state.last_ids = torch.full(
                (batch, self.ngram_context), -1, dtype=torch.int64, device=self.embedding.device
            )
        return state

    def _state(self, batch: int, capacity: int, device: str) -> TransformerState:
        return TransformerState(
            [m.new_state(batch, capacity, dtype=self.dtype, device=device) for m in self.layer_mixers()],
            capacity,
        )

    def params(self) -> dict[str, int]:
        """Count parameters: total; active (used by one token); embedding (tables of ids and positions, and the head); ngram
        (n-gram tables, of which a token uses a row each).
        """
        total = sum(p.numel() for p in self.parameters())
        tables = [self.embedding, self.positions, self.head]
        ngram = 0 if self.memory is None else sum(p.numel() for p in self.memory.parameters())
        rows = 0 if self.config.ngram is None else len(self.config.ngram.orders)
        return {
            "total": total,
            "active": total - self._inactive_expert_params() - ngram + rows * self.config.d_model,
            "embedding": sum(t.numel() for t in tables if t is not None),
            "ngram": ngram,
        }

    def matrix_params(self) -> int:
        """Count the weights that a token is multiplied with: head included, unused experts and look-ups excluded."""
        # A [n, 1] parameter (a temperature, a share) is a vector.
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.dim() > 1 and p.shape[-1] > 1)
        return matrices - self._inactive_expert_params() + self.head_weight.numel()

    def _inactive_expert_params(self) -> int:
        """Count the expert parameters that a token does not use."""
        e = self.config.experts
        mixtures = [block.mlp for block in self.blocks if isinstance(block.mlp, MixtureOfExperts)]
        params = sum(p.numel() for mlp in mixtures for p in mlp.experts.parameters())
        return 0 if e is None else params * (e.n_experts - e.top_k) // e.n_experts

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of one training token's matrix products, forward + backward, in rows of `length`."""
        return transformer_cost.flops_per_token(self.config, self.blocks, self.matrix_params(), length)

    def kv_bytes_per_token(self) -> int:
        """Return the bytes that a row's state grows by per token of capacity; fixed-size states add nothing.

        Computed from states on the meta device, so it holds for any mixer and for layers that keep only a window.
        """
        length = max(m.cache_spec().window or 0 for m in self.layer_mixers()) + 1
        return self._state(1, length + 1, "meta").n_bytes - self._state(1, length, "meta").n_bytes

    def activation_bytes(self, batch: int, length: int, device: str | None = None) -> int:
        """Return the bytes that the forward keeps for the backward, without logits, loss and rotary tables.

        device: of the run, by default the model's own; the bytes of attention depend on it.
        """
        on_cpu = (device or self.embedding.device.type).startswith("cpu")
        return transformer_cost.activation_bytes(
            self.config, self.blocks, self.dtype, batch, length, on_cpu=on_cpu
        )
