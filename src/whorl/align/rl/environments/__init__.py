"""Environments of language models that come with the package."""
