"""Pruning: structured, and by the optimal brain surgeon."""
