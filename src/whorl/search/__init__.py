"""Search: an embedded index of text and vectors, and larger ones behind the same interface."""
