"""`load_vision`: the image model in a folder, own or imported."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from whorl.errors import CheckpointError
from whorl.models.serialization import load_model
from whorl.models.vision.flamingo import Captioner
from whorl.models.vision.vit import ViT
from whorl.store.files import load_json, require_regular
from whorl.tokens.hf_tokenizer import HFTokenizer, load_tokenizer
from whorl.tokens.tokenizer import Tokenizer
from whorl.vision.imported import load_imported
from whorl.vision.model import DECODER, VisionConfig, VisionModel, build_clip, build_network


def load_vision(folder: Path, device: str = "cpu") -> VisionModel:
    """Return the model of a folder, for inference.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or of another shape.
        ConfigError: an imported model with unsupported features, or without its preprocessing.
    """
    try:
        data = load_json(folder / "config.json")
        if isinstance(data, dict) and "model_type" in data:
            return load_imported(folder, data, device)
        config = VisionConfig.model_validate(data)
        weights = load_file(require_regular(folder / "model.safetensors"))
    except (OSError, ValueError, ValidationError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read an image model from {folder}: {error}",
            expected="config.json and model.safetensors of the steps `image_classifier`, `clip` and `captioner`",
            do="use a model of the kind vision that `whorl ls` lists",
        ) from error
    tokenizer: Tokenizer | HFTokenizer | None = None
    network: nn.Module
    if config.kind == "clip":
        network, tokenizer = build_clip(config), load_tokenizer(folder)
    else:
        network = build_network(config)
    if config.kind == "captioner":
        decoder, tokenizer = load_model(folder / DECODER, to_train=True), load_tokenizer(folder / DECODER)
        network = Captioner(decoder, cast(ViT, network), cross_attn_every=config.cross_attn_every)
    state = network.state_dict()
    own = {
        name: t for name, t in state.items() if config.kind != "captioner" or not name.startswith("decoder.")
    }
    expected, found = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (own, weights))
    if expected != found:
        name = min(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
        raise CheckpointError(
            f"{folder / 'model.safetensors'}: tensor {name!r} is {found.get(name, 'missing')}",
            expected=f"{expected.get(name, 'no such tensor')} by config.json",
        )
    network.load_state_dict({**state, **weights})
    network.to(device).eval()
    return VisionModel(config.kind, network, config.preprocessing, config.classes, tokenizer, config)
