"""Python functions of a corpus, and tasks to complete them with a program as verifier."""
