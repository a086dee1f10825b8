"""Verifiable tasks and their verifiers, used by rewards and by evaluations."""

from whorl.evals.verify.program_verifiers import needs_sandbox
from whorl.evals.verify.registry import VERIFIERS, parse_verifiers, verdict_metrics, verify_all
from whorl.evals.verify.task import Verdict, VerifiableTask

__all__ = [
    "VERIFIERS", "Verdict", "VerifiableTask", "needs_sandbox", "parse_verifiers", "verdict_metrics", "verify_all"
]  # fmt: skip
