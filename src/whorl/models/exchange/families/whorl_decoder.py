"""Whorl's own decoder (`whorl_decoder`) as a folder with its own modeling file, `exchange/modeling_whorl.py`.

The file has what the planner's networks use: n-gram tables, a norm of the embeddings, QK-norm with a learned temperature,
smeared keys, squared ReLU, and YaRN tables beyond the trained length. A network with anything else is refused by the
comparison of `convert.py`, which names the field.

Subtle: Whorl chooses the rotary tables by the capacity of a row, and by default its server's rows have SERVED_LENGTH
positions. `max_position_embeddings` has that capacity, so that both programs use the same tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whorl.models.exchange.family import (
    ModelFamily,
    embedding_and_head_rules,
    require_attention,
    unsupported_by_family,
)
from whorl.models.exchange.fields import ConfigReader
from whorl.models.exchange.rules import ConversionRule, unchanged
from whorl.models.transformer_block import YARN_FACTOR
from whorl.models.transformer_config import Rope, TransformerConfig, whorl_decoder

MODELING_FILE = Path(__file__).parent.parent / "modeling_whorl.py"
CLASSES = {"AutoConfig": "WhorlConfig", "AutoModel": "WhorlModel", "AutoModelForCausalLM": "WhorlForCausalLM"}
SERVED_LENGTH = 2048  # the default of `EngineConfig.max_model_len`
# Fields of config.json, and of a `TransformerConfig` or its attention.
SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "n_layers", "intermediate_size": "mlp_hidden",
    "original_max_length": "max_length",
}  # fmt: skip
HEADS = {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"}


def read_whorl_decoder(fields: ConfigReader) -> TransformerConfig:
    fields.must_be("hidden_act", "relu2")
    fields.mark_read("max_position_embeddings")
    config = whorl_decoder(
        **{own: fields.get(name, int, above=0) for name, own in (SIZES | HEADS).items()},
        smear_keys=fields.get("smear_keys", bool),
        ngram_orders=fields.get("ngram_orders", list, []),
        ngram_buckets=fields.get("ngram_buckets", int, above=0),
        norm_eps=fields.get("rms_norm_eps", float, above=0),
        tie_embeddings=fields.get("tie_word_embeddings", bool),
        logit_softcap=fields.optional("logit_softcap", float, above=0),
        trained_length=fields.optional("trained_length", int, above=1),
    )
    rope = Rope(base=fields.get("rope_base", float, above=1))
    mixers = {name: m.model_copy(update={"rope": rope}) for name, m in config.mixers.items()}
    return config.model_copy(update={"mixers": mixers})


def write_whorl_decoder(config: TransformerConfig) -> dict[str, Any]:
    heads, trained = require_attention(config)[0], config.trained_length
    if heads.rope is None:
        raise unsupported_by_family("the mixer of layer 0 has no rope", "rotary positions")
    served = config.max_length
    if trained is not None:
        served = min(int(YARN_FACTOR * trained), max(SERVED_LENGTH, trained))
    return {
        "auto_map": {name: f"{MODELING_FILE.stem}.{kind}" for name, kind in CLASSES.items()},
        **{name: getattr(config, own) for name, own in SIZES.items()},
        **{name: getattr(heads, own) for name, own in HEADS.items()},
        "hidden_act": "relu2",
        "rms_norm_eps": config.norm_eps,
        "rope_base": heads.rope.base,
        "smear_keys": heads.smear,
        "ngram_orders": list(config.ngram.orders) if config.ngram else [],
        "ngram_buckets": config.ngram.buckets if config.ngram else 1,
        "logit_softcap": config.logit_softcap,
        "trained_length": trained,
        "max_position_embeddings": served,
        "tie_word_embeddings": config.tie_embeddings,
    }


def whorl_decoder_rules(config: TransformerConfig) -> list[ConversionRule]:
    rules = [
        *embedding_and_head_rules(config),
        unchanged("model.embedding_norm.weight", "embedding_norm.weight"),
    ]
    for n in range(len(config.ngram.orders) if config.ngram else 0):
        rules.append(unchanged(f"model.ngrams.{n}.weight", f"memory.tables.{n}"))
    names = {"attention_norm.weight": "mixer_norm.weight", "mlp_norm.weight": "mlp_norm.weight"}
    names |= {f"attention.{part}": f"mixer.{part}" for part in ("qkv.weight", "out.weight", "temperature")}
    names |= {f"mlp.{part}.weight": f"mlp.{part}.weight" for part in ("up", "down")}
    for n, heads in enumerate(require_attention(config)):
        own = names | ({"attention.smear": "mixer.smear.share"} if heads.smear else {})
        rules += [unchanged(f"model.layers.{n}.{a}", f"blocks.{n}.{b}") for a, b in own.items()]
    return rules


WHORL_DECODER = ModelFamily(
    "whorl_decoder",
    "WhorlForCausalLM",
    read_whorl_decoder,
    write_whorl_decoder,
    whorl_decoder_rules,
    code=(MODELING_FILE,),
)
