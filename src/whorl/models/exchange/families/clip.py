"""CLIP (Radford et al. 2021, arXiv:2103.00020) in the format of `transformers`: a ViT, a text tower, one space.

The image tower is `vit.py`'s with other names and three differences. The map of patches and the head have no bias, and a
norm precedes the first block (its name, "pre_layrnorm", is misspelled in every file). The text tower is a causal
`Encoder`, whose output is the vector of the end-of-text token. Both have the quick GELU unless the fields differ.

Three subtle parts:

- The end. Files older than 2023 have `eos_token_id` 2, a placeholder for "the position of the largest id", which is the
  end-of-text token in CLIP's vocabulary. So 2 is read as that token's id, and a model whose end really is 2 cannot be
  written.
- The towers' fields. Some files have `text_config_dict` and `vision_config_dict` in addition to `text_config` and
  `vision_config`. Fields that these do not name then have their defaults, regardless of the others.
- The scale. `transformers` does not bound it in inference. Whorl bounds it at 100, as in the paper's training; a file with
  a larger one (some exist) moves the bound to it (`vision.py`), so that scores are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from whorl.errors import ConfigError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.exchange.families.vit import (
    LEGACY_FIELDS,
    VisionFamily,
    patch_rule,
    read_blocks,
    read_grid,
    weight_bias_rules,
    write_blocks,
    write_grid,
)
from whorl.models.exchange.fields import ConfigReader
from whorl.models.exchange.rules import ConversionRule, unchanged
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.vit import ViT, ViTConfig

LEGACY_EOS_ID, CLIP_EOS_ID = 2, 49407


class ClipConfig(BaseModel):
    """Configuration of a `DualEncoder` with a ViT image tower; its head is as wide as the common space."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: ViTConfig
    text: EncoderConfig


def read_clip(fields: ConfigReader, ignore: Collection[str] = ()) -> ClipConfig:
    fields.must_be("architectures", ["CLIPModel"])
    fields.mark_read("logit_scale_init_value", *LEGACY_FIELDS)  # the scale is among the tensors
    image, text = _tower(fields, "vision"), _tower(fields, "text")
    if (joint := fields.get("projection_dim", int, 512)) < 1:
        raise fields.error("projection_dim", "at least 1")
    pictures = ViTConfig(
        **read_grid(image, 32),
        **read_blocks(image, 768, 3072, 12, "quick_gelu"),
        classes=joint,
        eps=image.get("layer_norm_eps", float, 1e-5),
        patch_bias=False,
        first_norm=True,
        head_bias=False,
    )
    config = ClipConfig(image=pictures, text=_read_text(text))
    text.require_causal()
    for part in (fields, image, text):
        part.reject_unread(ignore)
    return config


def _tower(fields: ConfigReader, name: str) -> ConfigReader:
    """Return the fields of a tower. Its `projection_dim` counts for a model of this tower alone."""
    outer = {key: fields.optional(key, dict) for key in (f"{name}_config_dict", f"{name}_config")}
    key = next((key for key, value in outer.items() if value is not None), f"{name}_config")
    tower = ConfigReader(outer[key] or {}, f"{fields.source}: {key}")
    tower.mark_read("projection_dim", *LEGACY_FIELDS)
    return tower


def _read_text(text: ConfigReader) -> EncoderConfig:
    vocab_size, end = text.get("vocab_size", int, 49408), text.get("eos_token_id", int, CLIP_EOS_ID)
    return EncoderConfig(
        **read_blocks(text, 512, 2048, 8, "quick_gelu"),
        vocab_size=vocab_size,
        max_length=text.get("max_position_embeddings", int, 77),
        norm_eps=text.get("layer_norm_eps", float, 1e-5),
        causal=True,
        end_id=min(vocab_size - 1, CLIP_EOS_ID) if end == LEGACY_EOS_ID else end,
    )


def write_clip(config: ClipConfig) -> dict[str, Any]:
    i, t = config.image, config.text
    if t.end_id is None:
        raise ConfigError("this model cannot be written as 'clip': its text.end_id is None", expected="an id")
    return {
        "architectures": ["CLIPModel"],
        "projection_dim": i.classes,
        "vision_config": {
            "model_type": "clip_vision_model",
            "projection_dim": i.classes,
            "layer_norm_eps": i.eps,
            **write_grid(i),
            **write_blocks(i.d_model, i.n_layers, i.n_heads, i.mlp, i.mlp_hidden),
        },
        "text_config": {
            "model_type": "clip_text_model",
            "projection_dim": i.classes,
            "layer_norm_eps": t.norm_eps,
            "vocab_size": t.vocab_size,
            "max_position_embeddings": t.max_length,
            "eos_token_id": t.end_id,
            **write_blocks(t.d_model, t.n_layers, t.n_heads, t.mlp, t.mlp_hidden),
        },
    }


_BLOCK = {
    "layer_norm1": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.out_proj": "attention.out",
    "layer_norm2": "mlp_norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


def clip_rules(config: ClipConfig) -> list[ConversionRule]:
    v, t = "vision_model.", "text_model."
    rules = [
        unchanged("logit_scale", "log_scale"),
        unchanged("visual_projection.weight", "image.head.weight"),
        unchanged("text_projection.weight", "projection.weight"),
        unchanged(f"{v}embeddings.class_embedding", "image.class_token"),
        patch_rule(f"{v}embeddings.patch_embedding.weight", "image.embedding.linear.weight", config.image),
        unchanged(f"{v}embeddings.position_embedding.weight", "image.positions"),
        *weight_bias_rules(v, "image.", {"pre_layrnorm": "first_norm", "post_layernorm": "norm"}),
        unchanged(f"{t}embeddings.token_embedding.weight", "text.embedding"),
        unchanged(f"{t}embeddings.position_embedding.weight", "text.positions.weight"),
        *weight_bias_rules(t, "text.", {"final_layer_norm": "final_norm"}),
    ]
    for theirs, ours, n_layers in ((v, "image", config.image.n_layers), (t, "text", config.text.n_layers)):
        for n in range(n_layers):
            rules += weight_bias_rules(f"{theirs}encoder.layers.{n}.", f"{ours}.blocks.{n}.", _BLOCK)
    return rules


def _build(config: ClipConfig, dtype: torch.dtype) -> DualEncoder:
    return DualEncoder(ViT(**config.image.model_dump(), dtype=dtype), Encoder(config.text, dtype=dtype))


def _describe(model: DualEncoder) -> ClipConfig:
    if not isinstance(model.image, ViT):
        raise ConfigError(f"the image tower is a {type(model.image).__name__}", expected="a ViT")
    return ClipConfig(image=model.image.config, text=model.text.config)


CLIP = VisionFamily(
    "clip",
    DualEncoder,
    _describe,
    _build,
    read_clip,
    write_clip,
    clip_rules,
    ignored_tensors=r".*\.embeddings\.position_ids",  # 0, 1, 2, ... in old files
    sub_fields=(("text_config", "bos_token_id"), ("text_config", "pad_token_id")),
)
