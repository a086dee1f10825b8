"""Line-level deduplication: lines that repeat in a corpus, such as navigation and licence headers.

Lines are compared by a 64-bit hash of their words after normalization, so runs of white space count as one space. The
polynomial hash of `shingles.py` is computed over a block of lines at a time. Different lines collide with a probability
of about n^2 / 2^65 for n lines: 3 % at 10^9.

`corpus/rewrite.py` calls `line_hashes` per file, and `repeated_lines` once over all hashes: 8 bytes per line, in the order
of the files.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.deduplication.shingles import BLOCK_BYTES, TextBlock, span_hashes

_NEWLINE = 10
_IS_SPACE = np.isin(np.arange(256), [9, 10, 11, 12, 13, 32])


class LineConfig(BaseModel):
    """Which lines are equal, and which of them stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Literal["first", "none"] = Field(
        default="first", description="of lines that repeat, keep the first, or none of them"
    )
    normalization: Literal["none", "lower", "nfkc_lower"] = Field(
        default="none", description="lower: small letters; nfkc_lower: compatibility forms first"
    )
    min_characters: int = Field(
        default=1, ge=1, description="lines with fewer characters, without white space, always stay"
    )


def line_hashes(
    texts: Sequence[str], config: LineConfig | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the hash of every line, and the first line of each text: [n_lines], [n_texts + 1].

    The hash is 0 for a line that always stays: one below `min_characters`, or one of more than 2 MB.
    """
    config = config or LineConfig()
    encoded = [f"{_normalized(text, config)}\n".encode("utf-8", "surrogatepass") for text in texts]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    ends = np.flatnonzero(data == _NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    stops = np.cumsum([0, *map(len, encoded)])  # text i ends before stops[i + 1], with a line feed
    first = np.searchsorted(ends, stops)
    out = np.zeros(len(ends), np.uint64)
    for a, b in TextBlock(data, starts, ends).blocks():
        if ends[b - 1] - starts[b - 1] <= BLOCK_BYTES:
            base = starts[a]
            part = data[base : ends[b - 1]]
            out[a:b] = _hashes(part, starts[a:b] - base, ends[a:b] - base, config.min_characters)
    return out, first


def _hashes(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], min_characters: int
) -> NDArray[np.uint64]:
    """Return the hashes of lines. White space is left out; the first byte of a word has another value than the rest."""
    space = _IS_SPACE[data]
    word_start = np.concatenate([[True], space[:-1]])[: len(data)]
    values = (data + np.uint64(1) + (word_start * np.uint64(256)))[~space]
    index = np.concatenate([[0], np.cumsum(~space)])
    hashes = np.maximum(span_hashes(values, index[starts], index[ends]), np.uint64(1))
    characters = np.concatenate([[0], np.cumsum(~space & ((data & 0xC0) != 0x80))])
    hashes[characters[ends] - characters[starts] < min_characters] = 0
    return hashes


def repeated_lines(hashes: NDArray[np.uint64], keep: Literal["first", "none"] = "first") -> NDArray[np.bool_]:
    """Return which lines are removed: [n_lines]. `hashes` is of the whole corpus, in its order."""
    _, first, inverse, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    repeated: NDArray[np.bool_] = counts[inverse] > 1
    repeated &= hashes != 0
    if keep == "first":
        repeated[first] = False
    return repeated


def _normalized(text: str, config: LineConfig) -> str:
    if config.normalization == "nfkc_lower":
        text = unicodedata.normalize("NFKC", text)
    return text if config.normalization == "none" else text.lower()
