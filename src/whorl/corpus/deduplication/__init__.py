"""Deduplication: near duplicates by MinHash with verified removals, lines, and exact substrings.

See `docs/corpus.md`. `near` has MinHash; `shingles.py` the hashes of words that the other kinds use, too.
"""
