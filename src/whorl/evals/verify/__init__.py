"""Tasks with an answer that can be checked, and what checks it: rewards and evaluations judge by the same code."""
