"""Running programs that nobody trusts, for rewards and evaluations (`sandbox.py` tells what stands between them and you)."""

from whorl.sandbox.limits import Limits, Outcome, Printed, Program
from whorl.sandbox.sandbox import ESSENTIAL, Sandbox

__all__ = ["ESSENTIAL", "Limits", "Outcome", "Printed", "Program", "Sandbox"]
