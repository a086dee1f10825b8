"""The configurable decoder: every published architecture that can be exchanged is a configuration of this class.

    x = embedding[ids] * embedding_scale  (+ positions[p])                          [B, T, d_model]
    n_layers times, with the mixer that `pattern` names for the layer and an MLP or a mixture of experts:
        pre-norm   x += mixer(norm(x));         x += mlp(norm(x))                   GPT-2, arXiv:2002.04745
        sandwich   x += norm(mixer(norm(x)));   x += norm(mlp(norm(x)))             Gemma 2, arXiv:2408.00118
        parallel   h = norm(x);                 x += mixer(h) + mlp(h)              PaLM, arXiv:2204.02311, section 2
        post-norm  x = norm(x + mixer(x));      x = norm(x + mlp(x))                arXiv:1706.03762; no norm at the end
    logits = softcap(norm(x) head^T)                                                [B, T, vocab]

Subtle point: the embedding scale is rounded to the activation type before use, because models with a scale were trained
that way (in bf16, sqrt(3072) is 55.5).

A mixer is any module with the interface of `nn/mixer.py`; `transformer_config.py` assigns mixers to layers. The interface
of the model is in `language_model.py`. `Decoder` (`models/decoder.py`) is a separate class, not a special case.
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
    """Decoding state: one state per layer."""

    layers: list[MixerState]

    @property
    def length(self) -> int:
        """Return the number of positions processed so far."""
        return self.layers[0].length

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all layers."""
        return sum(layer.n_bytes for layer in self.layers)


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return the model's norm over d_model."""
    if config.norm == "layer":
        return LayerNorm(config.d_model, config.norm_eps)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_offset)


def make_rotary(rope: Rope, head_dim: int, dtype: torch.dtype) -> Rotary:
    """Return the tables of a `Rope`, shared by all layers of one mixer name."""
    return Rotary(head_dim, rope.base, dtype, rope.scaling, rope.layout, rope.rotary_dim)


