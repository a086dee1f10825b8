"""Upgrade saved models whose fields or parameters have been renamed since: `config.json`, and names of tensors.

| where                                  | old            | new                 |
|----------------------------------------|----------------|---------------------|
| `Transformer`                          | `share_keys`   | `kv_sharing_factor` |
| `Transformer`, `experts`               | `normalise`    | `norm_topk_prob`    |
| `Transformer`, `mixers.*.rope.scaling` | `attention`    | `attention_factor`  |
| `Transformer`, `mixers.*.options`      | `path`         | `backend`           |
| any model                              | `quantisation` | `quantization`      |
| any model, `quantization`              | `group`        | `group_size`        |
| any model, `quantization`              | `memory`       | `ngram`             |

Before the project's own decoder was a `Transformer`, it was a class with a flat configuration, and its parameters were
`blocks.N.attention.*` in place of `blocks.N.mixer.*`. Its objects have no `mixers`.

Only files pass through here: recipes and calls must use today's names. Values are not checked; the models of pydantic
that receive the result do that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from whorl.models.transformer_config import AttentionConfig, Rope, TransformerConfig, whorl_decoder

RECURRENT_KINDS = ("rnn", "lstm", "gru")
# Names of adapters in checkpoints have colons in place of dots.
PARAMETER_NAMES = (
    (re.compile(r"(blocks[.:]\d+[.:])attention_norm\b"), r"\1mixer_norm"),
    (re.compile(r"(blocks[.:]\d+[.:])attention([.:])smear\b"), r"\1mixer\2smear\2share"),
    (re.compile(r"(blocks[.:]\d+[.:])attention\b"), r"\1mixer"),
)


def upgrade_transformer(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `TransformerConfig` under today's names.

    Raises:
        ValidationError: a field of the former decoder is wrong. TypeError: one is missing.
    """
    if "mixers" not in data:
        return _upgrade_decoder(data).model_dump(mode="json")
    data = _renamed(data, {"share_keys": "kv_sharing_factor"})
    if isinstance(data.get("experts"), Mapping):
        data["experts"] = _renamed(data["experts"], {"normalise": "norm_topk_prob"})
    if isinstance(data.get("mixers"), Mapping):
        data["mixers"] = {name: _upgrade_mixer(mixer) for name, mixer in data["mixers"].items()}
    return data


def upgrade_parameter_name(name: str) -> str:
    """Return a name that has the name of a parameter or layer of the former decoder in it, under today's name."""
    for old, new in PARAMETER_NAMES:
        name = old.sub(new, name)
    return name


def has_former_decoder(names: Iterable[str]) -> bool:
    """Return whether these are names of the former decoder: no other network had one matrix for all projections."""
    return any(re.search(r"blocks[.:]\d+[.:]attention[.:]qkv\b", name) for name in names)


def upgrade_quantization(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json` with its quantization settings, if any, under today's names."""
    data = _renamed(data, {"quantisation": "quantization"})
    if isinstance(data.get("quantization"), Mapping):
        data["quantization"] = _renamed(data["quantization"], {"group": "group_size", "memory": "ngram"})
    return data


def _upgrade_decoder(data: Mapping[str, Any]) -> TransformerConfig:
    data = {"head_dim": 64, **data}
    rope = Rope(base=data.pop("rope_base", 10_000.0))
    config = whorl_decoder(**data)
    mixers = {
        name: mixer.model_copy(update={"rope": rope})
        for name, mixer in config.mixers.items()
        if isinstance(mixer, AttentionConfig)
    }
    return config.model_copy(update={"mixers": mixers})


def _upgrade_mixer(mixer: Any) -> Any:
    if not isinstance(mixer, Mapping):
        return mixer
    mixer = dict(mixer)
    if mixer.get("kind") in RECURRENT_KINDS and isinstance(mixer.get("options"), Mapping):
        mixer["options"] = _renamed(mixer["options"], {"path": "backend"})
    rope = mixer.get("rope")
    if isinstance(rope, Mapping) and isinstance(rope.get("scaling"), Mapping):
        scaling = _renamed(rope["scaling"], {"attention": "attention_factor"})
        mixer["rope"] = {**rope, "scaling": scaling}
    return mixer


def _renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in data.items()}
