"""Smaller models: pruning of heads and channels, and quantization of weights."""
