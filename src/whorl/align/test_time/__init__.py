"""Test-time scaling: pass@k, best of n and majority votes."""
