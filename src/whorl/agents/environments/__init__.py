"""Environments: built-in dynamics as tensor operations, and those of gymnasium."""
