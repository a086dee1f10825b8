"""Strict reading of a `config.json`: each field is read, listed as harmless, or rejected.

An overlooked field gives a model that runs with slightly wrong outputs, which is hard to detect. So `ConfigReader` marks
the fields that a family's table reads. Fields about training, text or other programs are listed in `IGNORED_FIELDS`.
`reject_unread` rejects all others by name, unless they are empty or off (null, false, no entries). The caller can
declare a field harmless with `ignore`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from whorl.errors import ConfigError, one_of
from whorl.nn.rotary import RopeScaling

T = TypeVar("T")

# Fields that do not change the network's outputs: other programs' bookkeeping, training only, or about text.
IGNORED_FIELDS = frozenset(
    [
        *(
            "_name_or_path",
            "architectures",
            "auto_map",
            "name_or_path",
            "transformers_version",
            "task_specific_params",
        ),
        *(
            "attn_implementation",
            "cache_implementation",
            "dtype",
            "torch_dtype",
            "use_cache",
            "problem_type",
            "ep_size",
        ),
        *(
            "attention_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "hidden_dropout",
            "resid_pdrop",
            "initializer_range",
        ),
        *("aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "seq_aux"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "gradient_checkpointing", "pretraining_tp"),
        *(
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "max_window_layers",
            "n_ctx",
            "reorder_and_upcast_attn",
        ),
        *(
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ),
    ]
)

# Numbers that decide memory before the weights are read, and the largest that is read.
MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 10_000),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1 << 24),
}


class ConfigReader:
    """Reader of a configuration, field by field.

    Args:
        data: the object in `config.json`; source: its path, for messages.
    """

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.source = data, where
        self._read: set[str] = {"model_type"}

    def get(
        self,
        name: str,
        kind: type[T] | tuple[type[T], ...],
        default: T | None = None,
        *,
        above: float | None = None,
    ) -> T:
        """Return a field of a type. None in the file counts as absent.

        Raises:
            ConfigError: it is absent and has no default, has another type, or is a number not larger than `above`.
        """
        value = self.optional(name, kind, above=above)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, self._name(kind))
        return default

    def optional(
        self, name: str, kind: type[T] | tuple[type[T], ...], *, above: float | None = None
    ) -> T | None:
        """Return a field of a type, or None where it is absent. Raises as `get` does."""
        self._read.add(name)
        value = self.data.get(name)
        if value is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # JSON writes 10000 for a float, and a bool is an int in Python.
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(name, self._name(kind))
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(name, "a finite number")
        if name in MOST and isinstance(value, int) and value > MOST[name]:
            raise self.error(name, f"at most {MOST[name]:,}")
        if above is not None and isinstance(value, int | float) and not value > above:
            raise self.error(name, f"{self._name(kind)} above {above:g}")
        return value

    def divides(self, name: str, value: int, of: str, whole: int) -> int:
        """Return `value`, given or implied by the field `name`, if it divides `whole`, the value of `of`.

        Raises:
            ConfigError: it does not.
        """
        if whole % value:
            meant = "" if self.data.get(name) is not None else f"; absent, it means {value}"
            raise self.error(name, f"a divisor of {of} ({whole}){meant}")
        return value

    def choose(self, name: str, options: dict[str, T], default: str | None = None) -> T:
        """Return the option for a field's value.

        Raises:
            ConfigError: a value that is not among `options`.
        """
        value = self.get(name, str, default)
        if value not in options:
            raise self.error(name, one_of(value, list(options)))
        return options[value]

    def must_be(self, name: str, *allowed: Any) -> None:
        """Reject a field that has any value but these (absent is allowed)."""
        self._read.add(name)
        value = self.data.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, " or ".join(repr(a) for a in allowed) or "no such field")

    def require_causal(self) -> None:
        """Reject `is_causal` unless it is absent or true: programs take null for false, and tokens would see later ones."""
        self._read.add("is_causal")
        if self.data.get("is_causal", True) is not True:
            raise ConfigError(
                f"{self.source}: field 'is_causal' is {self.data['is_causal']!r}", expected="true"
            )

    def mark_read(self, *names: str) -> None:
        """Mark fields that are redundant in this family."""
        self._read.update(names)

    def reject_unread(self, ignore: Collection[str] | None = ()) -> None:
        """Reject unread fields. ignore: fields that the caller declares harmless; None where this is not possible.

        Raises:
            ConfigError: an unread field exists and is not empty.
        """
        for name in sorted(set(self.data) - self._read - IGNORED_FIELDS - set(ignore or ())):
            if self.data[name] in (None, False, [], {}, ""):
                continue
            raise ConfigError(
                f"{self.source}: field {name!r} is {self.data[name]!r}, which the importer does not support",
                expected="supported fields, or harmless ones",
                do=""
                if ignore is None
                else f"if the field does not change the result, pass ignore=({name!r},), "
                f"or --ignore {name} to `whorl import`",
            )

    def error(self, name: str, expected: str, found_within: Any = None) -> ConfigError:
        """Return an error about a field. found_within: its value, if it is in a nested object."""
        value = self.data.get(name, found_within)
        found = f"is {value!r}" if value is not None else "is missing"
        return ConfigError(f"{self.source}: field {name!r} {found}", expected=expected)

    @staticmethod
    def _name(kind: type | tuple[type, ...]) -> str:
        return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def model_type(data: dict[str, Any], where: str, known: Collection[str]) -> str:
    """Return the family that a `config.json` names.

    Raises:
        ConfigError: none, or one that is not in `known`.
    """
    name = data.get("model_type")
    if isinstance(name, str) and name in known:
        return name
    do = "save the text part separately: this is the multimodal model" if name == "gemma3" else ""
    if name is None:
        do = "write the model again with `save_model`, or add the field, e.g. 'llama'"
    found = "is missing" if name is None else f"is {name!r}"
    raise ConfigError(
        f"{where}: field 'model_type' {found}",
        expected=one_of(name if isinstance(name, str) else "", list(known)),
        do=do,
    )


def read_rope(
    fields: ConfigReader, default_base: float
) -> tuple[float, RopeScaling | None, float, dict[str, Any]]:
    """Return base, scaling, fraction of rotated features, and the parameters, from either form.

    Recent files have `rope_parameters` {rope_type, rope_theta, ...}; older ones `rope_theta` and `rope_scaling` {type or
    rope_type, ...}.

    Raises:
        ConfigError: an unknown type of rotary positions or an unknown parameter of it.
    """
    now, old = fields.optional("rope_parameters", dict), fields.optional("rope_scaling", dict)
    share = fields.optional("partial_rotary_factor", float, above=0)
    now, old = _with_rope_type(now), _with_rope_type(old)
    for name in sorted((now or {}).keys() & (old or {}).keys()):
        if now is not None and old is not None and now[name] != old[name]:
            raise ConfigError(
                f"{fields.source}: field 'rope_scaling' has {name} = {old[name]!r}, and 'rope_parameters' {now[name]!r}",
                expected="the same in both, or only one of them",
            )
    given = {**(old or {}), **(now or {})}
    given.setdefault("rope_theta", fields.get("rope_theta", float, default_base))
    if share is not None:
        given.setdefault("partial_rotary_factor", share)
    return parse_rope(given, "rope_parameters" if now is not None else "rope_scaling", fields)


def _with_rope_type(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return parameters of rotary positions whose key `type`, the older name, is `rope_type`."""
    if params is None or "type" not in params:
        return params
    return {"rope_type": params["type"], **{name: value for name, value in params.items() if name != "type"}}


