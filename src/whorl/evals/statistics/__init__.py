"""Statistics of evaluations: intervals, paired comparisons, corrections for many tasks, power, pass@k."""
