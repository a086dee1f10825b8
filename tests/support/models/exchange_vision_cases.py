"""Small Hugging Face ViT and CLIP models, for the tests of models/exchange."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.initialization import generator as gen
from whorl.models.exchange import import_vision
from whorl.models.vision.clip import DualEncoder

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VIT: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "image_size": 16,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip
END = 89
TEXT: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 10, "eos_token_id": END, "pad_token_id": 7, "bos_token_id": 3,
}  # fmt: skip
IMAGE: dict[str, Any] = {key: value for key, value in VIT.items() if key != "num_labels"}
GELU = {"hidden_act": "gelu", "layer_norm_eps": 1e-2}
CLIP: dict[str, Any] = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 12}
# name -> (Hugging Face class, its configuration class, fields)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "vit-gelu-new": ("ViTForImageClassification", "ViTConfig", {**VIT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "vit-grey": ("ViTForImageClassification", "ViTConfig", {**VIT, "num_channels": 1, "image_size": [16, 16]}),
    "vit-headless": ("ViTModel", "ViTConfig", VIT),
    "clip": ("CLIPModel", "CLIPConfig", CLIP),
    "clip-gelu": ("CLIPModel", "CLIPConfig", {**CLIP, "text_config": TEXT | GELU, "vision_config": IMAGE | GELU}),
    "clip-old": ("CLIPModel", "CLIPConfig", {**CLIP, "text_config": {**TEXT, "eos_token_id": 2}}),
}  # fmt: skip


def hf_config(case: str) -> Any:
    cls, config, fields = CASES[case]
    return getattr(transformers, config)(**fields, architectures=[cls])


def hf_model(case: str, seed: int = 0) -> Any:
    """Return a tiny Hugging Face model with random weights, norms included, so that swapped ones are noticed."""
    torch.manual_seed(seed)
    model = getattr(transformers, CASES[case][0])(hf_config(case)).eval()
    for number, p in enumerate(model.parameters()):
        noise = torch.randn(p.shape, generator=gen(100 * seed + number)) * 0.2
        p.data = noise + (p.data if p.dim() < 2 else 0)
    return model


def save_hf_model(case: str, folder: Path, **options: Any) -> Any:
    model = hf_model(case)
    model.save_pretrained(folder, **options)
    return model


def images(model: Any, size: int = 16) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    channels = config.channels if hasattr(config, "channels") else config.num_channels
    return torch.randn(3, channels, size, size, generator=gen(1))


# Published config.json files, with the number of parameters.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())["vision"]
# The first END of a row is pooled. Padding may follow it; some tokenizers pad with END itself.
IDS = torch.tensor([[3, 5, 88, 17, END, 7, 7], [3, 60, END, END, END, END, END], [3, 4, 5, 6, 8, 9, END]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()


@torch.no_grad()
def hf_outputs(model: Any, size: int = 16) -> list[torch.Tensor]:
    pictures = images(model, size).to(model.dtype)
    if isinstance(model, transformers.CLIPModel):
        inputs = {"input_ids": IDS, "pixel_values": pictures, "attention_mask": MASK.long()}
        out = model(**inputs, interpolate_pos_encoding=size != 16)
        return [out.image_embeds, out.text_embeds, out.logits_per_image]
    out = model(pictures, interpolate_pos_encoding=size != 16)
    return [out.logits if "logits" in out else out.last_hidden_state]


@torch.no_grad()
def whorl_outputs(model: Any, size: int = 16) -> list[torch.Tensor]:
    if isinstance(model, DualEncoder):
        pictures = images(model.image, size)
        return [model.embed_images(pictures), model.embed_texts(IDS, MASK), model.scores(pictures, IDS, MASK)]
    return [model(images(model, size)) if model.config.classes else model.tokens(images(model, size))]


def import_quietly(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pooler.*")
        return import_vision(folder, **options)


def close(found: list[torch.Tensor], want: list[torch.Tensor], atol: float) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)
