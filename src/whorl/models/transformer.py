"""The general decoder: every published one that the house can exchange is this file with another configuration.

    x = embedding[ids] * embedding_scale  (+ positions[p])                          [B, T, d_model]
    n_layers times, with the mixer that `pattern` names for the layer and an MLP or a mixture of experts:
        pre-norm   x += mixer(norm(x));         x += mlp(norm(x))                   GPT-2, arXiv:2002.04745
        sandwich   x += norm(mixer(norm(x)));   x += norm(mlp(norm(x)))             Gemma 2, arXiv:2408.00118
        parallel   h = norm(x);                 x += mixer(h) + mlp(h)              PaLM, arXiv:2204.02311, section 2
        post-norm  x = norm(x + mixer(x));      x = norm(x + mlp(x))                arXiv:1706.03762; no norm at the end
    logits = softcap(norm(x) head^T)                                                [B, T, vocab]

The subtle parts. (1) The scale of the embedding is rounded to the type of the activations before it is used, since the
models that have one were trained that way (in bf16, sqrt(3072) is 55.5). (2) `Decoder` (`models/decoder.py`) is not a
special case of this: it is our own small model, tuned as a whole; this one is for exchange and for putting members together.

A mixer is anything that keeps to `nn/mixer.py`; which layer has which, the configuration says (`transformer_config.py`).

What it has in common with other language models, and what may be asked of it, is in `language.py`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models import transformer_cost
from whorl.models.activation_checkpointing import checkpointed
from whorl.models.language_model import LanguageModel, check_ids
from whorl.models.transformer_config import (
    MIXERS,
    AttentionConfig,
    CustomMixer,
    MLAConfig,
    Rope,
    TransformerConfig,
)
from whorl.nn.attention.mla import MultiHeadLatentAttention
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.attention.paged import PagedState
from whorl.nn.attention.state import KeyValues
from whorl.nn.experts import MixtureOfExperts
from whorl.nn.mixer import MixerState, PooledState
from whorl.nn.mlp import MLP
from whorl.nn.norm import LayerNorm, RMSNorm
from whorl.nn.positions.rotary import Rotary

__all__ = ["Transformer", "TransformerBlock", "TransformerConfig", "TransformerState"]


@dataclass
class TransformerState:
    """What decoding keeps of the past: a state for each layer."""

    layers: list[MixerState]

    @property
    def length(self) -> int:
        """Positions taken in so far."""
        return self.layers[0].length

    @property
    def n_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.n_bytes for layer in self.layers)


def make_norm(config: TransformerConfig) -> nn.Module:
    """The model's norm over d_model."""
    if config.norm == "layer":
        return LayerNorm(config.d_model, config.norm_eps)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_offset)


def make_rotary(rope: Rope, head_dim: int, dtype: torch.dtype) -> Rotary:
    """Tables of a `Rope`, to be shared by all layers of one kind."""
    return Rotary(head_dim, rope.base, dtype, rope.scaling, rope.layout, rope.rotary_dim)


def make_mixer(
    config: TransformerConfig,
    mixer: AttentionConfig | MLAConfig | CustomMixer,
    rotary: Rotary | None,
    generator: torch.Generator | None,
    uses_shared_kv: bool = False,
) -> nn.Module:
    """One layer's mixer; `borrows`: it has no keys of its own.

    Raises:
        ConfigError: `options` of a `Member` are not what its class takes.
    """
    # The fields of both are arguments of their class, but for what depends on the whole model.
    if isinstance(mixer, AttentionConfig):
        return MultiHeadAttention(
            config.d_model,
            rotary=rotary,
            qk_norm=config.norm_eps if mixer.qk_norm else None,
            norm_offset=config.norm_offset,
            generator=generator,
            has_kv_proj=not uses_shared_kv,
            **mixer.model_dump(exclude={"kind", "rope", "qk_norm", *(("smear",) if uses_shared_kv else ())}),
        )
    if isinstance(mixer, MLAConfig):
        fields = mixer.model_dump(exclude={"kind", "rope"})
        return MultiHeadLatentAttention(config.d_model, rotary=rotary, generator=generator, **fields)
    module, _, name = MIXERS[mixer.kind].partition(":")
    cls = getattr(importlib.import_module(module), name)
    try:
        inspect.signature(cls).bind(config.d_model, **mixer.options, generator=generator)
    except TypeError as error:
        raise ConfigError(
            f"mixers: options of {mixer.kind!r} are {mixer.options}: {error}",
            expected=f"arguments of {name}{inspect.signature(cls)}",
        ) from error
    made: nn.Module = cls(config.d_model, **mixer.options, generator=generator)
    return made


