"""Synthetic people, to measure invented answers, refusal and over-refusal."""
