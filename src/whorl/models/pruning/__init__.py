"""Structured pruning with least-squares compensation (Optimal Brain Surgeon)."""
