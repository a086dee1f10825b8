"""Removal of repeated lines and substrings from texts in memory, with the functions that the steps call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from whorl.corpus.deduplication.lines import LineConfig, line_hashes, repeated_lines
from whorl.corpus.deduplication.substrings import SubstringSpans, repeated_spans, without_bytes
from whorl.corpus.rewrite_stages import without_lines


def deduplicate_lines(
    texts: Sequence[str], config: LineConfig | None = None
) -> tuple[list[str], list[int], int]:
    """Return the texts, the number of removed lines of each, and the bytes that went."""
    config = config or LineConfig()
    hashes, first = line_hashes(texts, config)
    removed = repeated_lines(hashes, config.keep)
    gone = [np.flatnonzero(removed[a:b]) for a, b in itertools.pairwise(first.tolist())]
    kept = [without_lines(text, some, some + 1) for text, some in zip(texts, gone, strict=True)]
    size, rest = (len("".join(side).encode("utf-8", "surrogatepass")) for side in (texts, kept))
    return kept, [len(some) for some in gone], size - rest


def deduplicate_substrings(texts: Sequence[str], min_bytes: int = 200) -> tuple[list[str], SubstringSpans]:
    """Return the texts, and the spans that were removed."""
    spans, out = repeated_spans(texts, min_bytes), []
    for number, text in enumerate(texts):
        own = spans.document == number
        out.append(without_bytes(text, spans.start[own].tolist(), spans.end[own].tolist()))
    return out, spans
