"""Input files and runs of small recipes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whorl.machine.process import Channel, Child
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress
from whorl.train import resume
from whorl.train.checkpoint.manager import CheckpointManager


def write_code(folder: Path, n: int = 60) -> None:
    """Write Python files with one documented function each."""
    folder.mkdir(exist_ok=True)
    for i in range(n):
        body = f"    total = value + {i}\n    if total > {i * 7}:\n        return total - {i}\n"
        doc = f'    """Work out the number that belongs to {i}, for the value."""\n'
        text = f"def work_{i}(value):\n{doc}{body}    return total * {i + 2}\n"
        (folder / f"m{i}.py").write_text(text + f"\n\nX{i} = {i}\n" * 3)


def write_jsonl(path: str | Path, records: Iterable[Any]) -> None:
    """Write JSON lines; a string among the records is written unchanged."""
    Path(path).write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def run_text(text: str, *sets: str, store: Path | None = None) -> dict[str, Artifact]:
    """Run a recipe text and return its artifacts; by default in the folder `store` of the working directory."""
    recipe = parse_recipe(text, "stages.toml", sets=sets)
    return dict(run_recipe(recipe, Store(store or Path.cwd() / "store"), Progress.silent()).artifacts)


def _run_and_die(channel: Channel, text: str, store: Path, pattern: str) -> None:
    class Dying(CheckpointManager):
        def save(self, *given: Any, **options: Any) -> float:
            stall = super().save(*given, **options)
            self.finish()
            if any((store / "scratch").glob(pattern)):
                os.kill(os.getpid(), signal.SIGKILL)
            return stall

    resume.CheckpointManager = Dying
    run_text(text, store=store)


def kill_run(text: str, store: Path, pattern: str) -> None:
    """Run a recipe text in a child process, which gets SIGKILL after a checkpoint that matches `pattern` in scratch/."""
    child = Child(f"{__name__}:_run_and_die", text, store, pattern, preload=("whorl.train.trainer",))
    assert child.wait(120) == -signal.SIGKILL, child.exit_description()


def logs_of(store: Path) -> str:
    """The logs of all runs in a store."""
    return "".join(path.read_text() for path in sorted(store.glob("runs/*/log.txt")))