_ROPE_NAMES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def parse_rope(
    params: dict[str, Any], name: str, fields: ConfigReader
) -> tuple[float, RopeScaling | None, float, dict[str, Any]]:
    """Return the same as `read_rope`, from one object of parameters."""
    inner = ConfigReader(params, f"{fields.source}: {name}")
    kind = inner.optional("rope_type", str) or inner.optional("type", str) or "default"
    inner.mark_read("rope_type", "type")
    base = inner.get("rope_theta", float, above=1)
    share = inner.get("partial_rotary_factor", float, 1.0, above=0)
    if kind != "default" and kind not in _ROPE_NAMES:
        raise ConfigError(
            f"{inner.source}: field 'rope_type' is {kind!r}", expected=one_of(kind, ["default", *_ROPE_NAMES])
        )
    if kind == "default":
        inner.mark_read("factor")
    inner.mark_read(*_ROPE_NAMES.get(kind, ()))
    inner.reject_unread(None)
    if kind == "default":
        return base, None, share, params
    factor = inner.get("factor", float)
    if factor < 1:
        raise inner.error("factor", "at least 1")
    if kind == "linear":
        return base, RopeScaling("linear", factor), share, params
    length = inner.optional("original_max_position_embeddings", int, above=0)
    length = length or fields.optional("max_position_embeddings", int, above=0)
    if length is None:
        raise inner.error("original_max_position_embeddings", "the longest row of training")
    if kind == "llama3":
        ramp = _ramp(inner, "low_freq_factor", "high_freq_factor", (None, None))
        return base, RopeScaling("llama3", factor, length, *ramp), share, params
    ramp = _ramp(inner, "beta_slow", "beta_fast", (1.0, 32.0))
    gain, truncate = _yarn_attention_factor(inner, factor), inner.get("truncate", bool, True)
    return base, RopeScaling("yarn", factor, length, *ramp, gain, truncate), share, params


