"""Smaller shapes of a transformer: some of its layers, or a multiple of its width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whorl.errors import ConfigError
from whorl.models.transformer_config import AttentionConfig, TransformerConfig


def select_layers_config(config: TransformerConfig, chosen: Sequence[int]) -> TransformerConfig:
    """Return the shape with the chosen layers."""
    if config.kv_sharing_factor > 1:
        raise ConfigError(
            f"layers share keys and values (kv_sharing_factor is {config.kv_sharing_factor})",
            expected="a teacher with independent layers", do="set width_multiplier",
        )  # fmt: skip
    names = config.layer_names()
    pattern = tuple(names[n] for n in chosen)
    mixers = {n: m for n, m in config.mixers.items() if n in pattern}
    changes: dict[str, Any] = {"n_layers": len(chosen), "pattern": pattern, "mixers": mixers}
    if config.experts is not None:
        dense = tuple(i for i, n in enumerate(chosen) if not config.has_experts(n))
        changes["experts"] = config.experts.model_copy(update={"dense_layers": dense})
    return _revalidated(config, changes)


def scale_width(config: TransformerConfig, multiplier: float) -> TransformerConfig:
    """Return the shape at a multiple of its width: residual stream, number of heads and channels; head_dim stays.

    Raises:
        ConfigError: a layer kind that cannot be scaled.
    """

    def heads(n: int, n_kv: int) -> dict[str, int]:
        fewer, fewer_kv = max(1, round(n * multiplier)), max(1, round(n_kv * multiplier))
        return {"n_heads": fewer, "n_kv_heads": max(g for g in range(1, fewer_kv + 1) if fewer % g == 0)}

    def round_to_8(n: int) -> int:
        return max(8, round(n * multiplier / 8) * 8)

    changes: dict[str, Any] = {
        "d_model": round_to_8(config.d_model),
        "mlp_hidden": round_to_8(config.mlp_hidden),
    }
    mixers: dict[str, Any] = {}
    for name, mixer in config.mixers.items():
        if not isinstance(mixer, AttentionConfig):
            raise ConfigError(
                f"mixer {name!r} ({mixer.kind}) cannot be scaled in width",
                expected="attention with heads", do="configure the student explicitly",
            )  # fmt: skip
        mixers[name] = mixer.model_copy(update=heads(mixer.n_heads, mixer.n_kv_heads))
    if config.experts is not None:
        e = config.experts
        shared = round_to_8(e.shared_hidden) if e.shared_hidden else 0
        changes["experts"] = e.model_copy(update={"hidden": round_to_8(e.hidden), "shared_hidden": shared})
    return _revalidated(config, changes | {"mixers": mixers})


def _revalidated(config: TransformerConfig, changes: dict[str, Any]) -> TransformerConfig:
    """Return the changed configuration, validated again."""
    return TransformerConfig.model_validate(config.model_copy(update=changes).model_dump())
