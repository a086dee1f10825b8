"""Bits per byte of compressors and of an n-gram model on the held-out files, to compare a model with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from whorl.corpus.measures.trained.kneser_ney import NGram
from whorl.evals.compressors import measure_compressors
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Ids
from whorl.tracking.progress import Progress

T = TypeVar("T")


def measure_baselines(
    held_out: Sequence[bytes],
    train: Sequence[bytes],
    tokens: TokenSet,
    test: Sequence[Ids],
    *,
    fraction: float = 1.0,
    order: int,
    workers: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return {"name", "bits_per_byte", "kind": "compressor" or "ngram"} of each method.

    Args:
        held_out, train: texts of the test and of the training split, one per file.
        tokens: the training split as tokens, for the n-gram model. test: the held-out files as tokens.
        fraction: of the training texts that primed compressors and the n-gram model read, evenly spread.
        order: of the n-gram model. workers: threads that compress and count.
    """

    def ngram_bits() -> float:
        split = tokens.split("train")
        documents = [split.document(i)[1:] for i in spread(range(split.n_documents), fraction)]
        model = NGram(documents, tokens.vocab_size, order, tokens.bos_id)
        return model.bits([ids[1:] for ids in test])

    with (
        progress.task("Baselines on the same files", unit="methods") as task,
        ThreadPoolExecutor(max(1, workers)) as pool,
    ):
        ngram = pool.submit(ngram_bits)  # first, as the second longest after xz
        results = measure_compressors(
            held_out, spread(train, fraction), pool=pool, on_result=lambda c: task.advance(note=c.name)
        )
        bits = ngram.result()
    found = [{"name": c.name, "bits_per_byte": c.bits_per_byte, "kind": "compressor"} for c in results]
    name = f"{order}-gram, modified Kneser-Ney, same tokens"
    return [*found, {"name": name, "bits_per_byte": bits / sum(map(len, held_out)), "kind": "ngram"}]


def spread(items: Sequence[T], fraction: float) -> list[T]:
    """Return a fraction of the items at equal distances, at least one of them."""
    count = math.ceil(round(len(items) * fraction, 6))
    return [items[i * len(items) // count] for i in range(count)]
