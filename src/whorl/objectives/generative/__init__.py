"""Objectives of generative models: Gaussian paths, bounds of the likelihood, and codes."""
