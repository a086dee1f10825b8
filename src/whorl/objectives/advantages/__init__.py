"""Advantage and return estimators, and importance weights: pure functions, no gradient."""
