"""The shape of a `Transformer` (`models/transformer.py`): validated configuration, stored with the weights.

`mixers` names each kind of mixer once, and `pattern` repeats the names over the layers. Gemma 3 (arXiv:2503.19786), with
five sliding-window layers to one global layer, is

    mixers = {"local": AttentionConfig(..., window=1024, rope=Rope(base=1e4)),
              "global": AttentionConfig(..., rope=Rope(base=1e6))}
    pattern = ("local",) * 5 + ("global",)

`AttentionConfig` and `MLAConfig` have typed fields, because conversion to other formats depends on each of them. Any other
mixer is a `CustomMixer`: a name in `MIXERS`, or "module:Class" of a user, and the arguments of its class. A new mixer is one
file (docs/tutorials/extend.md).

`whorl_decoder` is the project's own shape, that of the quickstart recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from whorl.errors import ConfigError, one_of
from whorl.nn.mlp import Activation
from whorl.nn.rotary import Layout, RopeScaling
from whorl.registry import Registry

# Constructed as Class(d_model, **options, generator=...).
MIXERS = Registry(
    "mixer",
    {
        "linear": "whorl.nn.attention.linear:LinearAttention",
        "pointwise": "whorl.nn.attention.hstu:HSTUAttention",
        "rnn": "whorl.nn.recurrent:RNN",
        "lstm": "whorl.nn.recurrent:LSTM",
        "gru": "whorl.nn.recurrent:GRU",
        "mamba": "whorl.nn.mamba:Mamba",
    },
)


class _FrozenConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rope(_FrozenConfig):
    """Rotary positions (`nn/rotary.py`)."""

    base: float = Field(default=10_000.0, gt=1)
    scaling: RopeScaling | None = None
    rotary_dim: int | None = Field(default=None, ge=2)
    layout: Layout = "half"


class _MixerConfig(_FrozenConfig):
    kind: str

    def describe(self) -> str:
        """Describe the mixer in a few words."""
        return self.kind


class AttentionConfig(_MixerConfig):
    """Multi-head attention (`nn/attention/multi_head.py`). `qk_norm` uses the eps and offset of the model's norm.

    qk_norm: over the features of each head, or of "all_heads" together.
    fused_qkv: one matrix for queries, keys and values.
    learned_temperature: one factor per query head in place of `scale` and of the gains of `qk_norm`.
    backend: "blocked" computes scores in blocks of queries without gradients too, so that scoring and training agree in
        every bit; "auto" takes the fastest.
    """

    kind: Literal["heads"] = "heads"
    n_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rope: Rope | None = Rope()
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool | Literal["all_heads"] = False
    scale: float | None = Field(default=None, gt=0)
    softcap: float | None = Field(default=None, gt=0)
    window: int | None = Field(default=None, ge=1)
    stride: int | None = Field(default=None, ge=1)
    block: int | None = Field(default=None, ge=1)
    sink: bool = False
    alibi: bool = False
    smear: bool = False
    fused_qkv: bool = False
    learned_temperature: bool = False
    backend: Literal["auto", "blocked"] = "auto"

    @model_validator(mode="after")
    def _validate(self) -> AttentionConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.learned_temperature and (self.scale is not None or self.qk_norm is not True):
            raise ValueError("learned_temperature needs qk_norm = true, and takes the place of scale")
        sizes = (self.softcap, self.window, self.stride, self.block)
        unblocked = self.sink or self.alibi or any(size is not None for size in sizes)
        if self.backend == "blocked" and unblocked:
            raise ValueError('backend = "blocked" is for plain causal attention')
        if self.rope is not None:
            rotary_dim = self.rope.rotary_dim or self.head_dim
            if rotary_dim % 2 or rotary_dim > self.head_dim:
                raise ValueError(
                    f"head_dim ({self.head_dim}) and rope.rotary_dim ({self.rope.rotary_dim}) must be even"
                )
        return self

    def describe(self) -> str:
        """Describe the mixer in a few words."""
        return f"{self.n_heads} head{'s' * (self.n_heads > 1)} of {self.head_dim}"


class MLAConfig(_MixerConfig):
    """Multi-head latent attention (`nn/attention/mla.py`). `eps` belongs to the norms of its latents."""

    kind: Literal["latent"] = "latent"
    n_heads: int = Field(ge=1)
    kv_rank: int = Field(ge=1)
    q_rank: int | None = Field(default=None, ge=1)
    nope_dim: int = Field(ge=1)
    rope_dim: int = Field(ge=2)
    v_dim: int = Field(ge=1)
    rope: Rope = Rope()
    scale: float | None = Field(default=None, gt=0)
    eps: float = Field(default=1e-6, gt=0)


class CustomMixer(_MixerConfig):
    """Any other mixer: its name in `MIXERS` or "module:Class", and the arguments of its class as `options`."""

    kind: str
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _validate(self) -> CustomMixer:
        if self.kind not in MIXERS and ":" not in self.kind:
            known = one_of(self.kind, ["heads", "latent", *MIXERS])
            raise ValueError(f'kind {self.kind!r}: expected {known}, or "module:Class"')
        return self


def _kind(value: Any) -> str:
    kind = value.get("kind", "heads") if isinstance(value, dict) else getattr(value, "kind", "heads")
    return kind if kind in ("heads", "latent") else "custom"


MixerConfig = Annotated[
    Annotated[AttentionConfig, Tag("heads")]
    | Annotated[MLAConfig, Tag("latent")]
    | Annotated[CustomMixer, Tag("custom")],
    Discriminator(_kind),
]


class MoEConfig(_FrozenConfig):
    """Mixture of experts in place of the MLP (`nn/experts`), in every layer except `dense_layers`.

    groups: (number of groups, number of groups that a token may choose from).
    expert_dropout, token_dropout: applied in training only (`nn/experts/router.py`).
    """

    n_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    hidden: int = Field(ge=1)
    shared_hidden: int = Field(default=0, ge=0)
    shared_gate: bool = False
    routing: Literal["dropless", "token_choice", "expert_choice"] = "dropless"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    scale: float = Field(default=1.0, gt=0)
    capacity_factor: float = Field(default=1.25, gt=0)
    overflow: Literal["next", "drop"] = "next"
    expert_dropout: float = Field(default=0.0, ge=0, lt=1)
    token_dropout: float = Field(default=0.0, ge=0, lt=1)
    bias_balance: bool = False
    groups: tuple[int, int] | None = None
    dense_layers: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _validate(self) -> MoEConfig:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most n_experts ({self.n_experts})")
        return self


class NGramConfig(_FrozenConfig):
    """N-gram embedding (`nn/ngram.py`): its orders, and the rows of each order's table."""

    orders: tuple[int, ...] = Field(default=(2, 3), min_length=1)
    buckets: int = Field(default=65_536, ge=1)


