"""Training on raw text: workers read, tokenize and pack while the learner trains.

Record s of a run is a fixed set of blocks of raw text (`corpus/blocks.py`), for any number of workers. The mixture's weights
select its source, and a global permutation of the source's blocks, drawn from (seed, epoch), selects its blocks. A worker
tokenizes their documents, shuffles them and packs them into rows. Of N ranks each tokenizes every N-th record and sends its
rows to the others, so no text is tokenized twice. So a run resumes at any row, on any number of workers and
ranks, with the same data. Its state is two numbers and the fingerprint of the data.

A record has as many rows as its text needs. Its slot is sized for the worst case (one token per byte); memory pages that
are never written cost nothing.

Randomness: blocks come from the whole source; documents of one block stay in one record, shuffled with those of its other
blocks. `bench/tokens/stream_loader.py` measures how far neighbors on disk end up from each other. Smaller blocks mix
better; larger ones suit remote files.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from whorl.corpus.blocks import MAX_DOCUMENT_BYTES, RawFiles, Source
from whorl.data.epoch_order import EpochOrder
from whorl.data.quarantine import Quarantine
from whorl.errors import CheckpointError, ConfigError
from whorl.parallel.process_group import ProcessGroup
from whorl.slots import FIFOReader, ProducerProcess, SerialProducer, Slot, SlotRing, Spec
from whorl.tokens.packing import pack
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking import seeds

_MIXTURE_CHUNK = 4096  # records whose sources are drawn together
ROW_FIELDS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


@dataclass(frozen=True)
class StreamRecord:
    """Rows of packed text (see `packing`), the first `n_rows` of R. n_rejected: records that could not be read."""

    tokens: Annotated[NDArray[np.int64], "R", "T"]
    targets: Annotated[NDArray[np.int64], "R", "T"]
    segment_ids: Annotated[NDArray[np.int32], "R", "T"]
    positions: Annotated[NDArray[np.int32], "R", "T"]
    loss_mask: Annotated[NDArray[np.bool_], "R", "T"]
    n_rows: NDArray[np.int64]
    n_rejected: NDArray[np.int64]


@dataclass(frozen=True)
class StreamConfig:
    """Settings that determine the rows.

    seq_len: tokens per row.
    shuffle_bytes: raw text per record, in blocks (at least one: a Parquet row group or a tar member may be larger).
    mixture_warmup_records: records over which weights go from initial to final.
    """

    tokenizer: Path
    sources: Sequence[Source]
    seq_len: int
    seed: int = 0
    shuffle_bytes: int = 1 << 19
    block_bytes: int = 1 << 14
    mixture_warmup_records: int = 1000

    def __post_init__(self) -> None:
        weights = [
            w
            for s in self.sources
            for w in (s.weight, s.weight if s.final_weight is None else s.final_weight)
        ]
        if not self.sources or min(weights) < 0 or sum(weights[::2]) <= 0 or sum(weights[1::2]) <= 0:
            raise ConfigError(
                f"the mixture has the weights {weights}",
                expected="at least one source, no weight below 0, at least one above",
            )
        if self.seq_len < 2 or min(self.shuffle_bytes, self.block_bytes, self.mixture_warmup_records) < 1:
            raise ConfigError(
                f"seq_len={self.seq_len}, shuffle_bytes={self.shuffle_bytes}, block_bytes={self.block_bytes}, "
                f"mixture_warmup_records={self.mixture_warmup_records}",
                expected="positive",
            )


class Mixture:
    """Source of each record, and its index within the source; drawn by weights that may change over the run."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        first = np.array([s.weight for s in config.sources], np.float64)
        last = np.array(
            [s.weight if s.final_weight is None else s.final_weight for s in config.sources], np.float64
        )
        self.initial_weights, self.final_weights = first / first.sum(), last / last.sum()
        # Records of each source before each chunk.
        self._counts_before_chunk = [np.zeros(len(first), np.int64)]
        self._chunk_cache: dict[int, NDArray[np.int64]] = {}

    def _chunk(self, number: int) -> NDArray[np.int64]:
        """Return the source of each record of a chunk, [_MIXTURE_CHUNK]."""
        record = np.arange(number * _MIXTURE_CHUNK, (number + 1) * _MIXTURE_CHUNK)
        progress = np.minimum(record / self.config.mixture_warmup_records, 1.0)[:, None]
        cumulative = (self.initial_weights * (1 - progress) + self.final_weights * progress).cumsum(axis=1)
        draw = (
            seeds.numpy_rng(self.config.seed, "mixture", number).random((_MIXTURE_CHUNK, 1))
            * cumulative[:, -1:]
        )
        blocks: NDArray[np.int64] = (cumulative[:, :-1] <= draw).sum(axis=1)
        return blocks

    def source_and_index(self, sequence: int) -> tuple[int, int]:
        """Return (source, number of earlier records from it) of a record."""
        number, offset = divmod(sequence, _MIXTURE_CHUNK)
        while len(self._counts_before_chunk) <= number:
            counts = np.bincount(
                self._chunk(len(self._counts_before_chunk) - 1), minlength=len(self.initial_weights)
            )
            self._counts_before_chunk.append(self._counts_before_chunk[-1] + counts)
        if number not in self._chunk_cache:
            self._chunk_cache = {number: self._chunk(number)}
        chunk = self._chunk_cache[number]
        source = int(chunk[offset])
        return source, int(self._counts_before_chunk[number][source] + (chunk[:offset] == source).sum())


