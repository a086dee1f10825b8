"""Training of image models: a classifier, a CLIP, a captioner. Each is a task of the trainer (`train/trainer.py`).

    classifier   classification(network(images), labels)                                    objectives/classify.py
    CLIP         info_nce(image tower(images), text tower(captions), scale)                 objectives/contrastive.py
    captioner    next_token over the caption's ids, given the image                         objectives/next_token.py

A batch follows from the seed and the step number alone: its rows from an epoch order, its shifts and mirrored images from a
stream of that step. So a resumed run ends with the same bits.

The subtle point is replicas, which split a batch. CLIP's loss compares all pairs of a batch, and a batch norm keeps
statistics of every forward pass. Both refuse them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from whorl.data.epoch_order import EpochOrder
from whorl.errors import ConfigError
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.flamingo import Captioner
from whorl.objectives.classify import classification
from whorl.objectives.contrastive import info_nce
from whorl.objectives.next_token import Loss, next_token
from whorl.tracking.seeds import generator
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.optim.lr_schedule import lr_scale
from whorl.train.trainer import RunOptions, Task, TrainCallback, Trainer
from whorl.vision.config import NOT_HASHED, ImageClassifierConfig, VisionTrainConfig
from whorl.vision.image_set import ImageSet, Preprocessing

# As for CLIP's ViT (arXiv:2103.00020, table 18). With 1e-8 a key's bias, whose true gradient is 0, follows rounding.
ADAM_EPS = 1e-6
StepCallback = Callable[[int, dict[str, float]], None]


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


class VisionTask(Task[MicroBatch]):
    """Batches of images with one further tensor per image, `targets`.

    Args:
        targets: name -> [N, ...], a row per image of the split `train`.
        device: of the network.
    """

    name: ClassVar[str]
    objective_name: ClassVar[str]  # in `objectives/catalog.py`
    trained_prefix: ClassVar[str] = ""  # of the names of the trained parameters

    def __init__(
        self,
        networks: nn.Module,
        images: ImageSet,
        targets: Mapping[str, Tensor],
        config: VisionTrainConfig,
        device: str,
    ) -> None:
        self.networks, self.config, self.steps, self.device = networks, config, config.steps, device
        self.preprocessing, self.fingerprint = images.info.preprocessing, images.info.fingerprint
        self.pixels = torch.from_numpy(np.array(images.split("train").images))
        self.targets = dict(targets)
        self.order = EpochOrder(config.seed, self.name, "order", n=len(self.pixels))
        self.rank, self.replicas = 0, 1

    @abstractmethod
    def objective(self, batch: MicroBatch) -> Loss:
        """Return the loss of images [N, C, H, W] with their targets."""

    @property
    def identity(self) -> dict[str, Any]:
        settings = self.config.model_dump(mode="json", exclude=set(NOT_HASHED))
        return {"task": self.name, **settings, "data": self.fingerprint}

    def _update(self) -> Update:
        return Update(
            self.objective,
            all_adamw(self.networks, self.config.lr, self.trained_prefix),
            weight_decay=self.config.weight_decay,
            eps=ADAM_EPS,
        )

    def allocate(self, replicas: int) -> SharedState:
        return SharedState.allocate(
            self.networks, self._update().param_optims, replicas, contiguous=replicas == 1
        )

    def make_learner(self, trainer: Trainer[MicroBatch]) -> Learner:
        self.rank, self.replicas = trainer.group.rank, trainer.group.size
        update = replace(self._update(), accept_step=trainer.accept_step)
        return Learner(self.networks, [update], trainer.shared, trainer.group, steps_done=trainer.rounds_done)

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats:
        rows = self.config.batch_size
        return LayerStats(learner, steps=self.steps, batch_rows=rows, steps_done=steps_done)

    def batches(self, first: int) -> AbstractContextManager[Iterator[MicroBatch]]:
        return nullcontext(self.batch(step) for step in range(first, self.steps))

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return this rank's rows of the batch of a step."""
        c = self.config
        rows = torch.tensor([self.order[step * c.batch_size + i] for i in range(c.batch_size)])
        pixels = augment(
            self.pixels[rows], c.max_shift, c.flip, generator(c.seed, self.name, "augment", step)
        )
        own = slice(self.rank, None, self.replicas)
        images = normalize(pixels[own].to(self.device), self.preprocessing)
        return {"images": images, **{n: t[rows[own]].to(self.device) for n, t in self.targets.items()}}

    def minibatches(self, record: MicroBatch) -> list[list[MicroBatch]]:
        return [[record]]

    def lr_scale(self, step: int) -> float:
        return lr_scale(step, self.steps, self.config.train.schedule)


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


class _Steps(TrainCallback):
    def __init__(self, callback: StepCallback) -> None:
        self._callback = callback

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._callback(step, metrics)


def train_vision(
    task: VisionTask,
    *,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    heartbeat_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Train `task.networks` to the last step, from the newest checkpoint if there is one.

    Args:
        callback: called after each step with loss, correct (classifier, CLIP), nll, grad_norm and time/*.
        checkpoint_dir: folder of checkpoints; None keeps none.

    Raises:
        ConfigError: replicas of CLIP, or of a network with batch norm.
        CheckpointError: the checkpoint is of another job.
    """
    c = task.config
    replicas = c.run.replicas or 1
    threads = c.threads or max(1, torch.get_num_threads() // replicas)
    options = RunOptions(
        scratch=checkpoint_dir, checkpoint_seconds=c.run.checkpoint_seconds, checkpoint_config=c.run.checkpoints,
        replicas=replicas, threads=threads, spike_guard=c.train.spike_guard, ema=c.train.ema,
        deterministic=c.train.deterministic, heartbeat_dir=heartbeat_dir,
    )  # fmt: skip
    Trainer(task, options, _Steps(callback), log=log).fit()