class MaskedConfig(_FrozenConfig):
    """Masked diffusion in place of next-token prediction (`objectives/generative/masked.py`).

    mask_id: an id that no text has.
    block: positions that attend to each other and to all earlier blocks; None: the whole row is one block.
    """

    mask_id: int = Field(ge=0)
    block: int | None = Field(default=None, ge=2)


class TransformerConfig(_FrozenConfig):
    """The shape of a transformer.

    max_length: longest row of the original training; bounds `learned_positions`, and is written on export.
    pre_norm: false leaves out the norms before both branches of a `sandwich`, as in OLMo 2 (arXiv:2501.00656).
    post_norm: norms after the residual sums (arXiv:1706.03762).
    kv_sharing_factor: the first of every so many layers computes keys and values; the others of the group reuse them.
    ngram: embedding rows of the last few ids, added to those of the id.
    embedding_norm: norm of the embedded ids.
    trained_length: positions per row in training. Longer rows use YaRN tables (`transformer.py`).
    masked: masked diffusion; attention is not causal then.
    """

    vocab_size: int = Field(ge=2)
    d_model: int = Field(ge=1)
    n_layers: int = Field(ge=1, le=10_000)
    max_length: int = Field(default=4096, ge=1, le=1 << 24)
    mixers: dict[str, MixerConfig] = Field(min_length=1)
    pattern: tuple[str, ...] = ()  # empty: the mixers in their order
    mlp: Activation = "swiglu"
    mlp_hidden: int = Field(ge=1)
    mlp_bias: bool = False
    experts: MoEConfig | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = Field(default=1e-6, gt=0)
    norm_offset: float = 0.0
    sandwich: bool = False
    pre_norm: bool = True
    parallel: bool = False
    post_norm: bool = False
    kv_sharing_factor: int = Field(default=1, ge=1)
    learned_positions: bool = False
    embedding_scale: float = Field(default=1.0, gt=0)
    tie_embeddings: bool = False
    logit_softcap: float | None = Field(default=None, gt=0)
    ngram: NGramConfig | None = None
    embedding_norm: bool = False
    trained_length: int | None = Field(default=None, ge=2)
    masked: MaskedConfig | None = None

    @model_validator(mode="after")
    def _validate(self) -> TransformerConfig:
        for name in self.pattern:
            if name not in self.mixers:
                raise ValueError(f"pattern names {name!r}: expected {one_of(name, list(self.mixers))}")
        if unused := set(self.mixers) - set(self.pattern or self.mixers):
            raise ValueError(f"mixers: {sorted(unused)[0]!r} does not occur in pattern {self.pattern}")
        if sum((self.parallel, self.sandwich, self.post_norm)) > 1:
            raise ValueError("parallel, sandwich and post_norm exclude each other")
        if not (self.pre_norm or self.sandwich):
            raise ValueError("pre_norm = false needs sandwich = true: the norms after both branches")
        if self.kv_sharing_factor > 1:
            self._check_shared_kv()
        if self.masked is not None:
            self._check_masked(self.masked)
        if self.trained_length is not None and (self.shared_rope is None or self.shared_rope[0].scaling):
            raise ValueError(
                f"trained_length ({self.trained_length}) needs attention in every layer, with one rope without scaling"
            )
        if self.norm == "layer" and self.norm_offset:
            raise ValueError(f"norm_offset ({self.norm_offset}) is for norm = 'rms' only")
        if self.experts is not None and any(not 0 <= n < self.n_layers for n in self.experts.dense_layers):
            raise ValueError(
                f"experts.dense_layers {self.experts.dense_layers} must lie in 0 .. {self.n_layers - 1}"
            )
        return self

    def _check_shared_kv(self) -> None:
        """Check that layers which reuse keys fit the layer that computes them: key shape, positions and window."""
        mixers = self.layer_mixers()
        for n, mixer in enumerate(mixers):
            first = mixers[n - n % self.kv_sharing_factor]
            if isinstance(mixer, AttentionConfig) and mixer.fused_qkv:
                raise ValueError(f"kv_sharing_factor ({self.kv_sharing_factor}) excludes fused_qkv")
            if not (isinstance(mixer, AttentionConfig) and isinstance(first, AttentionConfig)):
                raise ValueError(
                    f"kv_sharing_factor ({self.kv_sharing_factor}): layer {n} is not multi-head attention"
                )
            shared = ("n_kv_heads", "head_dim", "rope", "window")
            if wrong := [field for field in shared if getattr(mixer, field) != getattr(first, field)]:
                raise ValueError(
                    f"kv_sharing_factor ({self.kv_sharing_factor}): layer {n} has not the {wrong[0]} of the layer that "
                    f"provides its keys, {n - n % self.kv_sharing_factor}"
                )

    def _check_masked(self, masked: MaskedConfig) -> None:
        """Check that no part of the network reads ids in one direction."""
        found = {f"mask_id ({masked.mask_id})": masked.mask_id >= self.vocab_size}
        found |= {"ngram": self.ngram is not None, "experts": self.experts is not None}
        for name, mixer in self.mixers.items():
            if not isinstance(mixer, AttentionConfig):
                raise ValueError(f"masked: mixer {name!r} is {mixer.kind!r}, which is causal; use 'heads'")
            options = {option: getattr(mixer, option) for option in ("window", "stride", "block", "smear")}
            options["backend"] = mixer.backend if mixer.backend != "auto" else None
            found |= {f"mixers.{name}.{option} = {value}": bool(value) for option, value in options.items()}
        if wrong := [name for name, is_wrong in found.items() if is_wrong]:
            raise ValueError(f"masked excludes {wrong[0]}; the network has {self.vocab_size} ids")

    def layer_names(self) -> list[str]:
        """Return the name of each layer's mixer: the pattern, repeated."""
        pattern = self.pattern or tuple(self.mixers)
        return [pattern[n % len(pattern)] for n in range(self.n_layers)]

    def layer_mixers(self) -> list[AttentionConfig | MLAConfig | CustomMixer]:
        """Return the configuration of each layer's mixer."""
        return [self.mixers[name] for name in self.layer_names()]

    def describe_layers(self) -> str:
        """Describe the layers in a few words."""
        kinds = " and ".join(dict.fromkeys(mixer.describe() for mixer in self.layer_mixers()))
        experts = self.experts
        return kinds + (f", {experts.n_experts} experts, top {experts.top_k}" if experts else "")

    def describe_lookups(self) -> str:
        """Describe the weights that are looked up."""
        found = [] if self.tie_embeddings else ["embedding"]
        found += [] if self.ngram is None else [f"{len(self.ngram.orders)} n-gram tables"]
        return " and ".join(found) or "nothing: tied embedding"

    @property
    def has_custom_mixers(self) -> bool:
        """Return whether a layer is a `CustomMixer`, whose cost has no formula."""
        return any(isinstance(mixer, CustomMixer) for mixer in self.mixers.values())

    @property
    def shared_rope(self) -> tuple[Rope, int] | None:
        """Return the rotary positions and the head_dim of every layer, if all are attention and have the same ones."""
        first, *others = (
            (m.rope, m.head_dim) if isinstance(m, AttentionConfig) else (None, 0)
            for m in self.mixers.values()
        )
        rope, head_dim = first
        return None if rope is None or any(other != first for other in others) else (rope, head_dim)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers


