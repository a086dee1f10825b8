"""The runs of a store: read from their folders, compared, removed (`whorl runs`, and a section of the report).

A run is read from `config.json` and `steps.json` alone, so a store with a thousand runs is listed at once.
"""

from __future__ import annotations

import difflib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from whorl.errors import StoreError, one_of, shorten
from whorl.recipes.step_records import FAILED, LEFT_OUT, LOCK_FILE, STEPS_FILE
from whorl.report.blocks import EMPTY, Column, StepReport, Table
from whorl.store import Store
from whorl.store.lock import is_locked
from whorl.tracking.progress import format_duration

SECTION = "Other runs of this recipe"
MAX_COMPARED = 8  # runs side by side that were not named one by one
MAX_CELL = 60  # characters


class _Config(BaseModel):
    """`config.json`. run: `--name`, else that of the recipe. seeds: of the steps that train. changed: by options."""

    name: str = ""
    run: str = ""
    seeds: list[int] = []
    changed: dict[str, Any] = {}
    steps: dict[str, dict[str, Any]] = {}


class _Step(BaseModel):
    state: str
    address: str = ""
    seconds: float = 0.0
    figures: dict[str, dict[str, Any]] = {}


_STEPS = TypeAdapter(dict[str, _Step])


@dataclass(frozen=True)
class RunRecord:
    """The record of a run. when: time of the last change, in seconds since 1970. problem: why it cannot be read."""

    folder: Path
    when: float = 0.0
    config: _Config = field(default_factory=_Config)
    steps: Mapping[str, _Step] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        return self.config.run or self.config.name or self.folder.name.rpartition("-")[0]

    @property
    def seconds(self) -> float:
        """Return the time in which its artifacts were made, also by earlier runs."""
        return sum(step.seconds for step in self.steps.values())

    @property
    def results(self) -> dict[str, str]:
        """Return label -> value of the results; of the youngest step with a label."""
        figures = (pair for step in self.steps.values() for pair in step.figures.items())
        return {label: figure["value"] for label, figure in figures if figure["number"] is not None}

    @property
    def state(self) -> str:
        """Return "done", "running", what failed, or how many steps are finished."""
        failed, left_out = (
            ", ".join(name for name, step in self.steps.items() if step.state == state)
            for state in (FAILED, LEFT_OUT)
        )
        if self.problem or is_locked(self.folder / LOCK_FILE):
            return f"damaged: {self.problem}" if self.problem else "running"
        if failed:
            return f"failed: {failed}"
        if self.config.steps.keys() - self.steps.keys():
            return f"{len(self.steps)} of {len(self.config.steps)} steps"
        return f"done, left out: {left_out}" if left_out else "done"


def read_run(folder: Path) -> RunRecord:
    """Return the run of a folder; one that cannot be read has a `problem`."""
    path, steps = folder / "config.json", folder / STEPS_FILE
    try:
        config = _Config.model_validate_json(path.read_bytes())
        path = steps if steps.exists() else path
        found = _STEPS.validate_json(path.read_bytes()) if path == steps else {}
        return RunRecord(folder, path.stat().st_mtime, config, found)
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        return RunRecord(folder, problem=f"{path.name}: {reason}")


def read_runs(store: Store) -> list[RunRecord]:
    """Return the runs of a store, the latest first."""
    found = [read_run(folder) for folder in (store.root / "runs").glob("*") if folder.is_dir()]
    return sorted((r for r in found if not r.problem or r.folder.exists()), key=lambda run: -run.when)


def matching_runs(store: Store, ref: str) -> list[RunRecord]:
    """Return the run of this folder, else the runs with this name and then those of this recipe, the latest first.

    Raises:
        StoreError: no run matches.
    """
    runs = read_runs(store)
    named = [run for run in runs if run.folder.name == ref] or [run for run in runs if run.name == ref]
    others = [run for run in runs if run.config.name == ref and run not in named]
    if named or others:
        return named if named and named[0].folder.name == ref else named + others
    names = [*dict.fromkeys(run.name for run in runs)]
    near = difflib.get_close_matches(ref, names, n=5, cutoff=0.4) or names[:5]
    raise StoreError(
        f"no run {ref!r} in {store.root / 'runs'}",
        expected=one_of(ref, near) if near else "a run; none exists yet",
        do="list them: whorl runs" if near else "start one: whorl run quickstart",
    )


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run, or its folder's name where several have one name."""
    times = Counter(run.name for run in runs)
    return [run.name if times[run.name] == 1 and not run.problem else run.folder.name for run in runs]


def compare_runs(runs: Sequence[RunRecord]) -> list[Table]:
    """Return tables with the settings that differ, and with the figures side by side."""
    settings = [dict(_flat(run.config.steps)) for run in runs]
    shared = set.intersection(*({*run.config.steps} for run in runs))
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
        Table(section=SECTION, title=title, at_end=True, columns=columns, rows=[[*row] for row in rows])
        for title, rows in (("Settings that differ", differ), ("Figures", figures)) if rows
    ]  # fmt: skip


def other_runs(store: Store, folder_name: str) -> StepReport:
    """Return the comparison of a run with the latest others of its recipe; empty without others."""
    runs = [run for run in read_runs(store) if not run.problem]
    own = [run for run in runs if run.folder.name == folder_name]
    others = [run for run in runs if own and run.config.name == own[0].config.name and run != own[0]]
    return StepReport(blocks=[*compare_runs([*own, *others][:MAX_COMPARED])] if others else [])


def remove_run(store: Store, run: RunRecord) -> None:
    """Remove the folder of a run, and the names that only it gave to its artifacts, which stay until `gc`.

    Raises:
        StoreError: the run is active.
    """
    if run.state == "running":
        raise StoreError(f"the run {run.folder.name} is active", do="stop it first, or wait for its end")
    others = [r for r in read_runs(store) if r.folder != run.folder and r.name == run.name]
    shared, names = {(n, s.address) for r in others for n, s in r.steps.items()}, store.names()
    try:
        for step, record in run.steps.items():
            is_own = names.get(name := f"{run.name}/{step}") == record.address
            if is_own and (step, record.address) not in shared:
                store.remove_name(name)
        shutil.rmtree(run.folder)
    except OSError as error:
        raise store.wrap_os_error(error) from error


def _flat(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _cell(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), MAX_CELL)