@dataclass
class StreamProducer:
    """Fills slots with packed rows of raw text. Its pickle is small: files are opened in the worker.

    Slot s holds record s * world_size + rank.
    """

    config: StreamConfig
    rank: int = 0
    world_size: int = 1
    _state: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": {}}

    def _open_sources(self) -> None:
        c = self.config
        files = [s.open(c.block_bytes) for s in c.sources]
        self._state = {
            "tokenizer": Tokenizer.load(c.tokenizer),
            "files": files,
            "mixture": Mixture(c),
            "order": [EpochOrder(c.seed, "blocks", i, n=len(f.blocks)) for i, f in enumerate(files)],
        }

    def blocks_in_record(self, sequence: int) -> tuple[int, list[int]]:
        """Return (source, its blocks) of a record: the next blocks of the source's permutation, epoch after epoch."""
        if not self._state:
            self._open_sources()
        source, nth = self._state["mixture"].source_and_index(sequence)
        n = blocks_per_record(self._state["files"][source], self.config.shuffle_bytes)
        order = self._state["order"][source]
        return source, [order[index] for index in range(nth * n, (nth + 1) * n)]

    def files(self, source: int) -> RawFiles:
        """Return the files of a source."""
        if not self._state:
            self._open_sources()
        files: RawFiles = self._state["files"][source]
        return files

    def fill(self, slot: Slot[StreamRecord], weights: Any, rng: np.random.Generator) -> int:
        """Write the rows of the record of `slot.sequence`; returns their number of targets."""
        record = slot.sequence * self.world_size + self.rank
        source, blocks = self.blocks_in_record(record)
        rejects = Quarantine(max_kept=0)
        files, tokenizer = self._state["files"][source], self._state["tokenizer"]
        texts = [text for block in blocks for text in files.texts(block, rejects)]
        # The order depends on the record's number only, not on the worker.
        shuffled = seeds.numpy_rng(self.config.seed, "documents", record).permutation(len(texts))
        ids = [tokenizer.encode_document(texts[i]) for i in shuffled]
        lengths = np.array([len(i) for i in ids], np.int64)
        starts = np.cumsum(lengths) - lengths
        rows = pack(starts, lengths, self.config.seq_len)
        n = len(rows)
        if n > slot.data.tokens.shape[0]:
            raise ConfigError(
                f"record {record} needs {n} rows", expected=f"at most {slot.data.tokens.shape[0]}"
            )
        if n:
            row_views = StreamRecord(**{name: getattr(slot.data, name)[:n] for name in ROW_FIELDS}, n_rows=slot.data.n_rows,
                                n_rejected=slot.data.n_rejected)  # fmt: skip
            rows.write(np.concatenate(ids), np.arange(n), row_views, tokenizer.pad_id)
        slot.data.n_rows[...] = n
        slot.data.n_rejected[...] = len(rejects)
        return rows.n_targets


def blocks_per_record(files: RawFiles, record_bytes: int) -> int:
    """Return how many blocks of these files make a record."""
    mean = sum(block.size for block in files.blocks) / len(files.blocks)
    return max(1, round(record_bytes / max(1.0, mean)))


