"""Safety sets: harmful requests with harmless twins, and transformations of prompts that try to break a refusal."""

from whorl.evals.safety.items import SafetyItem, built_in, read_xstest, write_items
from whorl.evals.safety.table import SafetyRow, safety_table
from whorl.evals.safety.transformations import TRANSFORMATIONS, transform, transform_items

__all__ = [
    "TRANSFORMATIONS", "SafetyItem", "SafetyRow", "built_in", "read_xstest", "safety_table", "transform", "transform_items",
    "write_items",
]  # fmt: skip
