"""The budget dial: how big, how long and on what, for the time or arithmetic that one is willing to spend."""

from whorl.plan.cost import memory_bytes, shape
from whorl.plan.law import expected_bits_per_byte
from whorl.plan.planner import Plan, PlanConfig, make_plan

__all__ = ["Plan", "PlanConfig", "expected_bits_per_byte", "make_plan", "memory_bytes", "shape"]
