"""Tasks of the trainer on the ranks of a world, for `run_ranks`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.train.spike_guards import poisoned
from tests.support.train.task_runs import TASKS, Run
from tests.support.train.tiny import Notes, job
from whorl.parallel.distributed import drive
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain
from whorl.train.resilience.preemption import PreemptedError

Weights = dict[str, np.ndarray]


def on_world(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on the driver; the other ranks return None."""
    return drive(function, *args)


def arrays(network: torch.nn.Module) -> Weights:
    return {name: t.numpy() for name, t in network.state_dict().items()}


def train_tasks(names: Sequence[str], folder: Path, replicas: int) -> dict[str, Weights]:
    """Return the trained weights of some tasks by name."""
    return {name: arrays(TASKS[name](Run(folder, replicas=replicas))) for name in names}


def train(wanted: Job, scratch: Path, notes: Notes | None = None, **options: Any) -> Weights:
    return arrays(pretrain(wanted, scratch, notes or Notes(), **{"checkpoint_seconds": 0.0, **options}))


class At(Notes):
    """Calls a function after one step."""

    def __init__(self, step: int, function: Callable[[], object]) -> None:
        super().__init__()
        self.step, self.function = step, function

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        super().on_step(step, metrics)
        if step == self.step:
            self.function()


def fail() -> None:
    raise ValueError("planted")


def restored_runs(tokens: Path, few: Path, scratch: Path, replicas: int) -> dict[str, Any]:
    """Runs that go back: to a checkpoint after an error and a SIGTERM, to a snapshot, to the best weights."""
    wanted = job(tokens, steps=10, replicas=replicas, ema=0.9)
    found: dict[str, Any] = {"whole": train(wanted, scratch / "a")}
    for name, error, happens in (
        ("error", ValueError, fail),
        ("signal", PreemptedError, lambda: signal.raise_signal(signal.SIGTERM)),
    ):
        with suppress(error):
            train(wanted, scratch / name, At(4, happens), checkpoint_seconds=1e9)
        found[f"{name} saved"] = sorted(p.name for p in (scratch / name).glob("step-*"))
        found[name] = train(wanted, scratch / name)
    watch = {"max_skipped": 1.0, "patience": 1, "max_rollbacks": 1000, "snapshot_every": 4}
    bad, notes = poisoned(tokens, scratch / "back", spike_guard=watch, steps=16), Notes()
    found["rollback"] = train(bad.model_copy(update={"replicas": replicas}), scratch / "back", notes)
    found["rollback events"] = [event["kind"] for event in notes.events]
    notes = Notes()
    found["best"] = train(job(few, steps=60, evaluations=12, replicas=replicas), scratch / "best", notes)
    found["kept"] = notes.evaluations[-1].get("kept_step")
    return found
