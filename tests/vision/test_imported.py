"""ViT and CLIP folders of `transformers`: preprocessing, classes and tokenizer of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.cli import refuse
from tests.support.images import encoded, half_dark, write_half_dark
from tests.support.models.initialization import draw_zeros, generator
from tests.support.tiny import make_byte_tokenizer
from tests.support.vision_tasks import contrastive_task

from whorl.errors import ConfigError
from whorl.models.exchange import export_vision
from whorl.models.vision.vit import ViT
from whorl.store import Build, Store
from whorl.vision.load import load_vision

PROCESSOR = {
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "resample": 2,
    "size": {"height": 8, "width": 8},
}  # fmt: skip
IMAGES = np.stack([half_dark(kind, np.random.default_rng(kind)) for kind in range(3)])


def write_vit(folder: Path, *, channels: int = 3, processor: dict[str, Any] | None = PROCESSOR) -> ViT:
    """Write an untrained ViT with the classes cat, dog and fish; return it."""
    model = draw_zeros(
        ViT(8, 4, channels, 3, d_model=16, n_layers=1, n_heads=2, mlp_hidden=16, generator=generator())
    ).eval()
    export_vision(model, folder, "vit")
    path = folder / "config.json"
    labels = {"id2label": {"0": "cat", "1": "dog", "2": "fish"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **labels}))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def normalized(mean: Any = PROCESSOR["image_mean"], std: Any = PROCESSOR["image_std"]) -> torch.Tensor:
    return torch.tensor(((IMAGES / 255 - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)


def test_imported_vit_classifies_with_its_preprocessing(tmp_path: Path) -> None:
    network = write_vit(tmp_path / "vit")
    model = load_vision(tmp_path / "vit")
    assert model.preprocessing.shape.fit == "stretch" and model.preprocessing.shape.resample == "bilinear"
    classes, found = model.classify(IMAGES)
    assert classes == ["cat", "dog", "fish"]
    torch.testing.assert_close(found, network(normalized()).softmax(dim=1).detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="the classifier was imported"):
        model.save(tmp_path / "again")


def test_imported_clip_is_zero_shot_with_its_tokenizer(tmp_path: Path) -> None:
    own = contrastive_task(write_half_dark(tmp_path / "set", captions=True))[1]
    export_vision(own.network, tmp_path / "clip", "clip")
    processor = {**PROCESSOR, "do_center_crop": True, "size": {"shortest_edge": 8}}
    (tmp_path / "clip" / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    without = load_vision(tmp_path / "clip")
    with pytest.raises(ConfigError, match="imported without its tokenizer"):
        without.classify(IMAGES, ["a", "b"])
    tokenizer = make_byte_tokenizer()
    tokenizer.save(tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    model = load_vision(tmp_path / "clip")
    assert model.preprocessing.shape.fit == "crop"
    ids = model.encode_captions(["ab", "a"])[0]
    assert ids.shape[0] == 2 and (ids == tokenizer.eos_id).sum(dim=1).tolist() == [1, 1]
    texts = model.network.embed_texts(*model.encode_captions(["ab", "a"]))
    images = model.network.embed_images(normalized())
    expected = (model.network.scale * images @ texts.T).softmax(dim=1).detach()
    torch.testing.assert_close(model.classify(IMAGES, ["ab", "a"])[1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (None, "has no preprocessor_config.json"),
        ({**PROCESSOR, "rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({**PROCESSOR, "image_std": [0.5]}, r"have \[3, 1\] values"),
    ],
)
def test_unusable_preprocessing_is_refused(processor: Any, message: str, tmp_path: Path) -> None:
    write_vit(tmp_path / "vit", processor=processor)
    with pytest.raises(ConfigError, match=message):
        load_vision(tmp_path / "vit")


def test_model_of_four_channels_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path / ".whorl")
    store.make_folders()
    with Build(store, kind="vision", name="imported/sat", parents={}, config={}, version=1) as build:
        write_vit(build.path, channels=4, processor={})
    (tmp_path / "top.png").write_bytes(encoded(IMAGES[0]))
    error = refuse(tmp_path, "classify", "sat", "top.png")
    assert "imported/sat takes images of 4 channels" in error and "1 (grey) or 3 (RGB)" in error
