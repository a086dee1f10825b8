"""What every long job needs around it: run folder, metrics, random streams, progress, the machine."""

from whorl.runs import machine, seeds
from whorl.runs.budget import Budget, BudgetText
from whorl.runs.dashboard import Dashboard
from whorl.runs.machine import Machine, probe
from whorl.runs.memory import Memory, MemoryText
from whorl.runs.progress import Progress, Task, duration
from whorl.runs.run import MetricsLog, Run, environment, read_metrics, write_json
from whorl.runs.sinks import Guarded, Sink, parse_log

__all__ = [
    "Budget",
    "BudgetText",
    "Dashboard",
    "Guarded",
    "Machine",
    "Memory",
    "MemoryText",
    "MetricsLog",
    "Progress",
    "Run",
    "Sink",
    "Task",
    "duration",
    "environment",
    "machine",
    "parse_log",
    "probe",
    "read_metrics",
    "seeds",
    "write_json",
]
