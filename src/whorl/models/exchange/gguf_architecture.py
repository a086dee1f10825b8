"""Selection of llama.cpp's architecture for a model, and the fields that it reads.

A GGUF file names an architecture and its numbers; llama.cpp implements the network of each architecture in code. Two
checks are needed. First, the families' tables (`family.py`) write the configuration, read it back and compare, as for any
exchange. Second, `_check_supported` rejects features that the family has but llama.cpp's network of that name lacks,
because such a file would run with wrong results.

Three features are expressed although llama.cpp has no field for them. A scale of the scores is multiplied into the queries
(or into the gain of their norm). Interleaved rotary features are native in "llama". And a window equals none for rows that
are no longer than it, so an architecture without windows gets the window as its longest row (with a warning).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from whorl.errors import ConfigError
from whorl.models.exchange.convert import FAMILIES, read_config
from whorl.models.exchange.family import ModelFamily, config_differences, unsupported_by_family
from whorl.models.exchange.fields import yarn_mscale
from whorl.models.transformer_config import AttentionConfig, MLAConfig, Rope, TransformerConfig
from whorl.nn.rotary import RopeScaling

# A family's `model_type` -> the architecture, in the order in which they are tried.
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gpt2": "gpt2", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "deepseek_v3": "deepseek2",
}  # fmt: skip
WITH_WINDOWS = {"gemma2": 2, "gemma3": 6}  # every n-th layer is global by default
# Layer counts by which llama.cpp detects the two 27B models, whose scores are divided by sqrt(d_model / n_heads).
WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
LITE_LAYERS = (
    26,
    27,
)  # layer counts of DeepSeek's lite models, for which llama.cpp reads no rank of the queries


@dataclass(frozen=True)
class GGUFModel:
    """The written model: its family, llama.cpp's architecture, and a configuration that the family can express.

    query_gain: factor of the queries per layer, which replaces the scale in `config`. interleaved: rows of queries and
    keys already have llama's order. n_ctx: the longest row.
    """

    family: ModelFamily
    architecture: str
    config: TransformerConfig
    query_gain: tuple[float, ...]
    interleaved: bool
    n_ctx: int

    @classmethod
    def from_config(cls, given: TransformerConfig) -> GGUFModel:
        """Return the first architecture that can express the configuration.

        Raises:
            ConfigError: none can. The error names the first unsupported field of the closest one.
        """
        plain, turned = _canonical_config(given)
        for n, mixer in enumerate(plain.layer_mixers()):
            if (
                isinstance(mixer, AttentionConfig | MLAConfig)
                and (rope := mixer.rope)
                and rope.rotary_dim is not None
            ):
                raise unsupported_by_family(
                    f"rope.rotary_dim of layer {n} is {rope.rotary_dim}", "all features"
                )
        worst: list[tuple[int, ConfigError]] = []
        for model_type, architecture in ARCHITECTURES.items():
            family, windows = FAMILIES[model_type], architecture in WITH_WINDOWS
            config = plain if windows else _replace_attention(plain, lambda h: {"window": None})
            try:
                back = read_config(family.write(config) | {"model_type": model_type}, model_type)
            except ConfigError as error:
                worst.append((99, error))
                continue
            if found := config_differences(config, back):
                worst.append(
                    (
                        len(found),
                        unsupported_by_family(_summarize(found), f"what GGUF's {architecture!r} can say"),
                    )
                )
                continue
            try:
                _check_supported(architecture, config, turned)
            except ConfigError as error:
                worst.append((0, error))
                continue
            window = min(
                [h.window for h in attention_configs(plain) if h.window is not None], default=given.max_length
            )
            n_ctx = given.max_length if windows else min(given.max_length, window)
            if n_ctx < given.max_length:
                warnings.warn(
                    f"GGUF's {architecture!r} has no windows: the longest row is {n_ctx}, where they would begin to matter",
                    stacklevel=3,
                )
            return cls(family, architecture, config, _query_gains(given, architecture), turned, n_ctx)
        raise min(worst, key=lambda pair: pair[0])[1]


def _summarize(differences: list[str]) -> str:
    """Return the first three differences, one per kind: a field of a mixer differs in many layers."""
    kinds = {re.sub(r"layer \d+", "", d): d for d in sorted(differences, reverse=True)}
    few = sorted(kinds.values())
    return "; ".join(few[:3]) + (f"; and {len(few) - 3} more" if len(few) > 3 else "")


def attention_configs(config: TransformerConfig) -> list[AttentionConfig]:
    return [m for m in config.layer_mixers() if isinstance(m, AttentionConfig)]


def _replace_attention(
    config: TransformerConfig, change: Callable[[AttentionConfig], dict[str, Any]]
) -> TransformerConfig:
    """Return the configuration with some fields of all attention mixers changed."""
    mixers = {
        name: m.model_copy(update=change(m)) if isinstance(m, AttentionConfig) else m
        for name, m in config.mixers.items()
    }
    return config.model_copy(update={"mixers": mixers})


def _canonical_config(config: TransformerConfig) -> tuple[TransformerConfig, bool]:
    """Return an equal configuration that more families can express, and whether its rotary features were interleaved.

    Changes: no scale; no rotary fraction of 1; `ntk` as a larger base; a ramp with explicit numbers; the layout "half"
    instead of "interleaved".
    """
    turned = {h.rope.layout for h in attention_configs(config) if h.rope is not None} == {"interleaved"}

    def plain(rope: Rope, dim: int) -> Rope:
        base, scaling = rope.base, rope.scaling
        if scaling is not None and scaling.kind == "ntk":
            base, scaling = base * scaling.factor ** (dim / (dim - 2)), None
        elif scaling is not None and scaling.kind in ("yarn", "llama3"):
            scaling = replace(scaling, low=scaling.ramp[0], high=scaling.ramp[1])
        whole = rope.rotary_dim is None or rope.rotary_dim == dim
        return rope.model_copy(
            update={"base": base, "scaling": scaling, "rotary_dim": None if whole else rope.rotary_dim}
        )

    mixers: dict[str, Any] = {}
    for name, m in config.mixers.items():
        if isinstance(m, AttentionConfig) and m.rope is not None:
            rope = plain(m.rope, m.head_dim).model_copy(update={"layout": "half"} if turned else {})
            mixers[name] = m.model_copy(update={"scale": None, "rope": rope})
        elif isinstance(m, AttentionConfig):
            mixers[name] = m.model_copy(update={"scale": None})
        elif isinstance(m, MLAConfig):
            mixers[name] = m.model_copy(update={"rope": plain(m.rope, m.rope_dim)})
        else:
            mixers[name] = m
    return config.model_copy(update={"mixers": mixers}), turned


def _query_gains(config: TransformerConfig, architecture: str) -> tuple[float, ...]:
    """Return the ratio of the model's score scale to llama.cpp's, for each layer."""
    wide = WIDE_SCALE.get(architecture) == config.n_layers
    gains = []
    for m in config.layer_mixers():
        if isinstance(m, MLAConfig):
            gains.append(1.0)
        elif isinstance(m, AttentionConfig):
            theirs = (config.d_model // m.n_heads if wide else m.head_dim) ** -0.5
            gains.append(1.0 if m.scale is None and not wide else (m.scale or m.head_dim**-0.5) / theirs)
    # The same scale after a square and a square root counts as equal.
    return tuple(1.0 if abs(g - 1.0) < 1e-12 else g for g in gains)


def _check_supported(architecture: str, config: TransformerConfig, turned: bool) -> None:
    """Raise ConfigError where llama.cpp's network of that name lacks a feature of the family."""

    def refuse(what: str, expected: str) -> ConfigError:
        return unsupported_by_family(f"{what}, which llama.cpp's {architecture!r} lacks", expected)

    heads, experts = attention_configs(config), config.experts
    if turned and architecture != "llama":
        raise refuse("rope.layout is 'interleaved'", "'half'")
    if (
        architecture in ("qwen2", "qwen2moe", "gpt2")
        and heads[0].n_heads * heads[0].head_dim != config.d_model
    ):
        raise refuse(
            f"head_dim is {heads[0].head_dim}", f"d_model / n_heads = {config.d_model / heads[0].n_heads}"
        )
    if architecture in ("qwen3", "qwen3moe", "gemma2", "gemma3") and heads[0].out_bias:
        raise refuse("out_bias is set", "no bias on the output of attention")
    if architecture == "gpt2" and config.mlp != "gelu_tanh":
        raise refuse(f"mlp is {config.mlp!r}", "'gelu_tanh'")
    if architecture == "gemma2" and (config.logit_softcap is None or heads[0].softcap is None):
        name = "logit_softcap" if config.logit_softcap is None else "softcap"
        raise refuse(f"{name} is None", "a cap on both scores and logits")
    if architecture == "gemma2" and not config.tie_embeddings:
        raise refuse("tie_embeddings is False", "True")
    if architecture == "gemma3" and heads[0].softcap is not None:
        raise refuse(f"softcap is {heads[0].softcap}", "none")
    if architecture in ("qwen2moe", "qwen3moe") and experts is not None:
        if experts.dense_layers:
            raise refuse(f"experts.dense_layers is {experts.dense_layers}", "none")
        if experts.norm_topk_prob != (architecture == "qwen3moe"):
            raise refuse(
                f"experts.norm_topk_prob is {experts.norm_topk_prob}", str(architecture == "qwen3moe")
            )
        if architecture == "qwen2moe" and not experts.shared_hidden:
            raise refuse("experts.shared_hidden is 0", "a shared expert")
    for mixer in config.layer_mixers():
        if isinstance(mixer, MLAConfig):
            _check_mla(mixer, config, refuse)
        elif isinstance(mixer, AttentionConfig) and mixer.rope is not None:
            _check_scaling(architecture, mixer.rope.scaling, mixer.window is not None, refuse)


