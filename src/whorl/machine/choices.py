"""Choices made by timing, recorded so that an interrupted step continues with them.

A step takes its dtype, its number of threads, and its native or torch path from measurements, which differ when other
processes run. All of them decide bits. Within `recorded_choices` each choice is made once and kept as a file in the step's
scratch folder. A continued step and all of its child processes, which inherit the environment, read it there. Training
without a step (`pretrain`, `whorl.train`) keeps them with its checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VARIABLE = "WHORL_CHOICES"  # the folder, in the environment of this process and its children


@contextmanager
def recorded_choices(folder: Path) -> Iterator[None]:
    """Within the context, `choose_once` keeps its values in `folder`, or in that of an outer context."""
    if os.environ.get(VARIABLE):
        yield
        return
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def choose_once(name: str, choose: Callable[[], Any]) -> Any:
    """Return the recorded value of a choice, or make it and record it. Values are JSON.

    If several processes choose at the same time, all return the value of the first. Outside of `recorded_choices`, or with
    an unreadable record, each call makes the choice.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return choose()
    path = Path(folder) / f"{name}.json"
    if (found := _read(path)) is not None:
        return found
    value = choose()
    _write_temporary(path, value, os.link)  # fails if another process was first
    found = _read(path)
    return value if found is None else found


def record_choice(name: str, value: Any) -> None:
    """Record a choice that was forced, in place of an earlier one; does nothing outside of `recorded_choices`."""
    folder = os.environ.get(VARIABLE)
    if folder and _read(Path(folder) / f"{name}.json") != value:
        _write_temporary(Path(folder) / f"{name}.json", value, Path.replace)


def _write_temporary(path: Path, value: Any, publish: Callable[[Path, Path], object]) -> None:
    """Write a value to a temporary file and publish it at `path`; best effort."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value))
        publish(temporary, path)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            temporary.unlink()


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None
