"""Tasks of the trainer on the ranks of a world, for `run_ranks`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.train.spike_guards import poisoned
from tests.support.train.task_runs import TASKS, Run
from tests.support.train.tiny import Notes, job
from whorl.parallel.distributed import drive
from whorl.parallel.process_group import world_size
from whorl.train.job import Job
from whorl.train.learner.loop import StopTraining
from whorl.train.lm.pretrain import pretrain
from whorl.train.resilience.preemption import PreemptedError

Weights = dict[str, np.ndarray]


def on_world(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on the driver; the other ranks return None."""
    return drive(function, *args)


def arrays(network: torch.nn.Module) -> Weights:
    return {name: t.numpy() for name, t in network.state_dict().items()}


def stop(step: int) -> None:
    if step == 5:
        raise StopTraining


def train_tasks(names: Sequence[str], folder: Path, replicas: int) -> dict[str, Weights]:
    """Return the weights of some tasks by name, after five steps; the other ranks learn of the end in the sixth."""
    return {name: arrays(TASKS[name](Run(folder, at=stop, replicas=replicas))) for name in names}


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
    stops = {
        "error": (ValueError, fail),
        "signal": (PreemptedError, partial(signal.raise_signal, signal.SIGTERM)),
    }
    for name, (error, happens) in stops.items() if world_size() > 1 else ():
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
