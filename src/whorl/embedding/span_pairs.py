"""Pairs of spans of documents: the training data of an embedder, and its recall on held-out documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whorl.data.epoch_order import EpochOrder
from whorl.embedding.embedder import Vectors
from whorl.embedding.job import EmbedJob
from whorl.embedding.words import WordsSplit
from whorl.errors import DataError
from whorl.tokens.shards import TokenSet, TokenSplit
from whorl.tokens.tokenizer import Ids, Tokenizer
from whorl.tracking.seeds import numpy_rng


class Spans(NamedTuple):
    """Two disjoint spans of each of some documents, and the documents' numbers [n]."""

    first: list[Ids]
    second: list[Ids]
    documents: NDArray[np.int64]


class SpanPairs:
    """The documents of a split that are long enough for two spans.

    Args:
        max_span: ids of the longest span.
        min_span: ids of the shortest; documents of fewer than twice as many are skipped and counted in `skipped`.
    """

    def __init__(self, split: TokenSplit | WordsSplit, max_span: int, min_span: int) -> None:
        self.split, self.max_span, self.min_span = split, max_span, min_span
        self.documents = np.flatnonzero(split.lengths - 2 >= 2 * min_span)  # lengths count bos and eos
        self.skipped = len(split.lengths) - len(self.documents)
        self._order: EpochOrder | None = None

    def __len__(self) -> int:
        return len(self.documents)

    def batch(self, seed: int, step: int, size: int) -> Spans:
        """Return the pairs of a step, a function of the arguments; each pass over the documents has its own order."""
        positions = range(step * size, (step + 1) * size)
        return self.spans(
            np.array([self._document_at(seed, position) for position in positions]),
            numpy_rng(seed, "spans", step),
        )

    def spans(self, documents: NDArray[np.int64], rng: np.random.Generator) -> Spans:
        """Draw two spans of each of `documents`."""
        n = self.split.lengths[documents] - 2  # [N]
        longest = np.minimum(self.max_span, n // 2)
        # Log-uniform over [min_span, longest + 1), rounded down, independently for each of the two lengths.
        sizes = self.min_span * ((longest + 1) / self.min_span) ** rng.random((2, len(n)))
        a, b = np.minimum(sizes.astype(np.int64), longest)
        low, high = np.sort(rng.integers(0, n - a - b + 1, (2, len(n))), axis=0)
        begin = self.split.starts[documents] + 1
        earlier, later = begin + low, begin + high + a
        taken = [
            (self.split[s : s + m], self.split[t : t + k])
            for s, m, t, k in zip(earlier.tolist(), a.tolist(), later.tolist(), b.tolist(), strict=True)
        ]
        swapped = rng.random(len(n)) < 0.5  # either side may be the earlier one
        first = [pair[int(turn)] for pair, turn in zip(taken, swapped, strict=True)]
        second = [pair[1 - int(turn)] for pair, turn in zip(taken, swapped, strict=True)]
        return Spans(first, second, documents)

    def _document_at(self, seed: int, place: int) -> int:
        if self._order is None or self._order.seed != seed:
            self._order = EpochOrder(seed, "documents", n=len(self.documents))
        return int(self.documents[self._order[place]])


class RecallEvaluator:
    """How often the other span of a held-out document is among the nearest of all N.

    The spans are the same for every job with the same lengths, so that values can be compared.
    """

    def __init__(self, pairs: SpanPairs, max_documents: int) -> None:
        step = max(1, -(-len(pairs) // max_documents))  # spread over the split
        self.spans = pairs.spans(pairs.documents[::step], numpy_rng(0, "held-out spans"))

    def __len__(self) -> int:
        return len(self.spans.documents)

    def __call__(self, embed: Callable[[list[Ids]], Vectors]) -> dict[str, float]:
        """Return recall_at_1 and recall_at_10, averaged over both directions."""
        x, y = embed(self.spans.first), embed(self.spans.second)
        return {f"recall_at_{k}": recall(x, y, k) for k in (1, 10)}


def recall(x: Vectors, y: Vectors, k: int) -> float:
    """Fraction of rows of x whose own row of y is among the k nearest of all of y, averaged over both directions.

    x, y: [N, d]. A tie with the own row counts as nearer, so equal vectors have recall 0.
    """
    cosines = x @ y.T
    found = []
    for similarity in (cosines, cosines.T):
        # A comparison with NaN is False.
        farther = (similarity < np.diagonal(similarity)[:, None]).sum(axis=1)
        found.append(float(((len(similarity) - 1 - farther) < k).mean()))
    return sum(found) / 2


def open_pairs(
    job: EmbedJob, log: Callable[[str], None] = lambda text: None
) -> tuple[SpanPairs, RecallEvaluator | None]:
    """Return the training pairs and the recall evaluator, None with fewer than two held-out documents.

    Raises:
        DataError: as `train_embedder`.
    """
    tokens = TokenSet(Path(job.tokens))
    if tokens.vocab_size > job.encoder.vocab_size:
        raise DataError(
            f"{job.tokens} has {tokens.vocab_size:,} ids and the encoder {job.encoder.vocab_size:,}",
            expected="an encoder whose vocab_size is at least the token set's",
        )
    tokenizer = Tokenizer.load(Path(job.tokenizer)) if job.words else None

    def opened(name: str) -> TokenSplit | WordsSplit:
        return WordsSplit(tokens.split(name), tokenizer) if tokenizer else tokens.split(name)

    pairs = SpanPairs(opened("train"), job.encoder.max_length, job.min_span)
    if pairs.skipped:
        log(
            f"{pairs.skipped:,} of {pairs.split.n_documents:,} documents skipped: "
            f"fewer than {2 * job.min_span} ids, too short for two spans"
        )
    if len(pairs) < job.batch_size:
        raise DataError(
            f"{len(pairs):,} documents are long enough for two spans of {job.min_span} ids",
            expected=f"at least the {job.batch_size} of a batch",
            do="lower batch_size or min_span, or use more documents",
        )
    evaluator = None
    if "validation" in tokens.splits:
        validation = SpanPairs(opened("validation"), job.encoder.max_length, job.min_span)
        evaluator = RecallEvaluator(validation, job.held_out) if len(validation) > 1 else None
    if evaluator is None:
        log("fewer than two held-out documents are long enough: recall is not measured")
    return pairs, evaluator
