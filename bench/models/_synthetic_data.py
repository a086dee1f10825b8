"""The tasks of `bench/models/synthetic_tasks.py`: synthetic rows with one correct answer, and a text. No model is used here.

A synthetic task has sizes (pairs, tokens to copy). A training batch has one size, drawn for each batch, and about the
same number of tokens at every size: small sizes are a curriculum for the large one, equal for every kind of layer. A
batch is {"tokens", "targets": [B, T] ids, "mask": [B, T] bool, True at scored positions}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]


def recall(rng: np.random.Generator, rows: int, pairs: int) -> Batch:
    """`pairs` times "key value" with distinct keys, then the same pairs in another order, where values are scored.

    (Arora et al. 2023, Zoology, arXiv:2312.04927, section 3.1.) Ids 0 to 31 are keys, 32 to 63 values. T = 4 pairs - 1.
    """
    half = 32
    keys = rng.permuted(np.tile(np.arange(half), (rows, 1)), axis=1)[:, :pairs]
    values = half + rng.integers(0, half, (rows, pairs))
    again = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)
    first = np.stack((keys, values), axis=2).reshape(rows, -1)
    second = np.stack((np.take_along_axis(keys, again, 1), np.take_along_axis(values, again, 1)), axis=2)
    ids = np.concatenate((first, second.reshape(rows, -1)), axis=1)
    mask = np.zeros((rows, 4 * pairs - 1), bool)
    mask[:, 2 * pairs :: 2] = True
    return _batch(ids[:, :-1], ids[:, 1:], mask)


def copying(rng: np.random.Generator, rows: int, count: int) -> Batch:
    """`count` tokens at random places among 6 x count, noise elsewhere, then `count` marks, which are scored.

    (Gu & Dao 2023, Mamba, arXiv:2312.00752, section 4.1.1.) 0 is noise, 1 the mark, 2 to 17 the tokens to copy. Outputs are
    not fed back, so a layer must count them. T = 7 count.
    """
    places = 6 * count
    content = rng.integers(2, 18, (rows, count))
    at = np.sort(rng.permuted(np.tile(np.arange(places), (rows, 1)), axis=1)[:, :count], axis=1)
    ids = np.zeros((rows, places + count), np.int64)
    np.put_along_axis(ids, at, content, axis=1)
    ids[:, places:] = 1
    targets = np.zeros_like(ids)
    targets[:, places:] = content
    mask = np.zeros(ids.shape, bool)
    mask[:, places:] = True
    return _batch(ids, targets, mask)


def repetition(rng: np.random.Generator, rows: int, length: int) -> Batch:
    """`length` ids of 64 with a period of length / 4 to length / 2, drawn per row; ids in a period are distinct.

    An id is scored if the previous id occurred earlier in the row (Olsson et al. 2022, In-context Learning and Induction
    Heads). With one period for all rows, a head at a fixed offset would suffice. T = length - 1.
    """
    periods = rng.integers(length // 4, length // 2 + 1, (rows, 1))
    order = rng.permuted(np.tile(np.arange(64), (rows, 1)), axis=1)
    at = np.arange(length)[None]
    ids = np.take_along_axis(order, at % periods, axis=1)
    return _batch(ids[:, :-1], ids[:, 1:], at[:, :-1] >= periods)


def _batch(tokens: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> Batch:
    found = {"tokens": tokens, "targets": targets, "mask": mask}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


@dataclass(frozen=True)
class Task:
    """A synthetic task.

    make: (rng, rows, size) -> batch; vocab: number of ids; sizes: in training, the last is reported; length: of a row of
    size 1, to keep the tokens per batch constant.
    """

    make: Callable[[np.random.Generator, int, int], Batch]
    vocab: int
    sizes: tuple[int, ...]
    length: int

    def batch(self, rng: np.random.Generator, tokens: int) -> Batch:
        """A training batch of about `tokens` tokens."""
        size = int(rng.choice(self.sizes))
        return self.make(rng, max(1, tokens // (self.length * size)), size)


TASKS = {
    "recall": Task(recall, 64, (2, 4, 8, 16), 4),
    "copying": Task(copying, 18, (1, 2, 4, 8), 7),
    "repetition": Task(repetition, 64, (64,), 1),
}


def characters(path: Path) -> tuple[Tensor, Tensor, int]:
    """(training ids, held-out ids: the last tenth, number of distinct bytes)."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: pass any plain text of about 1 MB with --text")
    distinct, ids = np.unique(np.frombuffer(path.read_bytes(), np.uint8), return_inverse=True)
    found = torch.from_numpy(ids.astype(np.int64))
    cut = len(found) * 9 // 10
    return found[:cut], found[cut:], len(distinct)


def stretches(ids: Tensor, rng: np.random.Generator, rows: int, length: int) -> Batch:
    """Rows from random positions of a text."""
    starts = torch.from_numpy(rng.integers(0, len(ids) - length - 1, rows))
    stretch = ids[starts[:, None] + torch.arange(length + 1)]
    mask = torch.ones(rows, length, dtype=torch.bool)
    return {"tokens": stretch[:, :-1], "targets": stretch[:, 1:], "mask": mask}