def _ramp(
    inner: ConfigReader, low: str, high: str, default: tuple[float | None, float | None]
) -> tuple[float, float]:
    """Return the bounds of the ramp of a scaling, from the fields of these names."""
    least, most = inner.get(low, float, default[0], above=0), inner.get(high, float, default[1])
    if not least < most:
        raise inner.error(high, f"above {low} ({least:g})")
    return least, most


def _yarn_attention_factor(inner: ConfigReader, factor: float) -> float | None:
    """Return the factor of cos and sin, where it differs from YaRN's default (DeepSeek's two `mscale`s)."""
    given = inner.optional("attention_factor", float, above=0)
    above, below = inner.optional("mscale", float), inner.optional("mscale_all_dim", float)
    if given is not None or not (above and below):
        return given
    return yarn_mscale(factor, above) / yarn_mscale(factor, below)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return 0.1 weight ln(factor) + 1 (YaRN, arXiv:2309.00071, eq. 22, with DeepSeek's weight)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return `rope_parameters` of recent files.

    Raises:
        ConfigError: a scaling that they cannot express.
    """
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    if scaling.kind not in _ROPE_NAMES:
        raise ConfigError(
            f"rope.scaling is {scaling.kind!r}", expected=one_of(scaling.kind, list(_ROPE_NAMES))
        )
    out: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": base, "factor": scaling.factor}
    if scaling.kind == "linear":
        return out
    low, high = scaling.ramp
    out["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        return out | {"low_freq_factor": low, "high_freq_factor": high}
    out |= {"beta_slow": low, "beta_fast": high, "truncate": scaling.truncate}
    return out if scaling.attention_factor is None else out | {"attention_factor": scaling.attention_factor}


def window_pattern(fields: ConfigReader, n_layers: int, default: Iterable[bool]) -> list[bool]:
    """Return which layers have sliding windows, from `layer_types`.

    Raises:
        ConfigError: a list of another length, or an unknown kind of layer.
    """
    kinds = fields.optional("layer_types", list)
    if kinds is None:
        return list(default)
    if len(kinds) != n_layers:
        raise fields.error("layer_types", f"{n_layers} entries, one per layer")
    known = ["full_attention", "sliding_attention"]
    for kind in kinds:
        if kind not in known:
            raise fields.error("layer_types", f"entries {one_of(str(kind), known)}")
    return [kind == "sliding_attention" for kind in kinds]


def invalid_config_error(error: ValidationError, where: str, family: str) -> ConfigError:
    """Return the error of an invalid configuration, with Whorl's field name."""
    first = error.errors()[0]
    name = ".".join([error.title, *map(str, first["loc"])])
    what = f"{name} is {first['input']!r}" if first["loc"] else name
    return ConfigError(
        f"{where}: {what}: {first['msg'].removeprefix('Value error, ')}",
        expected=f"a possible {family} model",
    )
