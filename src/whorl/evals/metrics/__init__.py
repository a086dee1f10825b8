"""Metrics of generated texts and of probabilities: pure functions with one registry."""

from whorl.evals.metrics.registry import METRICS, ProgramMetric, get_metric, grade_all, needs_sandbox
from whorl.evals.metrics.result import Graded, outcome_shares

__all__ = ["METRICS", "Graded", "ProgramMetric", "get_metric", "grade_all", "needs_sandbox", "outcome_shares"]
