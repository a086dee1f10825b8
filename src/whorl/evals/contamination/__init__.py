"""Items of a task in the training text of the model, and the score without them. See `docs/evals/suites.md`."""

from whorl.evals.contamination.figures import with_contamination
from whorl.evals.contamination.search import ContaminatedItems, find_contaminated, item_text
from whorl.evals.contamination.training_text import TrainingText, training_text

__all__ = [
    "ContaminatedItems",
    "TrainingText",
    "find_contaminated",
    "item_text",
    "training_text",
    "with_contamination",
]