class TransformerBlock(nn.Module):
    """One layer (see the top of this file).  x: [B, T, d_model] -> [B, T, d_model]."""

    def __init__(
        self, config: TransformerConfig, layer: int, rotary: Rotary | None, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.parallel, self.post_norm = config.parallel, config.post_norm
        self.provides_kv = config.kv_sharing_factor > 1 and layer % config.kv_sharing_factor == 0
        self.uses_shared_kv = layer % config.kv_sharing_factor > 0
        self.mixer_norm = make_norm(config)
        self.mixer = make_mixer(config, config.layer_mixers()[layer], rotary, generator, self.uses_shared_kv)
        self.mixer_after = make_norm(config) if config.sandwich else nn.Identity()
        self.mlp_norm = nn.Identity() if config.parallel else make_norm(config)
        self.mlp: MLP | MixtureOfExperts
        e = config.experts
        if e is not None and config.has_experts(layer):
            self.mlp = MixtureOfExperts(
                config.d_model,
                e.hidden,
                e.n_experts,
                e.top_k,
                kind=config.mlp,
                shared_hidden=e.shared_hidden,
                shared_gate=e.shared_gate,
                routing=e.routing,
                scoring=e.scoring,
                norm_topk_prob=e.norm_topk_prob,
                capacity_factor=e.capacity_factor,
                overflow=e.overflow,
                expert_dropout=e.expert_dropout,
                token_dropout=e.token_dropout,
                scale=e.scale,
                bias_balance=e.bias_balance,
                groups=e.groups,
                generator=generator,
            )
        else:
            self.mlp = MLP(config.d_model, config.mlp_hidden, config.mlp, generator, bias=config.mlp_bias)
        self.mlp_after = make_norm(config) if config.sandwich else nn.Identity()

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        state: MixerState | None,
        routings: list[Any] | None,
        shared_kv: list[KeyValues | PagedState],
    ) -> Tensor:
        """lent: keys and values of the newest layer that lends, which it puts there for those behind it."""
        h = x if self.post_norm else self.mixer_norm(x)
        more: dict[str, Any] = {"positions": positions, "segments": segments, "state": state}
        if self.provides_kv and isinstance(self.mixer, MultiHeadAttention):
            shared_kv[:] = [self.mixer.project_kv(h, **more)]
            more["state"] = None  # which has taken them in
        mixed: Tensor
        if isinstance(state, PooledState):
            mixed = state.run_mixer(self.mixer, h, positions)
        else:
            mixed = self.mixer(h, **more, **({"shared_kv": shared_kv[0]} if shared_kv else {}))
        if self.post_norm:
            x = self.mixer_norm(x + mixed)
            normed: Tensor = self.mlp_norm(x + self._mlp(x, routings))
            return normed
        if self.parallel:
            return x + mixed + self._mlp(h, routings)
        x = x + self.mixer_after(mixed)
        return x + self._mlp(self.mlp_norm(x), routings)

    def _mlp(self, h: Tensor, routings: list[Any] | None) -> Tensor:
        out: Tensor = self.mlp(h, routings) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(h)
        normed: Tensor = self.mlp_after(out)
        return normed


