"""Metrics of a training run: throughput, layer statistics, noise scale, validation."""