Refuse = Callable[[str, str], ConfigError]


def _check_scaling(architecture: str, scaling: RopeScaling | None, slides: bool, refuse: Refuse) -> None:
    if scaling is None:
        return
    if architecture == "gemma3" and (slides or scaling.kind != "linear"):
        raise refuse(f"rope.scaling is {scaling.kind!r}", "'linear', in the layers without a window")
    if scaling.kind == "llama3" and architecture != "llama":
        raise refuse("rope.scaling is 'llama3'", "'linear' or 'yarn'")
    if scaling.kind == "yarn" and (scaling.ramp != (1.0, 32.0) or not scaling.truncate):
        raise refuse(f"rope.scaling is {scaling}", "low = 1, high = 32 and truncate")
    if scaling.kind != "yarn" and scaling.attention_scaling != 1.0:
        raise refuse(f"rope.scaling.attention is {scaling.attention_scaling}", "1, except for 'yarn'")


def _check_mla(m: MLAConfig, config: TransformerConfig, refuse: Refuse) -> None:
    scaling, experts = m.rope.scaling, config.experts
    if m.rope.layout != "interleaved":
        raise refuse(f"rope.layout is {m.rope.layout!r}", "'interleaved'")
    if m.eps != config.norm_eps:
        raise refuse(f"eps of the latents is {m.eps}", f"norm_eps = {config.norm_eps}")
    if m.q_rank is not None and config.n_layers in LITE_LAYERS:
        raise refuse(f"q_rank is {m.q_rank}", f"none where n_layers is {config.n_layers}")
    if experts is None or not experts.shared_hidden:
        raise refuse("experts.shared_hidden is 0", "a shared expert")
    if scaling is None:
        return
    _check_scaling("deepseek2", scaling, False, refuse)
    if scaling.kind != "yarn" or scaling.attention_scaling != 1.0 or m.scale is None:
        raise refuse(
            f"rope.scaling is {scaling} and scale is {m.scale}",
            "'yarn' with equal values of both mscale fields",
        )


