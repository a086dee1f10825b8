"""Verbs that use or convert one model."""
