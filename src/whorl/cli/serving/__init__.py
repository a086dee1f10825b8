"""Verbs of the server and the router."""
