"""Token shards: a split of a corpus as one stream of ids on disk, with the provenance of every document.

    train-00000.bin, train-00001.bin, ...   ids, uint16 or uint32, no header; memory-mapped
    train-documents.parquet                 one row per document: start, length, bytes, id, source, path, offset
    tokens.json                             dtype, special ids, shard sizes, a fingerprint

The stream is the concatenation of the shards; each document is bos, its tokens, eos. No document crosses the end of a
shard, so a shard can be read alone, and a span of a document is one slice of one map.

The fingerprint covers every id in order. A loader keeps it in its state, so a run resumed on other data raises an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import DataError, one_of
from whorl.tokens.hf_tokenizer import AnyTokenizer, HFTokenizer
from whorl.tokens.tokenizer import Ids

if TYPE_CHECKING:
    import pyarrow as pa

    from whorl.corpus.documents import Document
    from whorl.tracking.progress import Progress

INDEX_FILE = "tokens.json"
DOCUMENT_COLUMNS = {  # name -> type
    "start": "int64", "length": "int64", "bytes": "int64", "id": "string", "source": "string", "path": "string",
    "offset": "int64",
}  # fmt: skip
_BATCH_BYTES = 4 << 20  # text encoded at a time, enough work for all threads


class TokensConfig(BaseModel):
    """Settings of the step that writes token shards."""

    model_config = ConfigDict(extra="forbid")

    shard_tokens: int = Field(
        default=1 << 27,
        ge=1 << 10,
        description="maximum ids per shard file (a longer document gets a separate file)",
    )
    splits: list[str] = Field(default=["train", "validation", "test"], min_length=1)


class DocumentEncoder:
    """Encodes documents with a tokenizer of `transformers`, and frames them: where it has no bos, with its end id.

    Raises:
        DataError: the tokenizer has no token that ends a text.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        if not tokenizer.end_ids:
            raise DataError("the tokenizer has no end-of-text token", do="start from another model")
        self._tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.eos_id = self.pad_id = tokenizer.end_ids[0] if tokenizer.eos_id is None else tokenizer.eos_id
        self.bos_id = self.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        self.dtype: Any = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text, without its frame."""
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(ids, self.dtype) for ids in found]


class TokenProvenance(NamedTuple):
    """Origin of a token: the record at byte `offset` of `path`, `text_offset` bytes into its text."""

    document: str
    source: str
    path: str
    offset: int
    text_offset: int


def write_shards(
    documents: Iterable[Document],
    tokenizer: AnyTokenizer,
    out: Path,
    split: str,
    config: TokensConfig | None = None,
    progress: Progress | None = None,
    total_bytes: int | None = None,
) -> dict[str, Any]:
    """Encode the documents of one split into `out` and add it to `out/tokens.json`.

    Args:
        total_bytes: the size of the documents, if known; the total of the progress bar.

    Returns:
        documents, tokens, bytes, bytes_per_token, fingerprint.
    """
    from whorl.tracking.progress import Progress

    config = config or TokensConfig()
    total = total_bytes / 1e6 if total_bytes else None
    encoder = DocumentEncoder(tokenizer) if isinstance(tokenizer, HFTokenizer) else tokenizer
    writer = ShardWriter(out, split, encoder, config.shard_tokens)
    with writer, (progress or Progress.silent()).task(f"Encoding {split}", total, "MB") as task:
        for group in _group_documents(documents):
            done = writer.n_bytes
            encoded = encoder.encode_batch([document.text for document in group])
            for document, ids in zip(group, encoded, strict=True):
                size = len(document.text.encode())
                writer.add(ids, size, document.id, document.source, document.path, document.offset)
            task.advance((writer.n_bytes - done) / 1e6)
    return writer.finish()


class TokenSplit:
    """One split, open for reading: ids by span, documents by number."""

    def __init__(self, folder: Path, split: str, entry: dict[str, Any], dtype: np.dtype[Any]) -> None:
        self.folder, self.name = folder, split
        self.fingerprint: str = entry["fingerprint"]
        self.n_bytes: int = entry["bytes"]
        self.n_documents: int = entry["documents"]
        self._dtype = dtype
        self._shard_ends = (
            np.cumsum(np.array(entry["shards"], np.int64)) if entry["shards"] else np.zeros(0, np.int64)
        )
        self._memmaps: dict[int, Ids] = {}

    def __len__(self) -> int:
        """Number of ids in the stream."""
        return int(self._shard_ends[-1]) if len(self._shard_ends) else 0

    def __getitem__(self, where: slice) -> Ids:
        """ids[start:stop], without a copy if the span lies in one shard (a document always does)."""
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError("a token stream supports slices of step 1 only")
        parts: list[Ids] = []
        while start < stop:
            shard = int(np.searchsorted(self._shard_ends, start, side="right"))
            shard_start = int(self._shard_ends[shard - 1]) if shard else 0
            end = min(stop, int(self._shard_ends[shard]))
            parts.append(self._open_shard(shard)[start - shard_start : end - shard_start])
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self._dtype)

    def take(self, positions: NDArray[np.int64]) -> Ids:
        """Return the ids at positions [rows, n]; each row lies within one document."""
        if not len(positions):
            return np.empty(positions.shape, self._dtype)
        if len(self._shard_ends) == 1:
            return self._open_shard(0).take(positions)
        shards = np.searchsorted(self._shard_ends, positions[:, 0], side="right")
        ids = np.empty(positions.shape, self._dtype)
        for shard in np.unique(shards).tolist():
            shard_start = int(self._shard_ends[shard - 1]) if shard else 0
            ids[shards == shard] = self._open_shard(shard).take(positions[shards == shard] - shard_start)
        return ids

    def _open_shard(self, shard: int) -> Ids:
        if shard not in self._memmaps:
            path = self.folder / _shard_name(self.name, shard)
            shard_start = int(self._shard_ends[shard - 1]) if shard else 0
            n = int(self._shard_ends[shard]) - shard_start
            if not path.exists() or path.stat().st_size != n * self._dtype.itemsize:
                raise DataError(
                    f"{path} is missing or its size differs from the index",
                    expected=f"{n * self._dtype.itemsize} bytes",
                    do="run `whorl verify`, then make the token set again",
                )
            # A plain array: every slice of a memmap has overhead.
            self._memmaps[shard] = np.asarray(np.memmap(path, self._dtype, "r"))
        return self._memmaps[shard]

    @cached_property
    def documents(self) -> pa.Table:
        """The document table: start, length, bytes, id, source, path, offset."""
        import pyarrow.parquet as pq

        return pq.read_table(self.folder / f"{self.name}-documents.parquet")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[documents] start of each document in the stream."""
        return np.asarray(self.documents["start"], np.int64)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[documents] ids of each document, bos and eos included."""
        return np.asarray(self.documents["length"], np.int64)

    def document(self, number: int) -> Ids:
        """Return the ids of one document, bos and eos included."""
        start = int(self.starts[number])
        return self[start : start + int(self.lengths[number])]

    def iter_documents(self) -> Iterator[Ids]:
        """Yield the ids of every document, in stream order."""
        for number in range(self.n_documents):
            yield self.document(number)


class TokenSet:
    """A folder that `write_shards` wrote.

    Raises:
        DataError: there is no token set, or (on `split`) no such split.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            index = json.loads((self.folder / INDEX_FILE).read_text(encoding="utf-8"))
            self._splits: dict[str, dict[str, Any]] = index["splits"]
            self.dtype: np.dtype[Any] = np.dtype(index["dtype"])
            self.vocab_size: int = index["vocab_size"]
            self.bos_id, self.eos_id, self.pad_id = (int(index[k]) for k in ("bos_id", "eos_id", "pad_id"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.folder} holds no token set: {type(error).__name__}: {error}",
                expected=f"a folder with {INDEX_FILE}, written by the step `tokens`",
            ) from error
        self._opened_splits: dict[str, TokenSplit] = {}

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    def split(self, name: str) -> TokenSplit:
        if name not in self._splits:
            raise DataError(f"{self.folder} has no split {name!r}", expected=one_of(name, self.splits))
        if name not in self._opened_splits:
            self._opened_splits[name] = TokenSplit(self.folder, name, self._splits[name], self.dtype)
        return self._opened_splits[name]

    def trace(
        self, position: int, split: str = "train", tokenizer: AnyTokenizer | None = None
    ) -> TokenProvenance:
        """Return the document, and the offset in it, of the id at `position` of a split's stream.

        Without the tokenizer `text_offset` is 0: the bytes before a token follow from the tokens before it.
        """
        stream = self.split(split)
        if not 0 <= position < len(stream):
            raise DataError(f"no token {position} in {split}", expected=f"0 to {len(stream) - 1}")
        number = int(np.searchsorted(stream.starts, position, side="right")) - 1
        row = {
            name: stream.documents[name][number].as_py()
            for name in ("id", "source", "path", "offset", "bytes")
        }
        text_offset = 0
        if tokenizer is not None:
            before = stream[int(stream.starts[number]) + 1 : max(position, int(stream.starts[number]) + 1)]
            text_offset = min(len(tokenizer.decode(before)), row["bytes"])
        return TokenProvenance(row["id"], row["source"], row["path"], row["offset"], text_offset)


