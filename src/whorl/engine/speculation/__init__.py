"""Speculative decoding: the proposers of drafts, their loading and their measurement."""
