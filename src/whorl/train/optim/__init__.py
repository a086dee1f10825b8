"""Optimizers, learning-rate schedules, muP, stochastic rounding."""
