"""Bits per byte of compressors and of an n-gram model on the held-out files, to compare a model with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whorl.evals.compressors import measure_compressors
from whorl.evals.ngram import NGram
from whorl.tokens.shards import TokenSet
from whorl.tracking.progress import Progress


def measure_baselines(
    held_out: Sequence[bytes],
    train: Sequence[bytes],
    tokens: TokenSet,
    *,
    order: int,
    workers: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return {"name", "bits_per_byte", "kind": "compressor" or "ngram"} of each method.

    Args:
        held_out, train: texts of the test and of the training split, one per file.
        tokens: the same splits as tokens, for the n-gram model.
        order: of the n-gram model. workers: processes that compress.
    """
    with progress.task("Compressing the same files", total=None) as task:
        results = measure_compressors(
            held_out, train, workers=workers, on_result=lambda c: task.update(note=c.name)
        )
    found = [{"name": c.name, "bits_per_byte": c.bits_per_byte, "kind": "compressor"} for c in results]
    with progress.task(f"{order}-gram model", total=None):
        documents = [ids[1:] for ids in tokens.split("train").iter_documents()]
        model = NGram(documents, tokens.vocab_size, order, tokens.bos_id)
        bits = model.bits([ids[1:] for ids in tokens.split("test").iter_documents()])
    name = f"{order}-gram, modified Kneser-Ney, same tokens"
    return [*found, {"name": name, "bits_per_byte": bits / sum(map(len, held_out)), "kind": "ngram"}]
