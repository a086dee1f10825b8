"""The layers of a `Transformer` (`models/transformer.py`), made from its configuration."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.models.transformer_config import (
    MIXERS,
    AttentionConfig,
    CustomMixer,
    MLAConfig,
    Rope,
    TransformerConfig,
)
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.mla import MultiHeadLatentAttention
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.attention.paged import PagedState
from whorl.nn.attention.state import KeyValues
from whorl.nn.experts import MixtureOfExperts
from whorl.nn.mixer import MixerState, PooledState
from whorl.nn.mlp import MLP
from whorl.nn.norm import LayerNorm, QKNorm, RMSNorm
from whorl.nn.rotary import Positions, RopeScaling, Rotary

YARN_FACTOR = 4.0  # longest row as a multiple of the trained length


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return the model's norm over d_model."""
    if config.norm == "layer":
        return LayerNorm(config.d_model, config.norm_eps)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_offset)


def make_rotary(rope: Rope, head_dim: int, dtype: torch.dtype) -> Rotary:
    """Return the tables of a `Rope`, shared by all layers of one mixer name."""
    return Rotary(head_dim, rope.base, dtype, rope.scaling, rope.layout, rope.rotary_dim)


def make_rotaries(config: TransformerConfig, dtype: torch.dtype) -> dict[str, Rotary | None]:
    """Return the tables of each mixer by its name; the same object where all layers have the same positions."""
    if (shared := config.shared_rope) is not None:
        rotary = make_rotary(*shared, dtype)
        if config.trained_length is not None:
            yarn = RopeScaling("yarn", YARN_FACTOR, config.trained_length, low=0.5, high=4.0)
            rotary.extended = make_rotary(shared[0].model_copy(update={"scaling": yarn}), shared[1], dtype)
        return dict.fromkeys(config.mixers, rotary)
    found: dict[str, Rotary | None] = {}
    for name, mixer in config.mixers.items():
        if isinstance(mixer, CustomMixer) or mixer.rope is None:
            found[name] = None
        else:
            width = mixer.head_dim if isinstance(mixer, AttentionConfig) else mixer.rope_dim
            found[name] = make_rotary(mixer.rope, width, dtype)
    return found


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
        same = mixer.model_dump(
            exclude={"kind", "rope", "qk_norm", "scale", "learned_temperature", "fused_qkv", "smear"}
        )
        attention = MultiHeadAttention(
            config.d_model,
            rotary=rotary,
            qk_norm=QKNorm(config.norm_eps, config.norm_offset, mixer.qk_norm == "all_heads")
            if mixer.qk_norm
            else None,
            scale="learned" if mixer.learned_temperature else mixer.scale,
            generator=generator,
            smear=mixer.smear and not uses_shared_kv,
            projections="shared" if uses_shared_kv else "fused" if mixer.fused_qkv else "separate",
            **same,
        )
        if config.masked is not None:
            attention.mask = Mask(causal=False, block=config.masked.block, earlier_blocks=True)
        return attention
    if isinstance(mixer, MLAConfig):
        fields = mixer.model_dump(exclude={"kind", "rope"})
        return MultiHeadLatentAttention(config.d_model, rotary=rotary, generator=generator, **fields)
    return _custom_mixer(config.d_model, mixer, generator)


def _custom_mixer(d_model: int, mixer: CustomMixer, generator: torch.Generator | None) -> nn.Module:
    cls = MIXERS.get(mixer.kind, named_by="mixers")
    missing = [name for name in ("forward", "new_state", "cache_spec") if not hasattr(cls, name)]
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or missing:
        raise ConfigError(
            f"mixers: {mixer.kind!r} is {cls!r}" + (f" without {missing[0]}" if missing else ""),
            expected="a torch.nn.Module with the interface of whorl.nn.mixer.Mixer",
        )
    try:
        inspect.signature(cls).bind(d_model, **mixer.options, generator=generator)
    except TypeError as error:
        raise ConfigError(
            f"mixers: options of {mixer.kind!r} are {mixer.options}: {error}",
            expected=f"arguments of {cls.__name__}{inspect.signature(cls)}",
        ) from error
    return cls(d_model, **mixer.options, generator=generator)


class TransformerBlock(nn.Module):
    """One layer (see the top of this file).  x: [B, T, d_model] -> [B, T, d_model]."""

    def __init__(
        self, config: TransformerConfig, layer: int, rotary: Rotary | None, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.parallel, self.post_norm = config.parallel, config.post_norm
        self.provides_kv = config.kv_sharing_factor > 1 and layer % config.kv_sharing_factor == 0
        self.uses_shared_kv = layer % config.kv_sharing_factor > 0
        self.mixer_norm = make_norm(config) if config.pre_norm else nn.Identity()
        self.mixer = make_mixer(config, config.layer_mixers()[layer], rotary, generator, self.uses_shared_kv)
        self.mixer_after = make_norm(config) if config.sandwich else nn.Identity()
        self.mlp_norm = make_norm(config) if config.pre_norm and not config.parallel else nn.Identity()
        self.mlp: MLP | MixtureOfExperts
        experts = config.experts
        if experts is not None and config.has_experts(layer):
            options = experts.model_dump(exclude={"dense_layers"})
            self.mlp = MixtureOfExperts(config.d_model, kind=config.mlp, generator=generator, **options)
        else:
            self.mlp = MLP(config.d_model, config.mlp_hidden, config.mlp, generator, bias=config.mlp_bias)
        self.mlp_after = make_norm(config) if config.sandwich else nn.Identity()

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        segments: Tensor | None,
        state: MixerState | None,
        routings: list[Any] | None,
        shared_kv: list[KeyValues | PagedState],
    ) -> Tensor:
        """Compute the layer.

        positions: of `Transformer.prepare`.
        shared_kv: keys and values of the nearest earlier layer that provides them; a providing layer replaces them in place.
        """
        h = x if self.post_norm else self.mixer_norm(x)
        arguments: dict[str, Any] = {"positions": positions, "segments": segments, "state": state}
        if self.provides_kv and isinstance(self.mixer, MultiHeadAttention):
            shared_kv[:] = [self.mixer.project_kv(h, **arguments)]
            arguments["state"] = None  # project_kv has extended it
        mixed: Tensor
        if isinstance(state, PooledState):
            assert not isinstance(positions, tuple)  # tables are for models of attention only
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
