"""Tasks with an answer that can be checked, and what checks it: rewards and evaluations judge by the same code."""

from whorl.evals.verify.registry import VERIFIERS, parts, tally, verify_all
from whorl.evals.verify.task import Task, Verdict

__all__ = ["VERIFIERS", "Task", "Verdict", "parts", "tally", "verify_all"]
