"""Run folders, metrics, progress, random seeds."""
