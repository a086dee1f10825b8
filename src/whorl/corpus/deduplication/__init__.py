"""Deduplication: near duplicates by MinHash with verified removals, lines, and exact substrings.

See `docs/corpus.md`. `near` has MinHash; `shingles.py` the hashes of words that the other kinds use, too.
"""

from whorl.corpus.deduplication.lines import LineConfig
from whorl.corpus.deduplication.near.outputs import write_duplicates
from whorl.corpus.deduplication.near.stages import NearDuplicates, find_near_duplicates
from whorl.corpus.deduplication.settings import MinHashConfig, collision_probability
from whorl.corpus.deduplication.substrings import SubstringSpans, repeated_spans

__all__ = [
    "LineConfig",
    "MinHashConfig",
    "NearDuplicates",
    "SubstringSpans",
    "collision_probability",
    "find_near_duplicates",
    "repeated_spans",
    "write_duplicates",
]
