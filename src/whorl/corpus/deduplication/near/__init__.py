"""Near duplicates by MinHash: stages (`stages.py`), verified removal (`verify.py`), clusters for the split (`clusters`)."""

from whorl.corpus.deduplication.near.outputs import rewrite_documents, write_duplicates
from whorl.corpus.deduplication.near.stages import NearDuplicates, find_near_duplicates

__all__ = ["NearDuplicates", "find_near_duplicates", "rewrite_documents", "write_duplicates"]
