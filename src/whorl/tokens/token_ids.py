"""A token set from token ids that came without text: one's own tensors.

Three further ids frame each document: bos = n, eos = n + 1, pad = n + 2, for a vocabulary of n ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whorl.errors import DataError
from whorl.tokens.shards import ShardWriter, TokensConfig


@dataclass(frozen=True)
class IdVocabulary:
    """The vocabulary entries of a token set that has no tokenizer. n_ids: the caller's ids, 0 to n_ids - 1."""

    n_ids: int

    @property
    def vocab_size(self) -> int:
        return self.n_ids + 3

    @property
    def bos_id(self) -> int:
        return self.n_ids

    @property
    def eos_id(self) -> int:
        return self.n_ids + 1

    @property
    def pad_id(self) -> int:
        return self.n_ids + 2

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


def write_id_shards(
    documents: Iterable[np.ndarray[Any, Any]], n_ids: int, out: Path, split: str
) -> dict[str, Any]:
    """Write one split of a token set from arrays of ids, each [n].

    Returns:
        documents, tokens, bytes (that of the ids), bytes_per_token, fingerprint.

    Raises:
        DataError: an id outside of 0 to n_ids - 1; the document's number is named.
    """
    writer = ShardWriter(out, split, IdVocabulary(n_ids), TokensConfig().shard_tokens)
    with writer:
        for number, ids in enumerate(documents):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n_ids:
                raise DataError(
                    f"document {number} of {split} has ids from {ids.min()} to {ids.max()}",
                    expected=f"0 to {n_ids - 1}",
                    do="give vocab_size, the number of ids",
                )
            writer.add(ids, ids.nbytes, f"{split}-{number}", "ids", f"{number}", 0)
    return writer.finish()