def stream_spec(config: StreamConfig) -> Spec[StreamRecord]:
    """Return the slot spec, sized for the largest possible number of rows."""
    max_rows = 0
    for source in config.sources:
        files = source.open(config.block_bytes)
        largest = max(block.size for block in files.blocks) + MAX_DOCUMENT_BYTES
        max_rows = max(max_rows, blocks_per_record(files, config.shuffle_bytes) * largest)
    # A token is at least a byte, each document adds bos and eos, and packed rows are at least half full.
    return Spec.from_dataclass(StreamRecord, R=4 * max_rows // config.seq_len + 2, T=config.seq_len)


class StreamBatches:
    """Batches of rows from raw text, without end: a fixed number of rows, or as many as hold a number of targets.

    Args:
        batch_size: rows per batch, over all ranks.
        min_targets: instead of batch_size, the least number of targets in a batch; the number of rows then varies.
        workers: processes; 0 makes the same bits in this process.
        state: position to resume from (`state` of an earlier reader).
        group: return only every N-th row of each batch, from row `rank`; all N ranks read the same batches together.

    Raises:
        CheckpointError: the state is of other data.
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        batch_size: int | None = None,
        min_targets: int | None = None,
        workers: int = 1,
        state: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group = group = group or ProcessGroup()
        world_size = group.size
        if (batch_size is None) == (min_targets is None) or (batch_size or min_targets or 0) < world_size:
            raise ConfigError(
                f"batch_size={batch_size}, min_targets={min_targets}, world_size={world_size}",
                expected="one of batch_size and min_targets, at least world_size",
            )
        self.batch_size, self.min_targets = batch_size, min_targets
        fingerprints = [s.open(config.block_bytes).fingerprint for s in config.sources]
        settings: list[Any] = [
            config.seq_len,
            config.seed,
            config.shuffle_bytes,
            config.block_bytes,
            config.mixture_warmup_records,
        ]
        settings += [(s.weight, s.final_weight) for s in config.sources]
        settings += [(config.tokenizer / "tokenizer.json").read_text()]
        self.fingerprint = f"{'-'.join(fingerprints)}-{seeds.derive(0, *map(str, settings)):x}"
        if state is not None and state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"the data or the settings of the stream changed: {state['fingerprint']}, now {self.fingerprint}",
                expected="the files, seq_len, seed and blocks of the run's start",
            )
        position = state or {"record": 0, "row": 0, "tokens": 0}
        self._record, self._row, self.tokens_consumed = (
            int(position["record"]),
            int(position["row"]),
            int(position["tokens"]),
        )
        self.n_rejected = 0
        ring: SlotRing[StreamRecord] = SlotRing(stream_spec(config), 2 * max(1, workers))
        kind: Any = ProducerProcess if workers else SerialProducer
        self.sharers = group.size if group.pipes else 1  # ranks that cannot send to each other tokenize all
        rank = group.rank if group.pipes else 0
        producer = StreamProducer(config, rank, self.sharers)
        producers = [kind(ring, producer, number=i) for i in range(max(1, workers))]
        self.reader = FIFOReader(ring, producers, start=-(-(self._record - rank) // self.sharers))
        self._rows: dict[str, torch.Tensor] | None = None  # of the record

    @property
    def state(self) -> dict[str, Any]:
        """Position of the next batch, as JSON; all that a checkpoint needs."""
        return {
            "record": self._record, "row": self._row, "tokens": self.tokens_consumed, "fingerprint": self.fingerprint
        }  # fmt: skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return this rank's tokens, targets, segment_ids, positions, loss_mask, each [rows, T].

        They are valid until the next call: a batch within one record is a view of its slot.
        """
        parts: list[dict[str, torch.Tensor]] = []
        rows = targets = 0
        while (
            (rows < self.batch_size) if self.batch_size is not None else (targets < (self.min_targets or 0))
        ):
            if self._rows is None:
                # The reader frees the previous record when it returns the next one.
                parts = [{name: view.clone() for name, view in part.items()} for part in parts]
                self._rows = self._read()
            n, mask = len(self._rows["tokens"]), self._rows["loss_mask"]
            if self.batch_size is not None:
                end = min(n, self._row + self.batch_size - rows)
            else:
                cumulative = targets + mask[self._row : n].sum(1).cumsum(0)
                end = min(n, self._row + int((cumulative < (self.min_targets or 0)).sum()) + 1)
            parts.append({name: t[self._row : end] for name, t in self._rows.items()})
            rows += end - self._row
            targets += int(mask[self._row : end].sum())
            self._row = end
            if end >= n:
                self._record, self._row, self._rows = self._record + 1, 0, None
        self.tokens_consumed += targets
        batch = parts[0]
        if len(parts) > 1:
            batch = {name: torch.cat([part[name] for part in parts]) for name in ROW_FIELDS}
        rank, size = self.group.rank, self.group.size
        return batch if size == 1 else {name: t[rank::size] for name, t in batch.items()}

    def _read(self) -> dict[str, torch.Tensor]:
        """Return the rows of the next record: views of a slot, or what the rank that tokenized it has sent."""
        rank = self._record % self.sharers
        if self.sharers > 1 and rank != self.group.rank:
            rows, rejected = pickle.loads(self.group.broadcast_bytes(rank))
            self.n_rejected += rejected
            return {name: torch.from_numpy(array) for name, array in rows.items()}
        slot = next(self.reader)
        rejected, n = int(slot.data.n_rejected), int(slot.data.n_rows)
        self.n_rejected += rejected
        views = slot.tensors()
        rows = {name: views[name][:n] for name in ROW_FIELDS}
        if self.sharers > 1:
            arrays = {name: view.numpy() for name, view in rows.items()}
            self.group.broadcast_bytes(rank, pickle.dumps((arrays, rejected)))
        return rows

    def close(self) -> None:
        """End the workers."""
        self.reader.close()

    def __enter__(self) -> StreamBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
