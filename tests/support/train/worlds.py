"""Tasks of the trainer on the ranks of a world, for `run_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.train.task_runs import TASKS, Run
from whorl.parallel.distributed import drive


def on_world(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on the driver; the other ranks return None."""
    return drive(function, *args)


def train_tasks(names: Sequence[str], folder: Path, replicas: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the trained weights of some tasks by name."""
    trained = {name: TASKS[name](Run(folder, replicas=replicas)).state_dict() for name in names}
    return {name: {n: t.numpy() for n, t in weights.items()} for name, weights in trained.items()}
