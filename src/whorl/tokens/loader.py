"""The token loader: a producer that fills slots with batches of packed rows.

The data order is global: for each epoch a permutation of the batches, drawn from (seed, epoch). Record s of the run is
batch s mod B of epoch s div B, for any number of producers and readers. So a resumed run just starts at another number, and
a fingerprint of the data shows whether the numbers still mean the same.

Rows with a single segment form their own batches, because a batch without a document mask is faster. Rows with several
segments form mixed batches, the last of which is completed with single-segment rows, so that each is read in every epoch.
Rows are permuted within their kind and cut into batches, then all batches are permuted together. Single-segment rows that
do not fill a batch are left out of this epoch; the next epoch permutes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from whorl.data.epoch_order import EpochOrder
from whorl.errors import BudgetError
from whorl.slots import FIFOReader, ProducerProcess, SerialProducer, Slot, SlotRing, Spec
from whorl.tokens.packing import PackedRows, pack
from whorl.tokens.shards import TokenSet, TokenSplit

N_SLOTS = 4  # batches filled ahead
_PICKLED_FIELDS = ("folder", "split", "seq_len", "batch_size", "seed", "rank", "world_size")


@dataclass(frozen=True)
class TokenBatch:
    """A batch in a slot. `packing` defines the fields of a row. single_segment: no row needs a document mask."""

    tokens: Annotated[NDArray[np.int64], "B", "T"]
    targets: Annotated[NDArray[np.int64], "B", "T"]
    segment_ids: Annotated[NDArray[np.int32], "B", "T"]
    positions: Annotated[NDArray[np.int32], "B", "T"]
    loss_mask: Annotated[NDArray[np.bool_], "B", "T"]
    single_segment: NDArray[np.bool_]


@dataclass
class TokenProducer:
    """Fills slots with the batches of one split, or with rank `rank`'s share of each.

    Its pickle is small: the token set is opened in the process that reads it.

    Raises:
        BudgetError: the split does not fill one batch.
    """

    folder: Path
    split: str
    seq_len: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PICKLED_FIELDS}

    @cached_property
    def _tokens(self) -> TokenSet:
        return TokenSet(self.folder)

    @cached_property
    def rows(self) -> PackedRows:
        """The split's documents packed into rows."""
        stream = self._tokens.split(self.split)
        return pack(stream.starts, stream.lengths, self.seq_len)

    @cached_property
    def _single_and_mixed_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.flatnonzero(self.rows.single_segment), np.flatnonzero(~self.rows.single_segment)

    @cached_property
    def _batch_counts(self) -> tuple[int, int]:
        """Number of mixed batches (completed with single-segment rows), and of single-segment batches."""
        single, mixed = (len(kind) for kind in self._single_and_mixed_rows)
        n_mixed = min(-(-mixed // self.batch_size), (single + mixed) // self.batch_size)
        return n_mixed, (single - max(0, n_mixed * self.batch_size - mixed)) // self.batch_size

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches per epoch."""
        return sum(self._batch_counts)

    def check(self) -> None:
        """Raise BudgetError if the split does not fill one batch."""
        if not self.batches_per_epoch:
            raise BudgetError(
                f"the split {self.split!r} has {len(self.rows)} rows of {self.seq_len} tokens",
                expected=f"at least one batch of {self.batch_size} rows of a kind",
                do="give more text, or a smaller batch or row length (plan.data.batch_size, plan.data.seq_len)",
            )

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers [batches, batch_size] of an epoch, in reading order."""
        return self._order.epoch(epoch)

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(self.seed, "order", n=self.batches_per_epoch, draw=self._draw_batches)

    def _draw_batches(self, rng: np.random.Generator) -> NDArray[np.int64]:
        single, mixed = (rng.permutation(kind) for kind in self._single_and_mixed_rows)
        n_mixed, n_single = self._batch_counts
        n_filler = max(0, n_mixed * self.batch_size - len(mixed))
        first = np.concatenate((mixed, single[:n_filler]))[: n_mixed * self.batch_size]
        rest = single[n_filler:][: n_single * self.batch_size]
        batches = np.concatenate((first, rest)).reshape(-1, self.batch_size)
        return batches[rng.permutation(len(batches))]

    @property
    def stream(self) -> TokenSplit:
        """The split that is read."""
        return self._tokens.split(self.split)

    def documents_in_batch(self, number: int) -> NDArray[np.int64]:
        """Return the numbers of the documents in batch `number` of the run (rows of all ranks)."""
        epoch, index = divmod(number, self.batches_per_epoch)
        rows = self.order(epoch)[index]
        starts = [start for row in rows.tolist() for start, _ in self.rows.segments(row)]
        documents: NDArray[np.int64] = np.unique(
            np.searchsorted(self.stream.starts, starts, side="right") - 1
        )
        return documents

    def fill(self, slot: Slot[TokenBatch], weights: Any, rng: Any) -> int:
        """Write this rank's rows of batch `slot.sequence` of the run; returns their number of targets."""
        self.check()
        epoch, index = divmod(slot.sequence, self.batches_per_epoch)
        batch = self.order(epoch)[index]
        share = self.batch_size // self.world_size
        own_rows = batch[self.rank * share : (self.rank + 1) * share]
        slot.data.single_segment[...] = self.rows.single_segment[batch].all()
        return self.rows.write(self._tokens.split(self.split), own_rows, slot.data, self._tokens.pad_id)


def open_batches(
    folder: Path,
    split: str,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    start: int = 0,
    serial: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> FIFOReader[TokenBatch]:
    """Read batches of a split without end, from number `start`; a context manager that ends the producer.

    rank, world_size: read only this rank's batch_size / world_size rows of each batch.
    serial: fill each batch on request, in this process; the bits are the same.
    """
    spec = Spec.from_dataclass(TokenBatch, B=batch_size // world_size, T=seq_len)
    ring = SlotRing(spec, N_SLOTS)
    producer = TokenProducer(folder, split, seq_len, batch_size, seed, rank, world_size)
    if serial:
        return FIFOReader(ring, [SerialProducer(ring, producer)], start=start)
    return FIFOReader(ring, [ProducerProcess(ring, producer)], start=start)
