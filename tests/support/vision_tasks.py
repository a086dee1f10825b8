"""Small tasks of image models on the images of `tests.support.images`, and their models."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.support.images import CAPTIONS
from tests.support.tiny import make_byte_tokenizer, make_decoder
from whorl.models import Transformer
from whorl.models.encoder import EncoderConfig
from whorl.models.vision.flamingo import Captioner
from whorl.objectives.next_token import next_token
from whorl.tracking.seeds import generator
from whorl.vision.config import CaptionerConfig, ContrastiveConfig, ImageClassifierConfig, ViTShape
from whorl.vision.image_set import ImageSet
from whorl.vision.model import VisionConfig, VisionModel, build_clip, build_network, encode_text
from whorl.vision.train import CaptionTask, ClassifierTask, ContrastiveTask, encode_captions

VIT = ViTShape(patch=4, d_model=16, n_layers=1, n_heads=2, mlp_hidden=16)
SMALL: dict[str, Any] = {"steps": 16, "batch_size": 12, "lr": 1e-3, "threads": 1}


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**SMALL, **settings, "run": {"checkpoint_seconds": 1e-9, **settings.get("run", {})}}


@cache
def _decoder_state() -> dict[str, torch.Tensor]:
    """Weights of `make_decoder()`, trained on the captions as texts."""
    tokenizer, model = make_byte_tokenizer(), make_decoder(ngram_orders=())
    ids, mask = encode_captions(CAPTIONS, lambda text: encode_text(tokenizer, text), 24)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    for _ in range(60):
        loss = next_token(
            model(ids[:, :-1]).flatten(0, 1), model.head_weight, ids[:, 1:].flatten(), mask[:, 1:].flatten()
        )
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return model.state_dict()


def caption_decoder() -> Transformer:
    """A language model that writes one of the captions."""
    model = make_decoder(ngram_orders=())
    model.load_state_dict(_decoder_state())
    return model


def classifier_task(images: ImageSet, **settings: Any) -> tuple[ClassifierTask, VisionModel]:
    """A classifier of the images' classes, by default a ViT."""
    config = ImageClassifierConfig(**_settings({"network": VIT, **settings}))
    info = images.info
    shape = VisionConfig(
        kind="classifier", network=config.network, width=len(info.classes), preprocessing=info.preprocessing,
        classes=info.classes,
    )  # fmt: skip
    network = build_network(shape, generator(config.seed, "weights"))
    model = VisionModel("classifier", network, info.preprocessing, info.classes, config=shape)
    return ClassifierTask(network, images, config), model


def contrastive_task(images: ImageSet, **settings: Any) -> tuple[ContrastiveTask, VisionModel]:
    """A CLIP over bytes."""
    config = ContrastiveConfig(**_settings({"network": VIT, "d_joint": 8, **settings}))
    tokenizer = make_byte_tokenizer()
    text = EncoderConfig(
        vocab_size=tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, mlp_hidden=16, max_length=24, causal=True,
        end_id=tokenizer.eos_id,
    )  # fmt: skip
    shape = VisionConfig(
        kind="clip", network=config.network, width=8, preprocessing=images.info.preprocessing, text=text,
        clip_tower=True,
    )  # fmt: skip
    network = build_clip(shape, generator(config.seed, "weights"))
    model = VisionModel("clip", network, images.info.preprocessing, tokenizer=tokenizer, config=shape)
    captions = images.split("train").captions or ()
    return ContrastiveTask(network, images, model.encode_captions(captions), config), model


def caption_task(
    images: ImageSet, preprocessing: Any = None, **settings: Any
) -> tuple[CaptionTask, VisionModel]:
    """A captioner of an untrained ViT and a language model over bytes that writes captions, both frozen."""
    config = CaptionerConfig(**_settings({"max_length": 24, **settings}))
    info = images.info
    shape = VisionConfig(
        kind="captioner",
        network=VIT,
        width=8,
        preprocessing=preprocessing or info.preprocessing,
        max_length=24,
    )
    rng = generator(config.seed, "weights")
    network = Captioner(caption_decoder(), build_network(shape, rng), generator=rng)
    model = VisionModel(
        "captioner", network, shape.preprocessing, tokenizer=make_byte_tokenizer(), config=shape
    )
    captions = model.encode_captions(images.split("train").captions or ())
    return CaptionTask(network, images, captions, config, shape.preprocessing), model
