"""The runs of a store: read from their folders, compared, removed (`whorl runs`, and a section of the report).

A run is read from `config.json` and `steps.json` alone, so a store with a thousand runs is listed at once.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from whorl.errors import StoreError, one_of, shorten
from whorl.recipes.step_records import FAILED, LEFT_OUT, LOCK_FILE, STEPS_FILE
from whorl.report.blocks import EMPTY, Column, Table
from whorl.store import Store
from whorl.store.lock import is_locked
from whorl.tracking.progress import format_duration

MAX_COMPARED = 8  # runs side by side that were not named one by one
MAX_CELL = 60  # characters


class _Step(BaseModel):
    state: str
    address: str = ""
    seconds: float = 0.0
    figures: dict[str, dict[str, Any]] = {}


class RunRecord(BaseModel):
    """The record of a run.

    when: time of the last change, in seconds since 1970. problem: why it cannot be read. seeds: of the steps that train.
    changed: options that changed a setting. settings, steps: by step.
    """

    folder: Path
    when: float = 0.0
    problem: str = ""
    name: str = Field(alias="run")
    recipe: str = Field(default="", alias="name")
    seeds: list[int] = []
    changed: list[str] = []
    settings: dict[str, dict[str, Any]] = Field(default={}, alias="steps")
    steps: dict[str, _Step] = Field(default={}, alias="records")

    @property
    def seconds(self) -> float:
        """Return the time in which its artifacts were made, also by earlier runs."""
        return sum(step.seconds for step in self.steps.values())

    @property
    def results(self) -> dict[str, str]:
        """Return label -> value of the results; of the youngest step with a label."""
        figures = (pair for step in self.steps.values() for pair in step.figures.items())
        return {label: figure["value"] for label, figure in figures if figure.get("number") is not None}

    @property
    def state(self) -> str:
        """Return "done", "running", what failed, or how many steps are finished."""
        if self.problem or is_locked(self.folder / LOCK_FILE):
            return f"damaged: {self.problem}" if self.problem else "running"
        by_state: dict[str, list[str]] = {}
        for name, step in self.steps.items():
            by_state.setdefault(step.state, []).append(name)
        if FAILED in by_state:
            return f"failed: {', '.join(by_state[FAILED])}"
        if self.settings.keys() - self.steps.keys():
            return f"{len(self.steps)} of {len(self.settings)} steps"
        return f"done, left out: {', '.join(by_state[LEFT_OUT])}" if LEFT_OUT in by_state else "done"


def read_run(folder: Path) -> RunRecord:
    """Return the run of a folder; one that cannot be read has a `problem`."""
    path, steps = folder / "config.json", folder / STEPS_FILE
    try:
        found = json.loads(path.read_bytes())
        found.setdefault("run", found["name"])
        if steps.exists():
            path = steps
            found["records"] = json.loads(path.read_bytes())
        return RunRecord(folder=folder, when=path.stat().st_mtime, **found)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        return RunRecord(folder=folder, run=folder.name.rpartition("-")[0], problem=f"{path.name}: {reason}")


def read_runs(store: Store) -> list[RunRecord]:
    """Return the runs of a store, the latest first."""
    found = [read_run(folder) for folder in (store.root / "runs").glob("*") if folder.is_dir()]
    return sorted((r for r in found if not r.problem or r.folder.exists()), key=lambda run: -run.when)


def matching_runs(store: Store, ref: str) -> list[RunRecord]:
    """Return the run of this folder, else the runs with this name, else those of this recipe; the latest first.

    Raises:
        StoreError: no run matches.
    """
    runs = read_runs(store)
    for labels in ([r.folder.name for r in runs], [r.name for r in runs], [r.recipe for r in runs]):
        if ref in labels:
            return [run for run, label in zip(runs, labels, strict=True) if label == ref]
    names = [*dict.fromkeys(run.name for run in runs)]
    near = difflib.get_close_matches(ref, names, n=5, cutoff=0.4) or names[:5]
    raise StoreError(
        f"no run {ref!r} in {store.root / 'runs'}", expected=one_of(ref, near),
        do="`whorl runs` lists all; `whorl run quickstart` starts one",
    )  # fmt: skip


def with_others(store: Store, folder_name: str) -> list[RunRecord]:
    """Return a run and the latest others of its recipe; none without others."""
    runs = [run for run in read_runs(store) if not run.problem]
    own = [run for run in runs if run.folder.name == folder_name]
    others = [run for run in runs if own and run.recipe == own[0].recipe and run not in own]
    return [*own, *others][:MAX_COMPARED] if others else []


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run, or its folder's name where several have one name."""
    times = Counter(run.name for run in runs)
    return [run.name if times[run.name] == 1 and not run.problem else run.folder.name for run in runs]


def compare_runs(runs: Sequence[RunRecord]) -> list[Table]:
    """Return tables with the settings that differ, and with the figures side by side; none without runs."""
    settings = [dict(_flat(run.settings)) for run in runs]
    shared = [step for step in (runs[0].settings if runs else ()) if all(step in r.settings for r in runs)]
    differ = [
        [key, *cells]
        for key in dict.fromkeys(key for each in settings for key in each)
        if len({*(cells := [_cell(each[key]) if key in each else EMPTY for each in settings])}) > 1
        and (key.partition(".")[0] in shared or key.endswith(".uses"))
    ]
    figures = [["state", *(r.state for r in runs)], ["time", *(format_duration(r.seconds) for r in runs)]]
    for step, label in dict.fromkeys(
        (n, label) for r in runs for n, s in r.steps.items() for label in s.figures
    ):
        found = [r.steps[step].figures.get(label, {}) if step in r.steps else {} for r in runs]
        figures.append([f"{step}: {label}", *(figure.get("value", EMPTY) for figure in found)])
    columns = [Column(name=""), *(Column(name=name, number=True) for name in run_labels(runs))]
    return [
        Table(section="Other runs of this recipe", title=title, at_end=True, columns=columns, rows=[[*r] for r in rows])
        for title, rows in (("Settings that differ", differ), ("Figures", figures)) if rows and runs
    ]  # fmt: skip


def remove_run(store: Store, run: RunRecord) -> None:
    """Remove the folder of a run, and the names that only it gave to its artifacts, which stay until `gc`.

    Raises:
        StoreError: the run is active.
    """
    if run.state == "running":
        raise StoreError(f"the run {run.folder.name} is active", do="stop it first, or wait for its end")
    others = [r for r in read_runs(store) if r.folder != run.folder and r.name == run.name]
    shared, names = {(n, s.address) for r in others for n, s in r.steps.items()}, store.names()
    for step, record in run.steps.items():
        is_own = names.get(name := f"{run.name}/{step}") == record.address
        if is_own and (step, record.address) not in shared:
            store.remove_name(name)
    store.delete(run.folder)


def _flat(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _cell(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), MAX_CELL)
