"""Fields and tensors of Hugging Face ViT and CLIP files: meaning, defaults, and errors for unsupported ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.exchange_vision_cases import save_hf_model, transformers

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange import VISION_FAMILIES, import_vision, read_vision_config


def test_clip_config_prefers_legacy_dictionaries() -> None:
    old = {"hidden_size": 99, "num_hidden_layers": 3, "eos_token_id": 2}
    given = {
        "text_config": old,
        "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12},
        "vision_config": {"patch_size": 14},
        "vision_config_dict": None,
    }
    want = transformers.CLIPConfig(**json.loads(json.dumps(given)))
    config = read_vision_config({"model_type": "clip", **given}, "config.json")
    assert (config.text.d_model, config.text.n_layers, config.text.end_id) == (768, 12, 49407)
    assert want.text_config.num_hidden_layers == 12 and want.text_config.eos_token_id == 49407
    assert config.image.patch == want.vision_config.patch_size == 14


# Fields of old files that do not affect the network.
OLD = {
    "add_cross_attention": False, "bos_token_id": 0, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0, "dropout": 0.0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "initializer_factor": 1.0,
    "length_penalty": 1.0, "max_length": 20, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1,
    "pruned_heads": {}, "repetition_penalty": 1.0, "return_dict": True, "temperature": 1.0, "tie_word_embeddings": True,
    "top_k": 50, "top_p": 1.0, "torchscript": False, "transformers_version": "4.16.0", "attention_dropout": 0.0,
}  # fmt: skip
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
# Published config.json files: (fields, total parameters).
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "ViT-B/16": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
         "encoder_stride": 16, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224,
         "intermediate_size": 3072, "layer_norm_eps": 1e-12, "num_attention_heads": 12, "num_channels": 3,
         "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True, "initializer_range": 0.02,
         "id2label": {str(n): f"class {n}" for n in range(1000)}, "label2id": {"crane": 134}},
        86_567_656,
    ),
    "CLIP ViT-B/32": (
        {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512, "logit_scale_init_value": 2.6592,
         "initializer_factor": 1.0, "text_config_dict": None, "vision_config_dict": None,
         "text_config": {**OLD, "eos_token_id": 2, "hidden_size": 512, "intermediate_size": 2048, "hidden_act": "quick_gelu",
                         "model_type": "clip_text_model", "projection_dim": 512, "vocab_size": 49408},
         "vision_config": {**OLD, "hidden_size": 768, "patch_size": 32, "model_type": "clip_vision_model"}},
        151_277_313,
    ),
    "CLIP ViT-L/14": (
        {"model_type": "clip", "projection_dim": 768,
         "text_config_dict": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
         "vision_config_dict": {**LARGE, "patch_size": 14, "projection_dim": 768}},
        427_616_513,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_vision_configs_count_params(name: str) -> None:
    fields, total = PUBLISHED[name]
    with torch.device("meta"):
        model = VISION_FAMILIES[fields["model_type"]].build(read_vision_config(fields, name), torch.float32)
    assert sum(p.numel() for p in model.parameters()) == model.params()["total"] == total


WRONG: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("vit", None, {"qkv_bias": False}, "field 'qkv_bias' is False"),
    ("vit", None, {"hidden_act": "relu"}, "field 'hidden_act' is 'relu'"),
    ("vit", None, {"num_attention_heads": 5}, "n_heads is 5, which does not divide d_model, 24"),
    ("vit", None, {"num_hidden_layers": 0}, r"n_layers is 0: Input should be greater"),
    ("vit", None, {"patch_size": 5}, "patch is 5"),
    ("vit", None, {"image_size": [16, 32]}, "field 'image_size' is .*a square"),
    ("vit", None, {"architectures": ["ViTForMaskedImageModeling"]}, "field 'architectures' is"),
    ("vit", None, {"architectures": None}, "field 'architectures' is missing"),
    ("vit", None, {"head_dim": 16}, "field 'head_dim' is 16"),
    ("vit", None, {"id2label": {}}, "field 'id2label' is"),
    ("vit", None, {"model_type": "deit"}, "field 'model_type' is 'deit'"),
    ("vit", None, {"model_type": None}, "field 'model_type' is missing"),
    ("clip", None, {"architectures": ["CLIPForImageClassification"]}, "field 'architectures' is"),
    ("clip", None, {"projection_dim": 0}, "field 'projection_dim' is 0"),
    ("clip", "text_config", {"eos_token_id": [89, 2]}, "text_config: field 'eos_token_id' is"),
    ("clip", "text_config", {"eos_token_id": 90}, r"end_id \(90\) must be below vocab_size \(90\)"),
    ("clip", "text_config", {"pruned_heads": {"0": [1]}}, "text_config: field 'pruned_heads' is"),
    ("clip", "vision_config", {"hidden_act": "swish"}, "vision_config: field 'hidden_act' is 'swish'"),
    ("clip", "text_config", {"num_hidden_layers": 0}, "EncoderConfig.n_layers is 0: Input should"),
    ("clip", "vision_config", {"zeal": 1}, "vision_config: field 'zeal' is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "part", "change", "message"), WRONG)
def test_vision_config_names_unsupported_field(
    case: str, part: str | None, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_hf_model(case, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    read_vision_config(data, "config.json")
    (data if part is None else data[part]).update(change)
    with pytest.raises(ConfigError, match=f"(?s)config.json.*({message})"):
        read_vision_config(data, "config.json")
    if change == {"zeal": 1}:
        read_vision_config(data, "config.json", ignore=("zeal",))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("vit", "vit.encoder.layer.1.output.dense.weight"),
        ("vit", "classifier.bias"),
        ("clip", "vision_model.embeddings.patch_embedding.weight"),
        ("clip", "logit_scale"),
    ],
)
def test_vision_import_names_damaged_tensor(case: str, name: str, tmp_path: Path) -> None:
    save_hf_model(case, tmp_path / "good")
    weights = load_file(tmp_path / "good" / "model.safetensors")
    for change, message in (
        ({name: None}, rf"tensor '{name}' is missing \(1 in all\)"),
        ({"extra": torch.ones(2)}, r"model.safetensors: tensor 'extra' is unknown"),
        ({name: torch.ones(3, 2)}, rf"tensor '{name}' has the shape \[3, 2\]"),
        ({name: torch.ones(weights[name].shape, dtype=torch.int8)}, rf"tensor '{name}' is of type I8"),
    ):
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        save_file(
            {k: v for k, v in {**weights, **change}.items() if v is not None}, folder / "model.safetensors"
        )
        with pytest.raises(CheckpointError, match=message):
            import_vision(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_vision(folder)