class Transformer(LanguageModel):
    """The general decoder (see the top of this file).

    Args:
        config: its shape.
        generator: draws the initial weights; the same seed gives the same network.
        dtype: the type that activations are computed in; weights stay fp32.
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
        self.batch_independent = config.experts is None or config.experts.routing == "dropless"

        def table(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, config.d_model, generator=generator) * 0.02)

        self.embedding = table(config.vocab_size)
        self.positions = table(config.max_length) if config.learned_positions else None
        rotaries = {name: self._rotary(mixer) for name, mixer in config.mixers.items()}
        self.blocks = nn.ModuleList(
            [
                TransformerBlock(config, n, rotaries[name], generator)
                for n, name in enumerate(config.layer_names())
            ]
        )
        self.final_norm = nn.Identity() if config.post_norm else make_norm(config)
        self.head = None if config.tie_embeddings else table(config.vocab_size)

    def _rotary(self, mixer: AttentionConfig | MLAConfig | CustomMixer) -> Rotary | None:
        if isinstance(mixer, CustomMixer) or mixer.rope is None:
            return None
        return make_rotary(
            mixer.rope, mixer.head_dim if isinstance(mixer, AttentionConfig) else mixer.rope_dim, self.dtype
        )

    def embed(self, ids: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """ids [B, T] -> [B, T, d_model] in the compute type; `start` is the position of the first when none are given.

        Raises:
            ConfigError: learned positions, and the row is longer than their table.
        """
        x = F.embedding(ids, self.embedding).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=x.device)
        if self.positions is not None:
            if positions is None:
                stop = start + ids.shape[1]
                if stop > self.config.max_length:
                    raise ConfigError(
                        f"a row of {stop} positions",
                        expected=f"at most max_length = {self.config.max_length}",
                    )
                x = x + self.positions[start:stop].to(self.dtype)
            else:
                low, high = (0, 0) if positions.is_cuda else (int(p) for p in positions.aminmax())
                if low < 0 or high >= self.config.max_length:
                    raise ConfigError(
                        f"position {low if low < 0 else high}",
                        expected=f"from 0, below max_length = {self.config.max_length}",
                    )
                x = x + F.embedding(positions, self.positions).to(self.dtype)
        return x

    def prepare(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: TransformerState | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """ids [B, T] -> (embedded [B, T, d_model], their positions as given).

        In a packed row give positions if they are learned: they begin anew with every document.
        """
        check_ids(ids, self.config.vocab_size, segments)
        return self.embed(ids, positions, 0 if state is None else state.length), positions

    def trunk(
        self,
        x: Tensor,
        positions: Tensor | None,
        segments: Tensor | None = None,
        state: TransformerState | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """[B, T, d_model] -> normalised hidden states [B, T, d_model] in the compute type; where: positions or None."""
        lent: list[KeyValues | PagedState] = []
        again = self.n_checkpointed(state)
        for n, block in enumerate(self.blocks):
            rest = positions, segments, None if state is None else state.layers[n], routings, lent
            x = checkpointed(block, x, *rest) if n < again else block(x, *rest)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def new_state(self, batch: int, capacity: int) -> TransformerState:
        """An empty state for `batch` rows of up to `capacity` positions."""
        return self._state(batch, capacity, str(self.embedding.device))

    def _state(self, batch: int, capacity: int, device: str) -> TransformerState:
        mixers: list[Any] = [block.mixer for block in self.blocks]
        return TransformerState(
            [m.new_state(batch, capacity, dtype=self.dtype, device=device) for m in mixers]
        )

    def params(self) -> dict[str, int]:
        """Parameters: total; active (those one token meets); embedding (tables of ids and positions, and the head)."""
        total = sum(p.numel() for p in self.parameters())
        tables = [self.embedding, self.positions, self.head]
        return {
            "total": total,
            "active": total - transformer_cost.inactive_expert_params(self),
            "embedding": sum(t.numel() for t in tables if t is not None),
        }

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of one training token's products, forward + backward, in rows of `length`."""
        return transformer_cost.flops_per_token(self, length)

    def kv_bytes_per_token(self) -> int:
        """Bytes that a row's state grows by with each further token of capacity; states of fixed size add nothing.

        Asked of the states themselves, made without memory: so it is true of any member, and of layers that keep
        no more than their window.
        """
        windows = [
            m.window
            for m in self.config.layer_mixers()
            if isinstance(m, AttentionConfig) and m.window is not None
        ]
        long = max(windows, default=0) + 1
        return self._state(1, long + 1, "meta").n_bytes - self._state(1, long, "meta").n_bytes

    def activation_bytes(self, batch: int, length: int, device: str | None = None) -> int:
        """Bytes that the forward pass keeps for the backward one; logits, loss and rotary tables left out.

        device: of the run, by default the model's own; what attention keeps depends on it.
        """
        return transformer_cost.activation_bytes(self, batch, length, device)
