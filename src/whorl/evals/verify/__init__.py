"""Tasks with an answer that can be checked, and what checks it: rewards and evaluations judge by the same code."""

from whorl.evals.verify.registry import VERIFIERS, parse_verifiers, verdict_metrics, verify_all
from whorl.evals.verify.task import Verdict, VerifiableTask

__all__ = ["VERIFIERS", "Verdict", "VerifiableTask", "parse_verifiers", "verdict_metrics", "verify_all"]
