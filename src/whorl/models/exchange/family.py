"""A model family: a table of fields and a table of tensors for both directions, and the common parts of families.

`read` makes a `TransformerConfig` of a `config.json`, `write` makes the fields of a configuration, `rules` lists the
tensors. To check whether a model can be written as a family, its fields are written and read back, and the two
configurations are compared (`config_differences`). This finds unsupported features without a list of conditions.

Most families are Llama with differences (Touvron et al. 2023, arXiv:2302.13971). The helpers here use Llama's names, and
the families' files state the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from whorl.errors import ConfigError
from whorl.models.exchange.fields import ConfigReader, read_rope, write_rope
from whorl.models.exchange.rules import ConversionRule, concatenated, unchanged
from whorl.models.transformer_config import AttentionConfig, Rope, TransformerConfig
from whorl.nn.mlp import GATED, Activation


@dataclass(frozen=True)
class ModelFamily:
    """One family of models.

    model_type, architecture: its names in `config.json`.
    prefix: of the names of all tensors but the head; some files lack it.
    ignored_tensors: a pattern of names of computed tables, which may be left unread.
    code: Python files that `transformers` needs, copied into the folder.
    fold: changes the loaded weights by numbers of `config.json` that no field of a `TransformerConfig` has.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], TransformerConfig]
    write: Callable[[TransformerConfig], dict[str, Any]]
    rules: Callable[[TransformerConfig], list[ConversionRule]]
    prefix: str = "model."
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    ignored_tensors: str = r".*\.rotary_emb\.inv_freq"
    code: tuple[Path, ...] = ()
    fold: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda data, state: None


def config_differences(a: TransformerConfig, b: TransformerConfig) -> list[str]:
    """Return the differences between two networks, as "field is x, not y".

    Names of mixers are ignored, and so is the MLP's width where all layers have experts.
    """
    found = []
    for n, (x, y) in enumerate(zip(a.layer_mixers(), b.layer_mixers(), strict=False)):
        found += [f"mixer of layer {n}: {d}" for d in _dict_differences(_canonical(x), _canonical(y))]
    out: Any = {
        "mixers": True,
        "pattern": True,
        "experts": {"expert_dropout", "token_dropout"},
    }  # for training only
    if all(c.has_experts(n) for c in (a, b) for n in range(c.n_layers)):
        out["mlp_hidden"] = True
    return _dict_differences(a.model_dump(exclude=out), b.model_dump(exclude=out)) + found


def _canonical(mixer: Any) -> dict[str, Any]:
    """Return a mixer's fields with defaults of the scaling filled in, without the backend and a rotary fraction of 1."""
    fields: dict[str, Any] = mixer.model_dump()
    fields.pop("backend", None)  # another order of the same sums
    rope = getattr(mixer, "rope", None)
    if isinstance(mixer, AttentionConfig) and rope is not None and rope.rotary_dim == mixer.head_dim:
        fields["rope"]["rotary_dim"] = None
    if rope is not None and rope.scaling is not None and rope.scaling.kind in ("yarn", "llama3"):
        low, high = rope.scaling.ramp
        fields["rope"]["scaling"] = {**asdict(rope.scaling), "low": low, "high": high}
    return fields


