"""The record of a worker: a gradient, or the change in some local steps, and the loss that passes it to a learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from whorl.objectives.next_token import Loss
from whorl.slots import Slot, Spec


@dataclass(frozen=True)
class Gradient:
    """P numbers of dense parameters, and of each of T tables the rows of a batch.

    n_rows: rows in use of each table, or rows that the worker moved itself. loss: summed; count: its divisor.
    seconds: of the work, without the start of the worker.
    """

    dense: Annotated[NDArray[np.float32], "P"]
    rows: Annotated[NDArray[np.int64], "T", "R"]
    row_gradients: Annotated[NDArray[np.float32], "T", "R", "D"]
    n_rows: Annotated[NDArray[np.int64], "T"]
    loss: NDArray[np.float32]
    count: NDArray[np.float32]
    seconds: NDArray[np.float32]


def gradient_spec(dense: Sequence[Tensor], tables: Sequence[Tensor], max_rows: int) -> Spec[Gradient]:
    """Return the record's fields. max_rows: the most rows of one table in a record."""
    sizes = {"P": sum(p.numel() for p in dense), "T": len(tables)}
    sizes |= {"R": max_rows, "D": tables[0].shape[1]} if tables else {"R": 1, "D": 1}
    return Spec.from_dataclass(Gradient, **{name: max(1, size) for name, size in sizes.items()})


def recorded_loss(
    parameters: Sequence[Tensor], gradient: Tensor, value: Tensor, count: Tensor, *more: Tensor
) -> Loss:
    """Return a loss with this value, count and flat gradient [P]: the sum of weight x gradient has this gradient.

    more: terms whose gradients are added.
    """
    pieces = torch.split(gradient, [p.numel() for p in parameters])
    terms = [(p.flatten() * piece).sum() for p, piece in zip(parameters, pieces, strict=True)]
    total = torch.stack([*terms, *more]).sum()
    return Loss(total - total.detach() + value, count, {})


def received_loss(dense: Sequence[Tensor], tables: Sequence[Tensor], record: Mapping[str, Tensor]) -> Loss:
    """Return a loss with the value, count and gradients of a record."""
    rows = [record[name] for name in ("n_rows", "rows", "row_gradients") if tables]
    terms = [
        (F.embedding(ids[: int(n)], table, sparse=True) * values[: int(n)]).sum()
        for table, n, ids, values in zip(tables, *rows, strict=True)
    ]
    return recorded_loss(dense, record["dense"], record["loss"], record["count"], *terms)


def is_finite(slot: Slot[Gradient]) -> bool:
    """Return whether every number of a record is finite."""
    record = slot.tensors()
    rows = (values[:n] for values, n in zip(record["row_gradients"], record["n_rows"].tolist(), strict=True))
    return all(bool(t.isfinite().all()) for t in (record["loss"], record["dense"], *rows))
