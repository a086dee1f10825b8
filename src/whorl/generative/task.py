"""Training of a generative model: a task of rows (`train/rows.py`), with a method's draws as fields of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.errors import DataError
from whorl.generative.data import Data
from whorl.generative.methods.method import GenerativeConfig
from whorl.generative.methods.registration import METHODS
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.rows import RowTask

EVALUATED = 1000  # held-out rows


class GenerativeTask(RowTask):
    """Training by one method; a record is a batch with its draws.

    Raises:
        DataError: there are fewer rows than a batch has.
        ConfigError: the network does not suit the rows.
    """

    name = "generative"

    def __init__(self, data: Data, config: GenerativeConfig, device: str = "cpu") -> None:
        if len(data.train) < config.batch_size:
            raise DataError(
                f"{data.info.name} has {len(data.train):,} rows to train on, and a batch has {config.batch_size:,}",
                expected="at least as many rows", do="lower batch_size, or add pictures",
            )  # fmt: skip
        self.method = METHODS[config.method](config, data.info)
        networks = self.method.make_networks(generator(config.seed, "weights")).to(device)
        super().__init__(networks, {"data": data.train}, config, device, data.info.fingerprint)
        self.data = data

    def objective(self, batch: MicroBatch) -> Loss:
        return self.method.loss(self.networks, batch)

    def updates(self) -> list[Update]:
        return [*self.method.updates(self.networks)]

    def inputs(self, rows: Tensor, own: slice, step: int) -> dict[str, Tensor]:
        rng = generator(self.config.seed, self.name, "draws", step)
        labels = None if self.data.labels is None else self.data.labels[rows]
        found = self.method.draws(self.data.train[rows], labels, rng)
        return {name: t[own].to(self.device) for name, t in found.items()}

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss of held-out rows, with the same draws in every call."""
        data = self.data.test[:EVALUATED]
        labels = None if self.data.test_labels is None else self.data.test_labels[:EVALUATED]
        draws = self.method.draws(data, labels, generator(self.config.seed, self.name, "held out"))
        batch = {"data": data, **draws}
        loss = self.method.loss(self.networks, {name: t.to(self.device) for name, t in batch.items()})
        return float(loss.total / loss.count)
