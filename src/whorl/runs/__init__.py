"""What every long job needs around it: run folder, metrics, random streams, progress, the machine."""

from whorl.runs import machine, seeds
from whorl.runs.budget import Budget, BudgetText
from whorl.runs.machine import Machine, probe
from whorl.runs.progress import Progress, Task, duration
from whorl.runs.run import MetricsLog, Run, environment, read_metrics, write_json

__all__ = [
    "Budget",
    "BudgetText",
    "Machine",
    "MetricsLog",
    "Progress",
    "Run",
    "Task",
    "duration",
    "environment",
    "machine",
    "probe",
    "read_metrics",
    "seeds",
    "write_json",
]