class ShardWriter:
    """Appends documents to shard files; starts a new file if the next document does not fit.

    vocabulary: the special ids that frame a document, `vocab_size` and `dtype`, such as a `Tokenizer`.
    """

    def __init__(self, out: Path, split: str, vocabulary: Any, shard_tokens: int) -> None:
        self.out, self.split, self.vocabulary, self.limit = out, split, vocabulary, shard_tokens
        self.sizes: list[int] = []
        self.total = self.n_bytes = 0
        self.table: dict[str, list[Any]] = {name: [] for name in DOCUMENT_COLUMNS}
        self.hash = hashlib.blake2b(digest_size=16)
        self._file: Any = None

    def add(self, ids: Ids, n_bytes: int, name: str, source: str, path: str, offset: int) -> None:
        """Append one document, with bos and eos around its ids, and record where it came from."""
        frame = self.vocabulary
        ids = np.concatenate(([frame.bos_id], ids, [frame.eos_id])).astype(frame.dtype)
        if self._file is None or (self.sizes[-1] and self.sizes[-1] + len(ids) > self.limit):
            self.close()
            self._file = (self.out / _shard_name(self.split, len(self.sizes))).open("wb")
            self.sizes.append(0)
        data = ids.tobytes()
        self._file.write(data)
        self.hash.update(data)
        row = (self.total, len(ids), n_bytes, name, source, path, offset)
        for column, value in zip(self.table.values(), row, strict=True):
            column.append(value)
        self.sizes[-1] += len(ids)
        self.total += len(ids)
        self.n_bytes += n_bytes

    def finish(self) -> dict[str, Any]:
        """Write the table of documents and the entry of the split in `tokens.json`; return the entry without shards."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        n_documents = len(self.table["id"])
        table = {k: pa.array(v, DOCUMENT_COLUMNS[k]) for k, v in self.table.items()}
        pq.write_table(pa.table(table), self.out / f"{self.split}-documents.parquet")
        summary = {
            "documents": n_documents,
            "tokens": self.total,
            "bytes": self.n_bytes,
            "bytes_per_token": self.n_bytes / max(1, self.total - 2 * n_documents),
            "fingerprint": self.hash.hexdigest(),
        }
        path = self.out / INDEX_FILE
        index: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"splits": {}}
        )
        index["dtype"] = np.dtype(self.vocabulary.dtype).name
        index |= {key: getattr(self.vocabulary, key) for key in ("vocab_size", "bos_id", "eos_id", "pad_id")}
        index["splits"][self.split] = {**summary, "shards": self.sizes}
        path.write_text(json.dumps(index, indent=1), encoding="utf-8")
        return summary

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shard_name(split: str, shard: int) -> str:
    return f"{split}-{shard:05d}.bin"


def _group_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
