"""Profiles of a training step: time by region, FLOPs, kernels."""