def _dict_differences(a: dict[str, Any], b: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found += _dict_differences(x, y, f"{path}{key}.")
        elif x != y:
            found.append(f"{path}{key} is {x!r}, not {y!r}")
    return found


def shortest_pattern(names: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern whose repetition gives these names."""
    for length in range(1, len(names) + 1):
        if all(name == names[n % length] for n, name in enumerate(names)):
            return tuple(names[:length])
    return ()


def require_attention(config: TransformerConfig) -> list[AttentionConfig]:
    """Return the mixers of all layers, which must be multi-head attention.

    Raises:
        ConfigError: one is another mixer.
    """
    heads = []
    for n, mixer in enumerate(config.layer_mixers()):
        if not isinstance(mixer, AttentionConfig):
            raise unsupported_by_family(f"the mixer of layer {n} is {mixer.kind!r}", "'heads'")
        heads.append(mixer)
    return heads


UNSUPPORTED_PREFIX = "this model cannot be written as that family: "


def unsupported_by_family(what: str, expected: str) -> ConfigError:
    """Return the error for a model that a family cannot express."""
    return ConfigError(
        UNSUPPORTED_PREFIX + what,
        expected=expected,
        do="export it with `--to hf`, or as 'whorl', which can express every model",
    )


def read_attention(
    fields: ConfigReader,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    base: float,
    partial: bool = False,
    **others: Any,
) -> AttentionConfig:
    """Return the attention of a Llama-like file. kv_heads, head_dim, base: values of absent fields (None: derived).

    partial: the family's program rotates the part of each head that the file gives.

    Raises:
        ConfigError: a field is wrong, or `partial_rotary_factor` is not 1: without a scaling, the families' programs
            ignore it and rotate all features.
    """
    n_heads = fields.get("num_attention_heads", int, above=0)
    width = fields.get("hidden_size", int, above=0)
    dim = fields.optional("head_dim", int, above=0) or head_dim
    if dim is None:
        dim = width // fields.divides("num_attention_heads", n_heads, "hidden_size", width)
    if dim % 2:
        given = fields.data.get("head_dim") is not None
        raise fields.error("head_dim" if given else "hidden_size", f"heads of an even width, not {dim}")
    base, scaling, share, _ = read_rope(fields, base)
    if share != 1.0 and not partial:
        raise fields.error("partial_rotary_factor", "1.0", share)
    rope = Rope(base=base, scaling=scaling, rotary_dim=int(dim * share) if share != 1.0 else None)
    n_kv_heads = fields.get("num_key_value_heads", int, kv_heads or n_heads, above=0)
    fields.divides("num_key_value_heads", n_kv_heads, "num_attention_heads", n_heads)
    return AttentionConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=dim, rope=rope, **others)


def read_shape(
    fields: ConfigReader,
    *,
    act: dict[str, Activation],
    eps: float = 1e-6,
    tied: bool = False,
    act_field: str = "hidden_act",
    act_default: str | None = "silu",
    max_length: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of `TransformerConfig` that every Llama-like file has."""
    return {
        "vocab_size": fields.get("vocab_size", int, above=1),
        "d_model": fields.get("hidden_size", int, above=0),
        "n_layers": fields.get("num_hidden_layers", int, above=0),
        "max_length": fields.get("max_position_embeddings", int, max_length, above=0),
        "mlp": fields.choose(act_field, act, act_default),
        "mlp_hidden": fields.get("intermediate_size", int, above=0),
        "norm_eps": fields.get("rms_norm_eps", float, eps, above=0),
        "tie_embeddings": fields.get("tie_word_embeddings", bool, tied),
    }


def sliding_mixers(full: AttentionConfig, sliding: AttentionConfig, slides: Sequence[bool]) -> dict[str, Any]:
    """Return `mixers` and `pattern` of layers, some with sliding windows."""
    names = ["sliding" if s else "full" for s in slides]
    mixers = {"full": full, "sliding": sliding}
    return {"mixers": {n: mixers[n] for n in dict.fromkeys(names)}, "pattern": shortest_pattern(names)}


def write_shape(
    config: TransformerConfig,
    *,
    partial: bool = False,
    head_dim: bool = True,
    first: AttentionConfig | None = None,
) -> dict[str, Any]:
    """Return the fields that every Llama-like file has, without the activation.

    partial: the family may rotate a part of each head. head_dim: whether its files have that field. first: the layer whose
    attention is written; default the first.

    Raises:
        ConfigError: positions are not rotary, some features do not rotate, or heads have a width that a file cannot express.
    """
    first = first or require_attention(config)[0]
    if first.rope is None:
        raise unsupported_by_family("the mixer of layer 0 has no rope", "rotary positions")
    rotary_dim = first.rope.rotary_dim or first.head_dim
    if rotary_dim != first.head_dim and not partial:
        raise unsupported_by_family(
            f"rope.rotary_dim of layer 0 is {first.rope.rotary_dim}", "all of head_dim"
        )
    if not head_dim and first.head_dim * first.n_heads != config.d_model:
        raise unsupported_by_family(f"head_dim of layer 0 is {first.head_dim}", "d_model / n_heads")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.max_length,
        "intermediate_size": config.mlp_hidden,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "num_attention_heads": first.n_heads,
        "num_key_value_heads": first.n_kv_heads,
        **({"head_dim": first.head_dim} if head_dim else {}),
        "rope_parameters": write_rope(first.rope.base, first.rope.scaling)
        | ({"partial_rotary_factor": rotary_dim / first.head_dim} if partial else {}),
    }


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types`."""
    windows = [h.window for h in require_attention(config)]
    return {
        "sliding_window": next((w for w in windows if w is not None), None),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def embedding_and_head_rules(config: TransformerConfig) -> list[ConversionRule]:
    """Return rules for embedding, final norm and head, by Llama's names."""
    rules = [
        unchanged("model.embed_tokens.weight", "embedding"),
        unchanged("model.norm.weight", "final_norm.weight"),
    ]
    return rules if config.tie_embeddings else [*rules, unchanged("lm_head.weight", "head")]


def attention_rules(hf_prefix: str, prefix: str, heads: AttentionConfig) -> list[ConversionRule]:
    """Return rules for queries, keys, values and output of one layer; both prefixes end in a dot."""
    parts = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}
    rules = [unchanged(f"{hf_prefix}{a}.weight", f"{prefix}{b}.weight") for a, b in parts.items()]
    for a, b in parts.items():
        if heads.out_bias if b == "out" else heads.bias:
            rules.append(unchanged(f"{hf_prefix}{a}.bias", f"{prefix}{b}.bias"))
    if heads.qk_norm:
        rules += [unchanged(f"{hf_prefix}{n}.weight", f"{prefix}{n}.weight") for n in ("q_norm", "k_norm")]
    return rules


def mlp_rules(
    hf_prefix: str, prefix: str, config: TransformerConfig, bias: bool | None = None
) -> list[ConversionRule]:
    """Return rules for a gated MLP, whose gate and up projection are concatenated in Whorl; both prefixes end in a dot.

    Raises:
        ConfigError: the MLP has no gate.
    """
    if config.mlp not in GATED:
        raise unsupported_by_family(f"mlp is {config.mlp!r}", " or ".join(GATED))
    rules = []
    for kind in ["weight", "bias"] if (config.mlp_bias if bias is None else bias) else ["weight"]:
        rules.append(
            concatenated((f"{hf_prefix}gate_proj.{kind}", f"{hf_prefix}up_proj.{kind}"), f"{prefix}up.{kind}")
        )
        rules.append(unchanged(f"{hf_prefix}down_proj.{kind}", f"{prefix}down.{kind}"))
    return rules


def norm_rules(hf_prefix: str, prefix: str, config: TransformerConfig) -> list[ConversionRule]:
    """Return rules for the norms of one layer: Llama's, those of a sandwich, or only its outer ones; prefixes as above."""
    names = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}
    if config.sandwich:
        inner = {"input_layernorm": "mixer_norm", "pre_feedforward_layernorm": "mlp_norm"}
        names = {"post_attention_layernorm": "mixer_after", "post_feedforward_layernorm": "mlp_after"}
        names |= inner if config.pre_norm else {}
    return [unchanged(f"{hf_prefix}{a}.weight", f"{prefix}{b}.weight") for a, b in names.items()]
