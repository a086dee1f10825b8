"""Verifiable tasks and their verifiers, used by rewards and by evaluations."""

from whorl.evals.verify.program_verifiers import needs_sandbox
from whorl.evals.verify.read import read_tasks
from whorl.evals.verify.registry import (
    VERIFIERS,
    parse_verifiers,
    pass_criterion,
    verdict_metrics,
    verify_all,
)
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.evals.verify.text_verifiers import extract_answer, extract_choice

__all__ = [
    "VERIFIERS", "Verdict", "VerifiableTask", "extract_answer", "extract_choice", "needs_sandbox", "parse_verifiers",
    "pass_criterion", "read_tasks", "verdict_metrics", "verify_all",
]  # fmt: skip
