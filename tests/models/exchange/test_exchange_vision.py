"""Exchange of ViT and CLIP with Hugging Face: the same logits and vectors after import and export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.exchange_vision_cases import (
    CASES,
    END,
    IDS,
    PUBLISHED,
    close,
    hf_config,
    hf_model,
    hf_outputs,
    images,
    import_quietly,
    save_hf_model,
    transformers,
    whorl_outputs,
)
from tests.support.models.initialization import generator as gen

from whorl.errors import CheckpointError, ConfigError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.exchange import VISION_FAMILIES, export_vision, import_vision, read_vision_config
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import ViT


def resnet() -> ResNet:
    return ResNet(3, 5, widths=(4,), depths=(1,))


def read_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def text(**change: Any) -> Encoder:
    shape = {"vocab_size": 9, "d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_hidden": 16, "max_length": 5}
    return Encoder(EncoderConfig.model_validate({**shape, "causal": True, "end_id": 8, **change}))


def vit(**change: Any) -> ViT:
    return ViT(8, 4, 3, 6, **{"d_model": 12, "n_layers": 1, "n_heads": 2, **change})


def tower(**change: Any) -> ViT:
    return vit(**{"patch_bias": False, "first_norm": True, "head_bias": False, **change})


@pytest.mark.parametrize("case", CASES)
def test_vision_outputs_match_at_any_size_and_after_export(case: str, tmp_path: Path) -> None:
    model = save_hf_model(case, tmp_path / "hf")
    want, stretched = hf_outputs(model), hf_outputs(model, 24)
    assert want[-1].std() > 0.1 and (want[0] - stretched[0][:, : want[0].shape[1]]).abs().max() > 0.01
    imported = import_quietly(tmp_path / "hf")
    assert all(p.requires_grad for p in imported.parameters())
    close(whorl_outputs(imported), want, 1e-4)
    close(whorl_outputs(imported, 24), stretched, 1e-4)
    if isinstance(imported, DualEncoder):  # without a mask, padding is text after the end: not attended to
        torch.testing.assert_close(imported.embed_texts(IDS), want[1], atol=1e-4, rtol=0)

    out, family = tmp_path / "whorl", model.config.model_type
    export_vision(imported, out, family, source=tmp_path / "hf", shard_bytes=20_000)
    assert (out / "model.safetensors.index.json").exists()
    options = {"add_pooling_layer": False} if case == "vit-headless" else {}
    back, info = type(model).from_pretrained(out, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    close(hf_outputs(back.eval()), want, 1e-6)
    again = import_vision(out)
    torch.testing.assert_close(again.state_dict(), imported.state_dict(), atol=0, rtol=0)
    close(whorl_outputs(again), whorl_outputs(imported), 0)
    assert back.config.architectures == model.config.architectures


@pytest.mark.parametrize("case", ["vit", "clip"])
def test_vision_bf16_noise_matches_transformers(case: str, tmp_path: Path) -> None:
    noise = torch.zeros(3, 3)  # rows: Hugging Face, training, inference; columns: outputs
    for seed in range(8):  # averaged: the scores of one vector share its noise
        model, folder = hf_model(case, seed), tmp_path / str(seed)
        model.save_pretrained(folder)
        exact = hf_outputs(model)
        imported = [import_vision(folder, dtype=torch.bfloat16, to_train=train) for train in (True, False)]
        for row, found in enumerate([hf_outputs(model.bfloat16()), *map(whorl_outputs, imported)]):
            for column, (a, b) in enumerate(zip(found, exact, strict=True)):
                assert row == 0 or a.dtype == torch.float32
                noise[row, column] += (a.float() - b).abs().mean()
    noise = noise[:, : len(exact)]
    assert (0.3 * noise[0] < noise[1:]).all() and (noise[1:] < 1.3 * noise[0]).all(), noise
    for to_train, one in zip((True, False), imported, strict=True):
        tower = one.image if isinstance(one, DualEncoder) else one
        assert (tower.blocks[0].mlp.up.weight.dtype == torch.float32) == to_train
        assert tower.norm.weight.dtype == tower.positions.dtype == torch.float32


def test_vision_import_reads_shards_and_exports_bf16(tmp_path: Path) -> None:
    model = save_hf_model("clip", tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    imported = import_vision(tmp_path / "many")
    close(whorl_outputs(imported), hf_outputs(model), 1e-4)
    export_vision(imported, tmp_path / "low", "clip", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "low" / "model.safetensors").values()} == {torch.bfloat16}
    assert read_json(tmp_path / "low")["dtype"] == "bfloat16"
    assert type(model).from_pretrained(tmp_path / "low").dtype == torch.bfloat16


def test_vision_import_warns_about_pooler(tmp_path: Path) -> None:
    model = save_hf_model("vit-headless", tmp_path / "m")
    with pytest.warns(UserWarning, match=r"2 tensors are left out \('pooler.dense.bias'\)"):
        imported = import_vision(tmp_path / "m")
    assert isinstance(imported, ViT) and imported.params()["head"] == 0
    close([imported.features(images(imported))], [hf_outputs(model)[0][:, 0]], 1e-4)
    with pytest.raises(ConfigError, match="classes is 0"):
        imported(images(imported))


def test_clip_import_reads_old_files(tmp_path: Path) -> None:
    model, path = save_hf_model("clip-old", tmp_path), tmp_path / "model.safetensors"
    unused = {f"{tower}_model.embeddings.position_ids": torch.arange(9)[None] for tower in ("text", "vision")}
    save_file(load_file(path) | unused, path)
    imported = import_vision(tmp_path)
    assert isinstance(imported, DualEncoder) and imported.text.config.end_id == END
    close(whorl_outputs(imported), hf_outputs(model), 1e-4)
    with pytest.raises(ConfigError, match="row 1 of ids has no real token end_id"):
        imported.embed_texts(torch.tensor([[3, END], [3, 4]]))
    hidden = imported.text.hidden(torch.tensor([[3, 4, 5], [3, 4, 6]]))
    assert (hidden[0, 2] - hidden[1, 2]).abs().max() > 1e-3
    torch.testing.assert_close(hidden[0, :2], hidden[1, :2], atol=1e-6, rtol=1e-5)  # causal


@pytest.mark.parametrize("scale", [math.log(100.0), 5.5])
def test_clip_import_keeps_large_scale(scale: float, tmp_path: Path) -> None:
    model = hf_model("clip")
    model.logit_scale.data.fill_(scale)
    model.save_pretrained(tmp_path / "m")
    imported = import_vision(tmp_path / "m")
    assert isinstance(imported, DualEncoder)
    assert imported.max_logit_scale == pytest.approx(math.exp(scale), rel=1e-6)
    torch.testing.assert_close(whorl_outputs(imported)[2], hf_outputs(model)[2], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "family", "message"),
    [
        (lambda: vit(pooling="mean"), "vit", "its pooling is 'mean'.*'class'"),
        (lambda: vit(mlp="relu2"), "vit", "field 'hidden_act' is 'relu2'"),
        (lambda: vit(first_norm=True), "vit", "its first_norm is True.*False"),
        (vit, "clip", "it is a ViT.*a DualEncoder"),
        (resnet, "vit", "it is a ResNet"),
        (vit, "llama", "'model_type' is 'llama'"),
        (lambda: DualEncoder(vit(), text()), "clip", "its image.patch_bias is True"),
        (lambda: DualEncoder(tower(), text(causal=False)), "clip", "its text.causal is False"),
        (lambda: DualEncoder(tower(), text(n_classes=2)), "clip", "its text.n_classes is 2"),
        (lambda: DualEncoder(tower(), text(end_id=None)), "clip", "its text.end_id is None"),
        (lambda: DualEncoder(tower(), text(end_id=2)), "clip", "its text.end_id is 2.*8"),
        (lambda: DualEncoder(resnet(), text()), "clip", "the image tower is a ResNet"),
    ],
)
def test_vision_export_names_unsupported(model: Any, family: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        export_vision(model(), tmp_path / "out", family)
    assert not list(tmp_path.iterdir())


def test_vision_export_of_new_models_matches(tmp_path: Path) -> None:
    own: list[tuple[str, Any, Any]] = [
        ("vit", vit(mlp="gelu_tanh"), transformers.ViTForImageClassification),
        ("clip", DualEncoder(tower(mlp="quick_gelu"), text(mlp="quick_gelu")), transformers.CLIPModel),
    ]
    for family, model, cls in own:
        for number, p in enumerate(model.parameters()):
            p.data = torch.randn(p.shape, generator=gen(number)) * 0.3
        export_vision(model, tmp_path / family, family)
        hf_model = cls.from_pretrained(tmp_path / family).eval()
        pictures = torch.randn(2, 3, 8, 8, generator=gen(1))
        ids = torch.tensor([[1, 4, 8, 0], [3, 3, 5, 8]])
        if family == "vit":
            found, want = model(pictures), hf_model(pictures).logits
        else:
            found, want = model.scores(pictures, ids), hf_model(ids, pictures).logits_per_image
        torch.testing.assert_close(found, want, atol=1e-4, rtol=0)
        with pytest.raises(ConfigError, match="is not empty"):
            export_vision(model, tmp_path / family, family)


def test_vision_export_copies_processor_labels_and_ids(tmp_path: Path) -> None:
    source, clip = tmp_path / "vit", tmp_path / "clip"
    save_hf_model("vit", source)
    (source / "preprocessor_config.json").write_bytes(b'{"image_mean": [0.5]}')
    config = read_json(source)
    config["id2label"] = {str(n): name for n, name in enumerate(["crane", "tench", "crane", "hen", "kite"])}
    config["label2id"] = {name: int(n) for n, name in config["id2label"].items()}  # two classes share a name
    (source / "config.json").write_text(json.dumps(config))
    export_vision(import_vision(source), tmp_path / "out", "vit", source=source)
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == b'{"image_mean": [0.5]}'
    written = read_json(tmp_path / "out")
    assert written["id2label"] == config["id2label"] and written["label2id"] == config["label2id"]
    export_vision(vit(), tmp_path / "six", "vit", source=source)
    assert len(read_json(tmp_path / "six")["id2label"]) == 6

    save_hf_model("clip", clip)
    (clip / "tokenizer.json").write_bytes(b"{}")
    export_vision(import_vision(clip), tmp_path / "both", "clip", source=clip)
    assert (tmp_path / "both" / "tokenizer.json").read_bytes() == b"{}"
    part = read_json(tmp_path / "both")["text_config"]
    assert (part["bos_token_id"], part["eos_token_id"], part["pad_token_id"]) == (3, END, 7)


def test_vision_families_are_all_tested() -> None:
    assert {hf_model(case).config.model_type for case in CASES} == set(VISION_FAMILIES)


def test_clip_config_prefers_legacy_dictionaries() -> None:
    old = {"hidden_size": 99, "num_hidden_layers": 3, "eos_token_id": 2}
    newer = {"hidden_size": 768, "num_attention_heads": 12}
    given = {"text_config": old, "text_config_dict": newer, "vision_config": {"patch_size": 14}}
    given["vision_config_dict"] = None
    want = transformers.CLIPConfig(**json.loads(json.dumps(given)))
    config = read_vision_config({"model_type": "clip", **given}, "config.json")
    assert (config.text.d_model, config.text.n_layers, config.text.end_id) == (768, 12, 49407)
    assert want.text_config.num_hidden_layers == 12 and want.text_config.eos_token_id == 49407
    assert config.image.patch == want.vision_config.patch_size == 14


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_vision_configs_count_params(name: str) -> None:
    fields, total = PUBLISHED[name]["config"], PUBLISHED[name]["total"]
    if fields["model_type"] == "vit":
        fields = {**fields, "id2label": {str(n): f"class {n}" for n in range(1000)}}
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
]


@pytest.mark.parametrize(("case", "part", "change", "message"), WRONG)
def test_vision_config_names_unsupported_field(case: str, part: Any, change: Any, message: str) -> None:
    data = json.loads(hf_config(case).to_json_string())
    read_vision_config(data, "config.json")
    (data if part is None else data[part]).update(change)
    with pytest.raises(ConfigError, match=f"(?s)config.json.*({message})"):
        read_vision_config(data, "config.json")
    if change == {"zeal": 1}:
        read_vision_config(data, "config.json", ignore=("zeal",))


DAMAGED = [
    ("vit", "vit.encoder.layer.1.output.dense.weight"),
    ("vit", "classifier.bias"),
    ("clip", "vision_model.embeddings.patch_embedding.weight"),
    ("clip", "logit_scale"),
]


@pytest.mark.parametrize(("case", "name"), DAMAGED)
def test_vision_import_names_damaged_tensor(case: str, name: str, tmp_path: Path) -> None:
    save_hf_model(case, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for change, message in (
        ({name: None}, rf"tensor '{name}' is missing \(1 in all\)"),
        ({"extra": torch.ones(2)}, r"model.safetensors: tensor 'extra' is unknown"),
        ({name: torch.ones(3, 2)}, rf"tensor '{name}' has the shape \[3, 2\]"),
        ({name: torch.ones(weights[name].shape, dtype=torch.int8)}, rf"tensor '{name}' is of type I8"),
    ):
        save_file({k: t for k, t in {**weights, **change}.items() if t is not None}, path)
        with pytest.raises(CheckpointError, match=message):
            import_vision(tmp_path)
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_vision(tmp_path)
