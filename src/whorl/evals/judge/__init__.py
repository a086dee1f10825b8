"""A model as judge of two answers: its prompt and verdicts, and its preferences for a position or a length."""