def make_mixer(
    config: TransformerConfig,
    mixer: AttentionConfig | MLAConfig | CustomMixer,
    rotary: Rotary | None,
    generator: torch.Generator | None,
    uses_shared_kv: bool = False,
) -> nn.Module:
    """Return one layer's mixer; `uses_shared_kv`: it has no key and value projections.

    Raises:
        ConfigError: `options` of a `CustomMixer` do not fit its class.
    """
    # Config fields are arguments of the class, except those that depend on the whole model.
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
    custom: nn.Module = cls(config.d_model, **mixer.options, generator=generator)
    return custom


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
        experts = config.experts
        if experts is not None and config.has_experts(layer):
            self.mlp = MixtureOfExperts(
                config.d_model,
                experts.hidden,
                experts.n_experts,
                experts.top_k,
                kind=config.mlp,
                shared_hidden=experts.shared_hidden,
                shared_gate=experts.shared_gate,
                routing=experts.routing,
                scoring=experts.scoring,
                norm_topk_prob=experts.norm_topk_prob,
                capacity_factor=experts.capacity_factor,
                overflow=experts.overflow,
                expert_dropout=experts.expert_dropout,
                token_dropout=experts.token_dropout,
                scale=experts.scale,
                bias_balance=experts.bias_balance,
                groups=experts.groups,
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
        """Compute the layer.

        shared_kv: keys and values of the nearest earlier layer that provides them; a providing layer replaces them in place.
        """
        h = x if self.post_norm else self.mixer_norm(x)
        arguments: dict[str, Any] = {"positions": positions, "segments": segments, "state": state}
        if self.provides_kv and isinstance(self.mixer, MultiHeadAttention):
            shared_kv[:] = [self.mixer.project_kv(h, **arguments)]
            arguments["state"] = None  # project_kv has extended it
        mixed: Tensor
        if isinstance(state, PooledState):
            mixed = state.run_mixer(self.mixer, h, positions)
        else:
            mixed = self.mixer(h, **arguments, **({"shared_kv": shared_kv[0]} if shared_kv else {}))
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
        self.batch_independent = config.experts is None or config.experts.routing == "dropless"

        def random_table(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, config.d_model, generator=generator) * 0.02)

        self.embedding = random_table(config.vocab_size)
        self.positions = random_table(config.max_length) if config.learned_positions else None
        rotaries = {name: self._rotary(mixer) for name, mixer in config.mixers.items()}
        self.blocks = nn.ModuleList(
            [
                TransformerBlock(config, n, rotaries[name], generator)
                for n, name in enumerate(config.layer_names())
            ]
        )
        self.final_norm = nn.Identity() if config.post_norm else make_norm(config)
        self.head = None if config.tie_embeddings else random_table(config.vocab_size)

    def _rotary(self, mixer: AttentionConfig | MLAConfig | CustomMixer) -> Rotary | None:
        if isinstance(mixer, CustomMixer) or mixer.rope is None:
            return None
        return make_rotary(
            mixer.rope, mixer.head_dim if isinstance(mixer, AttentionConfig) else mixer.rope_dim, self.dtype
        )

    def embed(self, ids: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """Embed ids [B, T] -> [B, T, d_model] in the compute type; `start` is the first position if `positions` is None.

        Raises:
            ConfigError: learned positions, and a position is outside their table.
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

    def prepare_joined(
        self, ids: Tensor, positions: Tensor, previous_ids: Tensor | None, capacity: int
    ) -> tuple[Tensor, Tensor]:
        """Look up joined rows (`LanguageModel.prepare_joined`)."""
        return self.embed(ids[None], positions[None]), positions[None]

    def prepare(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: TransformerState | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Look up ids [B, T] -> (embedded [B, T, d_model], positions as given).

        A packed row with learned positions needs `positions`: they restart at 0 with every document.
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
        """Compute normalized hidden states [B, T, d_model] in the compute type from embeddings; positions may be None."""
        shared_kv: list[KeyValues | PagedState] = []
        n_checkpointed = self.n_checkpointed(state)
        for n, block in enumerate(self.blocks):
            rest = positions, segments, None if state is None else state.layers[n], routings, shared_kv
            x = checkpointed(block, x, *rest) if n < n_checkpointed else block(x, *rest)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def new_state(self, batch: int, capacity: int) -> TransformerState:
        """Return an empty state for `batch` rows of up to `capacity` positions."""
        return self._state(batch, capacity, str(self.embedding.device))

    def _state(self, batch: int, capacity: int, device: str) -> TransformerState:
        mixers: list[Any] = [block.mixer for block in self.blocks]
        return TransformerState(
            [m.new_state(batch, capacity, dtype=self.dtype, device=device) for m in mixers]
        )

    def params(self) -> dict[str, int]:
        """Count parameters: total; active (used by one token); embedding (tables of ids and positions, and the head)."""
        total = sum(p.numel() for p in self.parameters())
        tables = [self.embedding, self.positions, self.head]
        return {
            "total": total,
            "active": total - transformer_cost.inactive_expert_params(self),
            "embedding": sum(t.numel() for t in tables if t is not None),
        }

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of one training token's matrix products, forward + backward, in rows of `length`."""
        return transformer_cost.flops_per_token(self, length)

    def kv_bytes_per_token(self) -> int:
        """Return the bytes that a row's state grows by per token of capacity; fixed-size states add nothing.

        Computed from states on the meta device, so it holds for any mixer and for layers that keep only a window.
        """
        windows = [
            m.window
            for m in self.config.layer_mixers()
            if isinstance(m, AttentionConfig) and m.window is not None
        ]
        length = max(windows, default=0) + 1
        return self._state(1, length + 1, "meta").n_bytes - self._state(1, length, "meta").n_bytes

    def activation_bytes(self, batch: int, length: int, device: str | None = None) -> int:
        """Return the bytes that the forward keeps for the backward, without logits, loss and rotary tables.

        device: of the run, by default the model's own; the bytes of attention depend on it.
        """
        return transformer_cost.activation_bytes(self, batch, length, device)
