"""Deduplication: MinHash with verified removals, as units of work.

See `docs/corpus.md`. `near.py` has the stages, `clusters.py` the clusters of the split.
"""

from whorl.corpus.deduplication.near import NearDuplicates, find_near_duplicates
from whorl.corpus.deduplication.outputs import rewrite_documents, write_duplicates
from whorl.corpus.deduplication.settings import MinHashConfig, collision_probability, curve_threshold

__all__ = [
    "MinHashConfig",
    "NearDuplicates",
    "collision_probability",
    "curve_threshold",
    "find_near_duplicates",
    "rewrite_documents",
    "write_duplicates",
]
