"""A trained image model with everything that its use needs: classes, preprocessing, tokenizer.

    config.json          kind ("classifier", "clip", "captioner"), shape of the network, classes, preprocessing
    model.safetensors    weights and buffers by name
    tokenizer.json       of the captions (CLIP)
    decoder/             the language model of a captioner, with its tokenizer (`models/serialization.py`)

`load.py` reads it, and also ViT and CLIP in the format of `transformers`, as `whorl import` stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.data.images import Pixels
from whorl.errors import ConfigError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.serialization import save_model
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.flamingo import Captioner
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import MLPMixer, ViT
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.tokenizer import Tokenizer
from whorl.vision.config import MixerShape, NetworkShape, ResNetShape
from whorl.vision.evaluate import BATCH, batched, batches
from whorl.vision.image_set import Preprocessing
from whorl.vision.train import encode_captions

Kind = Literal["classifier", "clip", "captioner"]
ImageNetwork = ViT | ResNet | MLPMixer
Vectors = NDArray[np.float32]
DECODER = "decoder"


class VisionConfig(BaseModel):
    """The content of `config.json`.

    width: of the network's head: number of classes, or width of CLIP's common space.
    clip_tower: a ViT as in CLIP (section 2.4): no bias of patches and head, and a norm before the first block.
    text: CLIP's text encoder.
    cross_attn_every, max_length: of a captioner.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    network: NetworkShape
    width: int
    preprocessing: Preprocessing
    clip_tower: bool = False
    classes: tuple[str, ...] = ()
    text: EncoderConfig | None = None
    cross_attn_every: int = 1
    max_length: int = 64


def build_network(config: VisionConfig, generator: torch.Generator | None = None) -> ImageNetwork:
    """Return an untrained network from images [N, C, H, W] to [N, width].

    Raises:
        ConfigError: sizes that do not fit, such as a patch that does not divide the image's side.
    """
    shape, width = config.network, config.width
    size, channels = config.preprocessing.shape.size, config.preprocessing.shape.channels
    sizes = shape.model_dump(exclude={"kind"})
    if isinstance(shape, ResNetShape):
        return ResNet(channels, width, generator=generator, **sizes)
    patch = sizes.pop("patch")
    if isinstance(shape, MixerShape):
        return MLPMixer(size, patch, channels, width, generator=generator, **sizes)
    if config.clip_tower:
        sizes |= {"patch_bias": False, "first_norm": True, "head_bias": False}
    return ViT(size, patch, channels, width, generator=generator, **sizes)


def build_clip(config: VisionConfig, generator: torch.Generator | None = None) -> DualEncoder:
    """Return an untrained CLIP of a configuration with `text`."""
    assert config.text is not None
    image = build_network(config, generator)
    return DualEncoder(image, Encoder(config.text, generator), generator)


def encode_text(tokenizer: Tokenizer | HFTokenizer, text: str) -> list[int]:
    """Return the ids of a caption with begin and end, as in training."""
    return [*tokenizer.encode_prompt(text), tokenizer.end_ids[0]]


