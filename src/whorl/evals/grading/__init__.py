"""One grader of answers: rewards of training and metrics of evaluations."""

from whorl.evals.grading.final_answer import find_final_answer
from whorl.evals.grading.grade import UNANSWERED, Grade
from whorl.evals.grading.read import read_tasks
from whorl.evals.grading.registry import (
    CUSTOM,
    GRADERS,
    get_grader,
    grade_all,
    grade_tasks,
    needs_sandbox,
    parse_graders,
    pass_criterion,
    takes,
)
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.grading.values import find_choice, find_number
from whorl.evals.model.requests import Completion

__all__ = [
    "CUSTOM", "GRADERS", "UNANSWERED", "Completion", "Grade", "VerifiableTask", "find_choice", "find_final_answer",
    "find_number", "get_grader", "grade_all", "grade_tasks", "needs_sandbox", "parse_graders", "pass_criterion",
    "read_tasks", "takes",
]  # fmt: skip
