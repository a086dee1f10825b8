"""Upgrade `config.json` objects of saved models whose fields have been renamed since.

| where                                  | old            | new                 |
|----------------------------------------|----------------|---------------------|
| `Transformer`                          | `share_keys`   | `kv_sharing_factor` |
| `Transformer`, `experts`               | `normalise`    | `norm_topk_prob`    |
| `Transformer`, `mixers.*.rope.scaling` | `attention`    | `attention_factor`  |
| `Transformer`, `mixers.*.options`      | `path`         | `backend`           |
| any model                              | `quantisation` | `quantization`      |
| any model, `quantization`              | `group`        | `group_size`        |
| any model, `quantization`              | `memory`       | `ngram`             |

Only files pass through here: recipes and calls must use today's names. Values are not checked; the models of pydantic
that receive the result do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECURRENT_KINDS = ("rnn", "lstm", "gru")


def upgrade_transformer(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `TransformerConfig` under today's names."""
    data = _renamed(data, {"share_keys": "kv_sharing_factor"})
    if isinstance(data.get("experts"), Mapping):
        data["experts"] = _renamed(data["experts"], {"normalise": "norm_topk_prob"})
    if isinstance(data.get("mixers"), Mapping):
        data["mixers"] = {name: _upgrade_mixer(mixer) for name, mixer in data["mixers"].items()}
    return data


def upgrade_quantization(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json` with its quantization settings, if any, under today's names."""
    data = _renamed(data, {"quantisation": "quantization"})
    if isinstance(data.get("quantization"), Mapping):
        data["quantization"] = _renamed(data["quantization"], {"group": "group_size", "memory": "ngram"})
    return data


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
