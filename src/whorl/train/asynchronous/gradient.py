"""The record of a worker: a gradient, or the change of some local steps, and how the server's learner takes it.

The sum of weight x gradient has this gradient. So a received gradient is a loss, and every learner can train on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from whorl.objectives.next_token import Loss
from whorl.slots import Slot, Spec
from whorl.train.learner.update import Update


@dataclass(frozen=True)
class Gradient:
    """What a worker sends: P numbers of dense parameters, and of each of T tables the rows of its batch.

    present: whether each of the N dense parameters has a gradient. n_rows: rows in use of each table; without a lock: rows
    that the worker has moved itself. loss: summed; count: its divisor. seconds: of the work, without the start of a worker.
    """

    dense: Annotated[NDArray[np.float32], "P"]
    present: Annotated[NDArray[np.bool_], "N"]
    rows: Annotated[NDArray[np.int64], "T", "R"]
    row_gradients: Annotated[NDArray[np.float32], "T", "R", "D"]
    n_rows: Annotated[NDArray[np.int64], "T"]
    loss: NDArray[np.float32]
    count: NDArray[np.float32]
    seconds: NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Names of the parameters that are sent whole and of the tables of which rows are sent, in order."""

    dense: Sequence[str]
    tables: Sequence[str]

    @classmethod
    def of(cls, update: Update, *, whole: bool) -> Layout:
        """Return the layout of an update. whole: tables are sent whole, too."""
        tables = [] if whole else update.names_for("sparse_adagrad")
        return cls([name for name in update.param_optims if name not in tables], tables)

    def spec(self, network: nn.Module, max_rows: int) -> Spec[Gradient]:
        """Return the record's fields. max_rows: the most rows of one table in a record."""
        named = dict(network.named_parameters())
        dense, tables = ([named[name] for name in names] for names in (self.dense, self.tables))
        size = {"T": max(1, len(tables)), "R": max_rows if tables else 1, "D": tables[0].shape[1] if tables else 1}
        return Spec.from_dataclass(
            Gradient, P=max(1, sum(p.numel() for p in dense)), N=max(1, len(dense)), **size
        )


def received_loss(network: nn.Module, layout: Layout, record: Mapping[str, Tensor]) -> Loss:
    """Return a loss with the value, count and gradients of a record; a parameter without a gradient gets none."""
    named = dict(network.named_parameters())
    parameters, total = [named[name] for name in layout.dense], torch.zeros(())
    pieces = torch.split(record["dense"], [p.numel() for p in parameters])
    for p, gradient, present in zip(parameters, pieces, record["present"].tolist(), strict=True):
        if present:
            total = total + (p.flatten() * gradient).sum()
    for t, name in enumerate(layout.tables):
        rows, values = (record[field][t, : int(record["n_rows"][t])] for field in ("rows", "row_gradients"))
        total = total + (F.embedding(rows, named[name], sparse=True) * values).sum()
    return Loss(total - total.detach() + record["loss"], record["count"], {})


def is_finite(slot: Slot[Gradient]) -> bool:
    """Return whether every number of a record is finite."""
    record = slot.tensors()
    rows = (values[:n] for values, n in zip(record["row_gradients"], record["n_rows"].tolist(), strict=True))
    return all(bool(t.isfinite().all()) for t in (record["loss"], record["dense"], *rows))
