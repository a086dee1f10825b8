"""Evaluation: bits per byte, baselines (compressors, n-grams), and generation that can be verified."""
