"""Verbs of the artifact store."""
