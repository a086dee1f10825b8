"""Semantic deduplication of embeddings (SemDeDup, Abbas et al. 2023, arXiv:2303.09540)."""

from whorl.corpus.deduplication.semantic.kmeans import train_centroids
from whorl.corpus.deduplication.semantic.search import SemanticDuplicates, Vectors, semantic_duplicates

__all__ = ["SemanticDuplicates", "Vectors", "semantic_duplicates", "train_centroids"]
