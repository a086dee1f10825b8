"""Find the documents that hold test items: a unit of work per document file, then a score over all of them.

A unit looks up every n-gram of its documents and writes the hits: row, n-gram, first word. The score of a document and an
item is the weighted fraction of the item's n-grams that the document has:

    score(d, t) = sum of w(g) over g in t and d  /  sum of w(g) over g in t,    w(g) = 1 / (items(g) * documents(g))

documents(g) is the number of documents that have g (at least 1), items(g) that of items. So a phrase that many documents
or items share (boilerplate, such as the instruction of a benchmark) counts little against the words that only this item
has. If a whole item occurs in many documents, all its n-grams do, and the fraction stays 1.

n-grams of 13 words are those of GPT-3 (Brown et al. 2020, appendix C), which marks a document by one; a fraction per item
follows PaLM (Chowdhery et al. 2022, section 8).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.decontamination.items import ItemIndex
from whorl.corpus.decontamination.words import hash_words, ngram_hashes
from whorl.corpus.mapreduce import Executor, Input, LocalPool, Stage, Unit, UnitStore

VERSION = 2  # of `match_file`
BLOCK_CHARACTERS = 1_000_000
_FILTER_ENTRIES = 32  # per n-gram, in the table that is looked up first


class Contamination(NamedTuple):
    """A document's best match. words [begin, end) of the document; score: see the top of this file."""

    row: int
    item: int
    begin: int
    end: int
    score: float


def find_contamination(
    documents: Sequence[Path], index: ItemIndex, *, min_score: float = 0.5, units: Path | None = None,
    executor: Executor | None = None, advance: Callable[[int], Any] = lambda rows: None,
) -> list[Contamination]:  # fmt: skip
    """Return the documents that hold an item, in the order of their rows over all files.

    Args:
        documents: Parquet files with a column `text`.
        min_score: the least score of a match, 0 to 1.
        units: folder of finished units, which later runs reuse; default a temporary folder.
        advance: called with a file's number of rows when it is done.
    """
    temporary = tempfile.TemporaryDirectory() if units is None else nullcontext(units)
    with temporary as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".index-") as scratch:
            grams = Path(scratch, "grams.npy")
            index.save(grams)
            work = [Unit((Input.of(path), Input.of(grams))) for path in documents]
            found = UnitStore(Path(folder)).run(
                Stage(f"{__name__}:match_file", VERSION), work, executor or LocalPool()
            )
        hits, begin = [], 0
        for output in found:
            part = np.load(output.folder / "hits.npy")
            part[:, 0] += begin
            hits.append(part)
            begin += output.summary["documents"]
            advance(output.summary["documents"])
    return score_hits(np.concatenate(hits), index, min_score)


