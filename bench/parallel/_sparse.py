"""Logistic regression with sparse features, the problem of Hogwild!, and workers that share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whorl.objectives.next_token import Loss
from whorl.train.asynchronous.worker import Worker
from whorl.train.learner.update import MicroBatch, ParamOptim, Update


@dataclass(frozen=True)
class SparseLogistic:
    """`samples` rows of `nonzeros` features out of `features`, of frequency ~ 1 / (rank + 10); labels of planted weights."""

    samples: int = 40_000
    features: int = 1 << 18
    nonzeros: int = 24
    batch: int = 64
    max_rows: int = 1

    def data(self) -> tuple[Tensor, Tensor]:
        """Return features [samples, nonzeros] and labels [samples], equal in every process."""
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(self.samples, self.nonzeros, generator=generator, dtype=torch.float64)
        ids = (10 * ((self.features + 10) / 10) ** uniform - 10).long().clamp(0, self.features - 1)
        planted = torch.randn(self.features, generator=generator)
        return ids, (planted[ids].sum(1) > 0).float()

    def make(self) -> tuple[nn.Module, Update]:
        network = nn.Module()
        network.table = table = nn.Parameter(torch.zeros(self.features, 1))

        def objective(batch: MicroBatch) -> Loss:
            logits = F.embedding(batch["ids"], table, sparse=True).sum((1, 2))
            total = F.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="sum")
            return Loss(total, torch.tensor(float(len(logits))), {})

        return network, Update(objective, {"table": ParamOptim("sparse_adagrad", 0.05)})

    def lr_scale(self, step: float) -> float:
        return 1.0

    def batches(self, first: int, worker: int, workers: int) -> Iterator[list[MicroBatch]]:
        ids, labels = self.data()
        while True:
            start = (first * workers + worker) * self.batch % (self.samples - self.batch)
            chosen = slice(start, start + self.batch)
            yield [{"ids": ids[chosen], "labels": labels[chosen]}]
            first += 1

    def loss(self, network: nn.Module) -> float:
        """Return the mean loss over all samples."""
        ids, labels = self.data()
        logits = network.table.detach()[ids].sum((1, 2))
        return float(F.binary_cross_entropy_with_logits(logits, labels))


class AloneWorker(Worker):
    """A worker with its own copy of every table, that no other process sees."""

    def setup(self, board: Any, sequence: int) -> None:
        self.own = _Copies(board)
        super().setup(self.own, sequence)  # type: ignore[arg-type]

    def _move(self, name: str, rows: Tensor, values: Tensor, board: Any) -> int:
        return super()._move(name, rows, values, self.own)  # type: ignore[arg-type]


class _Copies:
    def __init__(self, board: Any) -> None:
        self.board, self.copies = board, dict[str, Tensor]()

    def tensor(self, name: str) -> Tensor:
        if name not in self.copies:
            self.copies[name] = self.board.tensor(name).clone()
        return self.copies[name]
