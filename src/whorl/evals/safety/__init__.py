"""Safety sets: harmful requests with harmless twins, and transformations of prompts that try to break a refusal."""

from whorl.evals.safety.table import SafetyRow, safety_table
from whorl.evals.safety.transformations import TRANSFORMATIONS, transform, transform_items
from whorl.evals.safety.twins import SafetyItem, built_in

__all__ = [
    "TRANSFORMATIONS", "SafetyItem", "SafetyRow", "built_in", "safety_table", "transform", "transform_items",
]  # fmt: skip
