"""Semantic deduplication of embeddings (SemDeDup, Abbas et al. 2023, arXiv:2303.09540)."""