def match_file(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Write the hits of one document file (a unit's function): [n_hits, 3] row, n-gram, first word."""
    import pyarrow.parquet as pq

    finder = _GramFinder(np.load(inputs[1]))
    hits, begin = [np.empty((0, 3), np.int64)], 0
    with pq.ParquetFile(inputs[0]) as file:
        for group in range(file.num_row_groups):
            texts = file.read_row_group(group, columns=["text"])["text"].to_pylist()
            for first, block in _blocks(texts):
                found = finder.find(block)
                found[:, 0] += begin + first
                hits.append(found)
            begin += len(texts)
    np.save(out / "hits.npy", np.concatenate(hits))
    return {"documents": begin}


def _blocks(texts: Sequence[str]) -> list[tuple[int, Sequence[str]]]:
    """Return (first row, texts) of blocks of at most BLOCK_CHARACTERS or one text, ASCII apart from others."""
    blocks: list[tuple[int, Sequence[str]]] = []
    begin = size = 0
    for i, text in enumerate(texts):
        if i > begin and (size + len(text) > BLOCK_CHARACTERS or text.isascii() != texts[begin].isascii()):
            blocks.append((begin, texts[begin:i]))
            begin, size = i, 0
        size += len(text)
    return [*blocks, (begin, texts[begin:])] if texts else []


class _GramFinder:
    """Looks up n-grams: first in a table of booleans by the hash's upper bits, then by binary search.

    Args:
        grams: [2, n_grams] uint64: length and hash, sorted.
    """

    def __init__(self, grams: NDArray[np.uint64]) -> None:
        self.tables: list[tuple[int, int, NDArray[np.uint64], NDArray[np.bool_], np.uint64]] = []
        lengths, bounds = np.unique(grams[0], return_index=True)
        for length, first, last in zip(lengths, bounds, [*bounds[1:], grams.shape[1]], strict=True):
            hashes = grams[1, first:last]
            bits = max(10, int(len(hashes) * _FILTER_ENTRIES).bit_length())
            shift, table = np.uint64(64 - bits), np.zeros(1 << bits, bool)
            table[hashes >> shift] = True
            self.tables.append((int(length), int(first), hashes, table, shift))

    def find(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return row, n-gram and first word of the hits in these texts, [n_hits, 3]; each n-gram once per row."""
        words = hash_words(texts)
        parts = [np.empty((0, 3), np.int64)]
        for length, offset, hashes, table, shift in self.tables:
            found = ngram_hashes(words.hashes, length)
            at = np.flatnonzero(table[found >> shift])
            gram = np.minimum(np.searchsorted(hashes, found[at]), len(hashes) - 1)
            at, gram = at[hashes[gram] == found[at]], gram[hashes[gram] == found[at]]
            row = np.searchsorted(words.first, at, "right") - 1
            inside = at + length <= words.first[row + 1]  # the n-gram does not cross into the next document
            parts.append(np.stack([row, gram + offset, at - words.first[row]], axis=1)[inside])
        hits = np.concatenate(parts)
        _, first = np.unique(hits[:, :2], axis=0, return_index=True)
        return hits[first]


def find_items(
    texts: Iterable[str],
    index: ItemIndex,
    *,
    min_score: float = 0.5,
    advance: Callable[[int], Any] = lambda n: None,
) -> dict[int, Contamination]:
    """Return item -> its best match, for the items that some text holds; `row` is the number of the text.

    Args:
        min_score: the least score of a match, 0 to 1.
        advance: called with the number of texts of each block that is done.
    """
    finder = _GramFinder(np.stack([index.lengths.astype(np.uint64), index.hashes]))
    hits, begin = [np.empty((0, 3), np.int64)], 0
    for batch in _batches(texts):
        for first, block in _blocks(batch):
            found = finder.find(block)
            found[:, 0] += begin + first
            hits.append(found)
        begin += len(batch)
        advance(len(batch))
    return _best(np.concatenate(hits), index, min_score, lambda match: match.item)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts with about BLOCK_CHARACTERS."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BLOCK_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def score_hits(hits: NDArray[np.int64], index: ItemIndex, min_score: float) -> list[Contamination]:
    """Return the best match of each row whose score reaches `min_score`.

    Args:
        hits: [n_hits, 3] row, n-gram, first word; each n-gram at most once per row.
    """
    return list(_best(hits, index, min_score, lambda match: match.row).values())


def _best(
    hits: NDArray[np.int64], index: ItemIndex, min_score: float, key: Callable[[Contamination], int]
) -> dict[int, Contamination]:
    """Return the match with the highest score for each key, of equal ones the first."""
    n_items = np.diff(index.gram_first)
    n_documents = np.maximum(np.bincount(hits[:, 1], minlength=len(n_items)), 1)
    weights = 1 / (n_items * n_documents)  # [n_grams]
    totals = np.bincount(index.gram_items, np.repeat(weights, n_items), minlength=len(index.items))
    # One entry per hit and item of its n-gram.
    row, gram, at = np.repeat(hits, n_items[hits[:, 1]], axis=0).T
    before = np.cumsum(n_items[hits[:, 1]]) - n_items[hits[:, 1]]
    nth = np.arange(len(row)) - np.repeat(before, n_items[hits[:, 1]])
    item = index.gram_items[index.gram_first[gram] + nth]
    pairs, inverse = np.unique(row * len(index.items) + item, return_inverse=True)
    scores = np.bincount(inverse, weights[gram], minlength=len(pairs)) / totals[pairs % len(index.items)]
    begin = np.full(len(pairs), np.iinfo(np.int64).max)
    np.minimum.at(begin, inverse, at)
    end = np.zeros(len(pairs), np.int64)
    np.maximum.at(end, inverse, at + index.lengths[gram])
    out: dict[int, Contamination] = {}
    rows, items = np.divmod(pairs, len(index.items))
    for i in np.flatnonzero(scores >= min_score - 1e-9).tolist():
        match = Contamination(
            int(rows[i]), int(items[i]), int(begin[i]), int(end[i]), float(min(scores[i], 1.0))
        )
        best = out.get(key(match))
        if best is None or match.score > best.score:
            out[key(match)] = match
    return out
