"""The sentence classifier: texts to probabilities of classes, and its training.

    logits(text) = classifier(mean over tokens of encoder(ids))            models/encoder.py
    loss         = classification(logits, labels)                          objectives/classify.py

A text is its ids as in `embedder.py`, cut to the encoder's `max_length`. The encoder masks padding, so the logits of a text
do not depend on its neighbours in a batch, up to the rounding of sums (tested). The folder has the files of an embedder;
its `config.json` has `classes`, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whorl.embedding.config import TextClassifierConfig
from whorl.embedding.embedder import load_encoder, pad, save_encoder
from whorl.errors import CheckpointError
from whorl.models.encoder import Encoder
from whorl.objectives.classify import classification
from whorl.objectives.next_token import Loss
from whorl.store.files import load_json
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.learner.update import MicroBatch
from whorl.train.rows import RowTask

KIND = "text_classifier"
BATCH = 64  # texts computed together


@dataclass(frozen=True)
class TextClassifier:
    """An encoder with one output per class, its tokenizer, and the names of the classes."""

    encoder: Encoder
    tokenizer: Tokenizer
    classes: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, device: str = "cpu") -> TextClassifier:
        """Load what `save` wrote. Raises CheckpointError: a file is missing, damaged or of another type of model."""
        encoder = load_encoder(folder, KIND).to(device)
        classes = load_json(folder / "config.json").get("classes")
        if not isinstance(classes, list) or len(classes) != encoder.config.n_classes:
            raise CheckpointError(
                f"{folder / 'config.json'}: classes is {classes}",
                expected=f"a list of {encoder.config.n_classes} names",
            )
        return cls(encoder, tokenizer, tuple(map(str, classes)))

    def save(self, folder: Path) -> None:
        """Write the files of an embedder with the classes; creates the folder."""
        save_encoder(self.encoder, folder, KIND, classes=list(self.classes))
        self.tokenizer.save(folder)

    def encode(self, texts: Sequence[str | bytes]) -> tuple[Tensor, Tensor]:
        """Return ids and mask [N, T] of texts; long ones are cut."""
        length = self.encoder.config.max_length
        return pad([self.tokenizer.encode(text)[:length] for text in texts])

    @torch.inference_mode()
    def classify(self, texts: Sequence[str | bytes]) -> Tensor:
        """Return the probabilities of the classes: [N, K] fp32 on the CPU."""
        device = self.encoder.embedding.device
        parts = [torch.zeros(0, len(self.classes))]
        for first in range(0, len(texts), BATCH):
            ids, mask = self.encode(texts[first : first + BATCH])
            parts.append(self.encoder(ids.to(device), mask.to(device)).softmax(dim=1).cpu())
        return torch.cat(parts)


class TextClassifierTask(RowTask):
    """Classification of texts.

    Args:
        texts: ids and mask [N, T], as `TextClassifier.encode` returns them. labels: [N] numbers of classes.
        fingerprint: of the texts.
    """

    name, objective_name, unit = "text_classifier", "classification", "texts"
    networks: Encoder
    config: TextClassifierConfig

    def __init__(
        self, networks: Encoder, texts: tuple[Tensor, Tensor], labels: Tensor, config: TextClassifierConfig,
        device: str = "cpu", fingerprint: str = "",
    ) -> None:  # fmt: skip
        targets = {"ids": texts[0], "mask": texts[1], "labels": labels}
        super().__init__(networks, targets, config, device, fingerprint)
        self.uniform_loss = math.log(networks.config.n_classes)

    def objective(self, batch: MicroBatch) -> Loss:
        ids, mask = batch["ids"], batch["mask"]
        longest = int(mask.sum(dim=1).max())
        logits = self.networks(ids[:, :longest], mask[:, :longest])
        return classification(logits, batch["labels"], self.config.label_smoothing)
