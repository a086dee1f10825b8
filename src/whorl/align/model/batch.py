"""Batches of rows: the input of a forward pass, and all streams aligned with its tokens.

A row [T] is shifted by one, as in `tokens/packing.py`:

    tokens       input of the network                 loss_mask    True where the target is in the loss
    targets      the next id                          sequence     index of the text, -1 for padding
    segment_ids, positions                            only where several texts share a row

Further streams [n] of a text are aligned with its ids (log-probabilities of the sampler, advantages). In a row,
stream[t] is stored at the position where ids[t] is the target. So no algorithm shifts anything.

`pad` gives every text its own row; causal attention keeps texts from padding. `pack` puts several texts into a row
(best fit, longest first) with a document mask, for texts of very different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.errors import ConfigError
from whorl.tokens.packing import best_fit_decreasing
from whorl.tokens.token_encoder import TokenizedExample
from whorl.train.learner.update import MicroBatch

TokenStream = Sequence[NDArray[np.float32]]


def pad(
    examples: Sequence[TokenizedExample],
    pad_id: int,
    streams: Mapping[str, TokenStream] | None = None,
    multiple: int = 8,
) -> dict[str, Tensor]:
    """Return one text per row, [B, T] with T a multiple of `multiple`."""
    longest = max(len(text) for text in examples) - 1
    length = max(1, -(-longest // multiple) * multiple)
    part = _fill_rows(examples, [[n] for n in range(len(examples))], length, pad_id, streams or {})
    del part["segment_ids"], part["positions"]
    return part


def pack(
    examples: Sequence[TokenizedExample],
    seq_len: int,
    pad_id: int,
    streams: Mapping[str, TokenStream] | None = None,
) -> dict[str, Tensor]:
    """Return several texts per row of `seq_len` inputs.

    Raises:
        ConfigError: a text is longer than a row.
    """
    sizes = [len(text) - 1 for text in examples]
    if max(sizes) > seq_len:
        raise ConfigError(
            f"a text has {max(sizes) + 1:,} ids, and rows have {seq_len:,} positions",
            expected="shorter texts",
        )
    order = sorted(range(len(examples)), key=lambda n: -sizes[n])
    rows = [
        [order[i] for i in row] for row in best_fit_decreasing([max(1, sizes[n]) for n in order], seq_len)
    ]
    return _fill_rows(examples, rows, seq_len, pad_id, streams or {})


def _fill_rows(
    texts: Sequence[TokenizedExample],
    rows: Sequence[Sequence[int]],
    length: int,
    pad_id: int,
    streams: Mapping[str, TokenStream],
) -> dict[str, Tensor]:
    shape = (len(rows), length)
    tokens, targets = np.full(shape, pad_id, np.int64), np.full(shape, pad_id, np.int64)
    mask, sequence = np.zeros(shape, np.bool_), np.full(shape, -1, np.int64)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    further = {name: np.zeros(shape, np.float32) for name in streams}
    for r, members in enumerate(rows):
        at = 0
        for segment, number in enumerate(members, 1):
            text = texts[number]
            stop = at + len(text) - 1
            tokens[r, at:stop] = text.ids[:-1]
            targets[r, at:stop] = text.ids[1:]
            mask[r, at:stop] = text.loss_mask[1:]
            sequence[r, at:stop] = number
            segments[r, at:stop] = segment
            positions[r, at:stop] = np.arange(stop - at)
            for name, stream in streams.items():
                further[name][r, at:stop] = stream[number][1:]
            at = stop
    found = {
        "tokens": tokens, "targets": targets, "loss_mask": mask, "sequence": sequence,
        "segment_ids": segments, "positions": positions, **further,
    }  # fmt: skip
    return {name: torch.from_numpy(array) for name, array in found.items()}


def round_up_8(n: int) -> int:
    """Return the next multiple of 8: the length of a padded row."""
    return max(8, -(-n // 8) * 8)


def micro_batches(batch: MicroBatch, batch_size: int, *, trim: bool = True) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of `batch_size` rows. trim: without trailing columns that are padding in all rows."""
    for i in range(0, len(batch["tokens"]), batch_size):
        piece = {name: t[i : i + batch_size] for name, t in batch.items()}
        if not trim:
            yield piece
            continue
        used = (piece["sequence"] >= 0).any(0).nonzero()
        stop = min(piece["tokens"].shape[1], -(-(int(used.max()) + 1) // 8) * 8) if len(used) else 1
        yield {name: t[:, :stop] for name, t in piece.items()}


def sort_by_length(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the rows sorted by length, so that `micro_batches` can drop padding."""
    order = torch.argsort((batch["sequence"] >= 0).sum(1), stable=True)
    return {name: t[order] for name, t in batch.items()}


def sort_by_group(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the rows with each `group` contiguous, groups sorted by their longest row.

    A shared prompt is computed once where its rows are contiguous (`shared_prefix.py`).
    """
    group, length = batch["group"][:, 0], (batch["sequence"] >= 0).sum(1)
    longest = torch.zeros(int(group.max()) + 1, dtype=length.dtype).scatter_reduce(0, group, length, "amax")
    order = torch.argsort(longest[group] * len(longest) + group, stable=True)
    return {name: t[order] for name, t in batch.items()}
