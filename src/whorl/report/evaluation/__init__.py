"""The page of an evaluation: summary, figures, and every item of one or several models."""

from whorl.report.evaluation.page import write_page

__all__ = ["write_page"]
