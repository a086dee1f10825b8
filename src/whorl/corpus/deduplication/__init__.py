"""Deduplication: near duplicates by MinHash with verified removals, lines, exact substrings, and Bloom filters.

See `docs/corpus.md`. `near` has MinHash; `shingles.py` the hashes of words that the other kinds use, too.
"""

from whorl.corpus.deduplication.bloom import BloomFilter, text_keys
from whorl.corpus.deduplication.lines import LineConfig, LineDuplicates, deduplicate_lines
from whorl.corpus.deduplication.near import (
    NearDuplicates,
    find_near_duplicates,
    rewrite_documents,
    write_duplicates,
)
from whorl.corpus.deduplication.settings import MinHashConfig, collision_probability, curve_threshold
from whorl.corpus.deduplication.substrings import SubstringSpans, deduplicate_substrings, repeated_spans

__all__ = [
    "BloomFilter",
    "LineConfig",
    "LineDuplicates",
    "MinHashConfig",
    "NearDuplicates",
    "SubstringSpans",
    "collision_probability",
    "curve_threshold",
    "deduplicate_lines",
    "deduplicate_substrings",
    "find_near_duplicates",
    "repeated_spans",
    "rewrite_documents",
    "text_keys",
    "write_duplicates",
]
