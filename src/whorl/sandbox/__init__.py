"""Execution of untrusted programs, for rewards and evaluations (see `sandbox.py` and `docs/sandbox.md`)."""

from whorl.sandbox.limits import ExampleOutput, Program, ProgramResult, ResourceLimits
from whorl.sandbox.sandbox import REQUIRED_PROTECTIONS, Sandbox

__all__ = ["REQUIRED_PROTECTIONS", "ExampleOutput", "Program", "ProgramResult", "ResourceLimits", "Sandbox"]
