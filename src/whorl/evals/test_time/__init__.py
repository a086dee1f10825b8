"""Test-time scaling: accuracy against sampled tokens."""
