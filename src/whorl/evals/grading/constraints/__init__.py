"""The constraints of IFEval (arXiv:2311.07911): 25 kinds of instructions that a program can check."""

from whorl.evals.grading.constraints.checks import CHECKS
from whorl.evals.grading.constraints.metric import constraints, read_constraints, satisfies

__all__ = ["CHECKS", "constraints", "read_constraints", "satisfies"]