def write_fields(w: Any, shape: GGUFModel) -> None:
    """Write the numbers that an architecture reads."""
    c, mixers, arch = shape.config, shape.config.layer_mixers(), shape.architecture
    w.add_vocab_size(c.vocab_size)
    w.add_context_length(shape.n_ctx)
    w.add_embedding_length(c.d_model)
    w.add_block_count(c.n_layers)
    w.add_feed_forward_length(c.mlp_hidden if c.experts is None or arch != "llama" else c.experts.hidden)
    (w.add_layer_norm_eps if c.norm == "layer" else w.add_layer_norm_rms_eps)(c.norm_eps)
    first = mixers[0]
    if isinstance(first, MLAConfig):
        _write_mla(w, first)
    elif isinstance(first, AttentionConfig):
        w.add_head_count(first.n_heads)
        w.add_head_count_kv(first.n_kv_heads)
        w.add_key_length(first.head_dim)
        w.add_value_length(first.head_dim)
        full = next((h for h in attention_configs(c) if h.window is None), first)
        if full.rope is not None:
            w.add_rope_dimension_count(full.head_dim)
            _write_rope(w, full.rope.base, full.rope.scaling)
        if first.softcap is not None:
            w.add_attn_logit_softcapping(first.softcap)
        if arch in WITH_WINDOWS:
            _write_windows(w, arch, attention_configs(c))
    if c.logit_softcap is not None:
        w.add_final_logit_softcapping(c.logit_softcap)
    if (e := c.experts) is not None:
        w.add_expert_count(e.n_experts)
        w.add_expert_used_count(e.top_k)
        if arch != "llama":
            w.add_expert_feed_forward_length(e.hidden)
        if arch == "qwen2moe":
            w.add_expert_shared_feed_forward_length(e.shared_hidden)
        if arch == "deepseek2":
            import gguf

            w.add_leading_dense_block_count(len(e.dense_layers))
            w.add_expert_shared_count(e.shared_hidden // e.hidden)
            w.add_expert_weights_scale(e.scale)
            w.add_expert_weights_norm(e.norm_topk_prob)
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            if e.groups is not None:
                w.add_expert_group_count(e.groups[0])
                w.add_expert_group_used_count(e.groups[1])


def _write_rope(w: Any, base: float, scaling: RopeScaling | None, latent: bool = False) -> None:
    w.add_rope_freq_base(base)
    if scaling is None or scaling.kind == "llama3":  # llama3 scaling is a tensor
        return
    import gguf

    w.add_rope_scaling_type(gguf.RopeScalingType[scaling.kind.upper()])
    w.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "yarn":
        assert scaling.original_length is not None
        w.add_rope_scaling_orig_ctx_len(scaling.original_length)
        own = 1.0 if latent else yarn_mscale(scaling.factor, 1.0)
        if scaling.attention_scaling != own:
            w.add_rope_scaling_attn_factors(scaling.attention_scaling / own)


def _write_windows(w: Any, arch: str, heads: list[AttentionConfig]) -> None:
    slides = [h.window is not None for h in heads]
    sliding = next((h for h in heads if h.window is not None), None)
    if sliding is None and arch == "gemma3":
        return
    # Older readers have a default pattern, so the pattern is written only where it differs.
    every = WITH_WINDOWS[arch]
    if slides != [(n + 1) % every != 0 for n in range(len(slides))]:
        w.add_sliding_window_pattern(slides)
    if sliding is not None:
        w.add_sliding_window(sliding.window)
        assert sliding.rope is not None
        w.add_rope_freq_base_swa(sliding.rope.base)


def _write_mla(w: Any, m: MLAConfig) -> None:
    """Write keys and values in llama.cpp's two forms: one head of the latent, and separate heads as `_mla`."""
    w.add_head_count(m.n_heads)
    w.add_head_count_kv(1)
    w.add_kv_lora_rank(m.kv_rank)
    w.add_q_lora_rank(m.q_rank or 0)
    w.add_key_length(m.kv_rank + m.rope_dim)
    w.add_value_length(m.kv_rank)
    w.add_key_length_mla(m.nope_dim + m.rope_dim)
    w.add_value_length_mla(m.v_dim)
    w.add_rope_dimension_count(m.rope_dim)
    _write_rope(w, m.rope.base, m.rope.scaling, latent=True)
    if m.rope.scaling is not None and m.scale is not None:
        stretch = math.sqrt(m.scale * math.sqrt(m.nope_dim + m.rope_dim))
        w.add_rope_scaling_yarn_log_mul(
            0.1 * (stretch - 1.0) / (yarn_mscale(m.rope.scaling.factor, 1.0) - 1.0)
        )
