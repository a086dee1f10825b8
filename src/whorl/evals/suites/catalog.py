"""The ready task files of the package: formats of published sets, whose data the user supplies."""

from __future__ import annotations

from pathlib import Path

import whorl.evals
from whorl.errors import ConfigError, one_of
from whorl.evals.tasks.config import TaskConfig, read_task_file

FOLDER = Path(whorl.evals.__file__).parent / "catalog"


def catalog() -> dict[str, TaskConfig]:
    """Return name -> configuration of every ready task."""
    return {path.stem: read_task_file(path) for path in sorted(FOLDER.glob("*.toml"))}


def catalog_file(name: str) -> Path:
    """Return the file of a ready task. Raises ConfigError: no such task."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file() or path.parent != FOLDER:
        names = sorted(each.stem for each in FOLDER.glob("*.toml"))
        raise ConfigError(
            f"no task {name!r}", expected=f"{one_of(name, names)}; or the path of a task file",
            do="list the tasks with `whorl eval --list`",
        )  # fmt: skip
    return path
