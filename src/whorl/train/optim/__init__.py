"""Optimisers, learning-rate schedules, muP, stochastic rounding."""