def whorl_decoder(
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int = 64,
    smear_keys: bool = True,
    ngram_orders: Sequence[int] = (2, 3),
    ngram_buckets: int = 65_536,
    **fields: Any,
) -> TransformerConfig:
    """Return the shape of the project's own decoder, tuned as a whole; `fields`: further ones of a `TransformerConfig`.

        x  = rms(embedding[ids] + n-gram embedding[ids])
        x += attention(rms(x));  x += mlp(rms(x))                                      n_layers times

    Its attention has QK-norm with a learned temperature, smeared keys and one matrix for queries, keys and values. Its MLP
    has a squared ReLU.
    """
    attention = AttentionConfig(
        n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, qk_norm=True, learned_temperature=True,
        fused_qkv=True, smear=smear_keys, backend="blocked",
    )  # fmt: skip
    ngram = NGramConfig(orders=tuple(ngram_orders), buckets=ngram_buckets) if ngram_orders else None
    return TransformerConfig.model_validate(
        {
            "vocab_size": vocab_size, "d_model": d_model, "n_layers": n_layers, "mixers": {"attention": attention},
            "mlp": "relu2", "ngram": ngram, "embedding_norm": True, **fields,
        }
    )  # fmt: skip


def masked_decoder(
    config: TransformerConfig, mask_id: int, block: int | None, length: int
) -> TransformerConfig:
    """Return the masked diffusion model of a decoder's shape, for rows of up to `length` positions.

    N-grams and smeared keys read the ids before a position, and are left out.

    Raises:
        ConfigError: a mixer reads ids in one direction; or the network has experts.
    """
    mixers, plain = dict(config.mixers), {"smear": False, "backend": "auto"}
    mixers |= {n: m.model_copy(update=plain) for n, m in mixers.items() if isinstance(m, AttentionConfig)}
    changed = {
        "mixers": mixers, "ngram": None, "trained_length": None, "max_length": length,
        "vocab_size": max(config.vocab_size, mask_id + 1), "masked": MaskedConfig(mask_id=mask_id, block=block),
    }  # fmt: skip
    try:
        return TransformerConfig.model_validate({**dict(config), **changed})
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
