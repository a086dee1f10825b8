"""Tasks of an evaluation: configuration, templates, records and items."""

from whorl.evals.tasks.config import TaskConfig, read_task_file
from whorl.evals.tasks.task import EvalTask, Item, load_task, make_task

__all__ = ["EvalTask", "Item", "TaskConfig", "load_task", "make_task", "read_task_file"]
