"""Training metrics: averages between reports, layer statistics, noise scale, expert balance, validation."""
