"""Semantic deduplication of embeddings (SemDeDup, Abbas et al. 2023, arXiv:2303.09540)."""

from whorl.corpus.deduplication.semantic.kmeans import train_centroids
from whorl.corpus.deduplication.semantic.search import (
    Pairs,
    SemanticDuplicates,
    semantic_duplicates,
    similar_pairs,
)
from whorl.corpus.deduplication.semantic.settings import SearchConfig, SemanticConfig
from whorl.corpus.deduplication.semantic.vectors import TextEncoder, Vectors, embed_files

__all__ = [
    "Pairs",
    "SearchConfig",
    "SemanticConfig",
    "SemanticDuplicates",
    "TextEncoder",
    "Vectors",
    "embed_files",
    "semantic_duplicates",
    "similar_pairs",
    "train_centroids",
]