@dataclass
class VisionModel:
    """See the top of this file. config: None for a model that was imported. tokenizer: None for a classifier."""

    kind: Kind
    network: nn.Module
    preprocessing: Preprocessing
    classes: tuple[str, ...] = ()
    tokenizer: Tokenizer | HFTokenizer | None = None
    config: VisionConfig | None = None

    @property
    def device(self) -> str:
        return str(next(self.network.parameters()).device)

    @property
    def image_tower(self) -> nn.Module:
        """The network of images, without text."""
        return self.network if self.kind == "classifier" else cast(nn.Module, self.network.image)

    def classify(
        self, images: Pixels, labels: Sequence[str] = (), template: str = "{}"
    ) -> tuple[list[str], Tensor]:
        """Return the classes, and their probabilities [N, K] for images uint8 [N, H, W, C].

        Args:
            labels: classes for a CLIP, which compares images with these texts (zero-shot).
            template: text of a label, with {} in its place.

        Raises:
            ConfigError: the model has no classes, labels are given to a classifier, or a CLIP has fewer than two.
        """
        self.check_labels(labels)
        if self.kind == "clip":
            texts = torch.from_numpy(self.embed_texts([template.replace("{}", label) for label in labels]))
            network = cast(DualEncoder, self.network)
            vectors = batched(images, self.preprocessing, network.embed_images, self.device)
            return [*labels], (vectors @ texts.T * network.scale.detach().cpu()).softmax(dim=1)
        logits = batched(images, self.preprocessing, self.network, self.device)
        return [*self.classes], logits.softmax(dim=1)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Check that `classify` can be called with these labels; raises as `classify`."""
        if self.kind == "clip":
            if len(labels) < 2:
                raise ConfigError(
                    f"a CLIP compares an image with texts, and {len(labels)} are given",
                    expected="two or more classes", do='add --labels "a cat,a dog"',
                )  # fmt: skip
        elif labels:
            raise ConfigError(
                f"labels are given to a {self.kind}",
                expected="a CLIP",
                do="leave --labels out, or choose a CLIP",
            )
        elif not self.classes:
            raise ConfigError(
                f"the {self.kind} has no classes", expected="a classifier, or a CLIP with labels",
                do="train one with `whorl run classify-digits`",
            )  # fmt: skip

    def check_captioner(self) -> None:
        """Raise ConfigError if the model writes no captions."""
        if self.kind != "captioner":
            raise ConfigError(
                f"a {self.kind} writes no captions", expected="a captioner",
                do="train one with `whorl run caption-scenes`",
            )  # fmt: skip

    @torch.no_grad()
    def caption(self, images: Pixels) -> list[str]:
        """Return a greedy caption for each image. Raises ConfigError: the model is no captioner."""
        self.check_captioner()
        assert self.config is not None and self.tokenizer is not None
        first, last = (ids := encode_text(self.tokenizer, ""))[0], ids[-1]
        network, length = cast(Captioner, self.network), self.config.max_length
        rows = [
            row
            for part in batches(images, self.preprocessing, self.device)
            for row in network.generate(part, first, last, length)
        ]
        texts = (self.tokenizer.decode(row, skip_special_tokens=True) for row in rows)
        return [text.decode("utf-8", "replace") for text in texts]

    def embed(self, images: Pixels) -> Vectors:
        """Return unit vectors [N, d] fp32: CLIP's, or the features below the head."""
        if self.kind == "clip":
            network = cast(DualEncoder, self.network)
            return batched(images, self.preprocessing, network.embed_images, self.device).numpy()
        tower = cast(ImageNetwork, self.image_tower)
        features = batched(images, self.preprocessing, tower.features, self.device).float()
        return F.normalize(features, dim=-1).numpy()

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Vectors:
        """Return CLIP's unit vectors [N, d] of texts.

        Raises:
            ConfigError: the model is no CLIP, or has no tokenizer.
        """
        if self.kind != "clip":
            raise ConfigError(f"a {self.kind} embeds no texts", expected="a CLIP", do="give images only")
        if self.tokenizer is None:
            raise ConfigError(
                "the CLIP was imported without its tokenizer", expected="tokenizer.json next to the weights",
                do="copy the tokenizer's files into the folder, and import it again",
            )  # fmt: skip
        network, (ids, mask) = cast(DualEncoder, self.network), self.encode_captions(texts)
        parts = [
            network.embed_texts(ids[i : i + BATCH].to(self.device), mask[i : i + BATCH].to(self.device)).cpu()
            for i in range(0, len(ids), BATCH)
        ]
        return np.asarray(torch.cat(parts).numpy(), np.float32)

    def encode_captions(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids and mask [N, T] of texts for a CLIP or a captioner; long ones are cut."""
        tokenizer, network = self.tokenizer, self.network
        assert tokenizer is not None
        limit = self.config.max_length if self.config is not None else 0
        if self.kind == "clip":
            limit = cast(DualEncoder, network).text.config.max_length
        return encode_captions(texts, lambda text: encode_text(tokenizer, text), limit)

    def own_config(self) -> VisionConfig:
        """Return the configuration. Raises ConfigError: the model was imported."""
        if self.config is None:
            raise ConfigError(
                f"the {self.kind} was imported",
                expected="a model of the step `image_classifier`, `clip` or `captioner`",
            )
        return self.config

    def save(self, folder: Path) -> None:
        """Write the files listed at the top of this file. Raises ConfigError: the model was imported."""
        text = self.own_config().model_dump_json(indent=1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(text + "\n")
        state = self.network.state_dict()
        if self.kind == "captioner":
            state = {name: t for name, t in state.items() if not name.startswith("decoder.")}
            save_model(cast(Captioner, self.network).decoder, folder / DECODER)
        weights = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if isinstance(self.tokenizer, Tokenizer):
            self.tokenizer.save(folder / DECODER if self.kind == "captioner" else folder)
