"""Scaling laws: the law itself, runs as points, three fits, and studies that make the runs."""
