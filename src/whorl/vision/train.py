"""Training of image models: a classifier, a CLIP, a captioner. Each is a task of rows (`train/rows.py`).

    classifier   classification(network(images), labels)                                    objectives/classify.py
    CLIP         info_nce(image tower(images), text tower(captions), scale)                 objectives/contrastive.py
    captioner    next_token over the caption's ids, given the image                         objectives/next_token.py

Shifts and mirrored images come from a stream of each step, so that a resumed run ends with the same bits.

The subtle point is replicas, which split a batch. CLIP's loss compares all pairs of a batch, and a batch norm keeps
statistics of every forward pass. Both refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.flamingo import Captioner
from whorl.objectives.classify import classification
from whorl.objectives.contrastive import info_nce
from whorl.objectives.next_token import Loss, next_token
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch
from whorl.train.rows import RowTask
from whorl.vision.config import ImageClassifierConfig, VisionTrainConfig
from whorl.vision.image_set import ImageSet, Preprocessing


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return a network's input, fp32 [N, C, H, W], of pixels uint8 [N, H, W, C]."""
    mean, std = (
        torch.tensor(values, device=pixels.device) for values in (preprocessing.mean, preprocessing.std)
    )
    return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


def augment(pixels: Tensor, max_shift: int, flip: bool, rng: torch.Generator) -> Tensor:
    """Return images uint8 [N, H, W, C], shifted by up to `max_shift` pixels and perhaps mirrored; edges repeat."""
    n, height, width, _ = pixels.shape
    if max_shift:
        down, right = torch.randint(-max_shift, max_shift + 1, (2, n, 1), generator=rng)
        rows = (down + torch.arange(height)).clamp(0, height - 1)  # [N, H]
        columns = (right + torch.arange(width)).clamp(0, width - 1)
        pixels = pixels[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None]]
    if flip:
        mirrored = torch.rand(n, generator=rng) < 0.5
        pixels = torch.where(mirrored[:, None, None, None], pixels.flip(2), pixels)
    return pixels


class VisionTask(RowTask):
    """Batches of images with one further tensor per image, `targets`: name -> [N, ...] of the split `train`."""

    config: VisionTrainConfig

    def __init__(
        self,
        networks: nn.Module,
        images: ImageSet,
        targets: Mapping[str, Tensor],
        config: VisionTrainConfig,
        device: str,
    ) -> None:
        super().__init__(networks, targets, config, device, images.info.fingerprint)
        self.preprocessing = images.info.preprocessing
        self.pixels = torch.from_numpy(np.array(images.split("train").images))

    def inputs(self, rows: Tensor, own: slice, step: int) -> dict[str, Tensor]:
        c = self.config
        rng = generator(c.seed, self.name, "augment", step)
        pixels = augment(self.pixels[rows], c.max_shift, c.flip, rng)
        return {"images": normalize(pixels[own].to(self.device), self.preprocessing)}


class ClassifierTask(VisionTask):
    """Classification; `networks` maps images to logits."""

    name, objective_name = "image_classifier", "classification"
    config: ImageClassifierConfig

    def __init__(
        self, networks: nn.Module, images: ImageSet, config: ImageClassifierConfig, device: str = "cpu"
    ) -> None:
        labels = images.split("train").labels
        assert labels is not None  # `ImageSet.need`
        super().__init__(networks, images, {"labels": torch.from_numpy(labels)}, config, device)
        self.uniform_loss = math.log(len(images.classes))

    def objective(self, batch: MicroBatch) -> Loss:
        return classification(self.networks(batch["images"]), batch["labels"], self.config.label_smoothing)


class ContrastiveTask(VisionTask):
    """Contrastive training of an image tower and a text tower. Pairs with equal captions are not negatives.

    Args:
        captions: ids [N, T] and mask [N, T] of the captions, True at real ids.
    """

    name, objective_name = "clip", "info_nce"
    networks: DualEncoder
    unsupported: ClassVar[Mapping[str, str]] = {"replicas": "the loss compares all pairs of a batch"}

    def __init__(
        self, networks: DualEncoder, images: ImageSet, captions: tuple[Tensor, Tensor], config: VisionTrainConfig,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        ids, mask = captions
        groups = torch.unique(ids, dim=0, return_inverse=True)[1]
        super().__init__(networks, images, {"ids": ids, "mask": mask, "groups": groups}, config, device)

    def objective(self, batch: MicroBatch) -> Loss:
        x, y, scale = self.networks(batch["images"], batch["ids"], batch["mask"])
        return info_nce(x, y, scale, batch["groups"])


class CaptionTask(VisionTask):
    """Captions by a frozen language model; only the cross-attention is trained.

    Args:
        captions: as in `ContrastiveTask`.
        preprocessing: of the frozen image tower.

    Raises:
        ConfigError: the images have another shape than those of the image tower.
    """

    name, objective_name = "captioner", "next_token"
    trained_prefix = "bridges."
    networks: Captioner

    def __init__(
        self, networks: Captioner, images: ImageSet, captions: tuple[Tensor, Tensor], config: VisionTrainConfig,
        preprocessing: Preprocessing, device: str = "cpu",
    ) -> None:  # fmt: skip
        own, given = images.info.preprocessing.shape, preprocessing.shape
        if (own.size, own.channels) != (given.size, given.channels):
            raise ConfigError(
                f"the images are {own.size} x {own.size} x {own.channels}",
                expected=f"{given.size} x {given.size} x {given.channels}, as the image tower was trained with",
                do="set size and channels of the step `images`",
            )
        super().__init__(networks, images, {"ids": captions[0], "mask": captions[1]}, config, device)
        self.preprocessing = preprocessing
        self.uniform_loss = math.log(networks.decoder.config.vocab_size)

    def objective(self, batch: MicroBatch) -> Loss:
        ids, mask = batch["ids"], batch["mask"]
        hidden = self.networks(ids[:, :-1], self.networks.encode_images(batch["images"]))
        head = self.networks.decoder.head_weight
        return next_token(hidden.flatten(0, 1), head, ids[:, 1:].flatten(), mask[:, 1:].flatten())


def encode_captions(
    texts: Sequence[str], encode: Callable[[str], Sequence[int]], max_length: int
) -> tuple[Tensor, Tensor]:
    """Return ids [N, T] int64 and mask [N, T] of texts; rows are padded with 0 at the end.

    Args:
        encode: a text to ids that begin with bos and end with eos. Longer texts lose ids before their end.
    """
    found = [list(map(int, encode(text))) for text in texts]
    found = [ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]] for ids in found]
    longest = max(map(len, found), default=0)
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in found], dtype=torch.long)
    mask = torch.arange(longest) < torch.tensor([len(row) for row in found])[:, None]
    return ids, mask
