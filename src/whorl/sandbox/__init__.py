"""Running programs that nobody trusts, for rewards and evaluations (`sandbox.py` tells what stands between them and you)."""

from whorl.sandbox.limits import ExampleOutput, Program, ProgramResult, ResourceLimits
from whorl.sandbox.sandbox import REQUIRED_PROTECTIONS, Sandbox

__all__ = ["REQUIRED_PROTECTIONS", "ExampleOutput", "Program", "ProgramResult", "ResourceLimits", "Sandbox"]
