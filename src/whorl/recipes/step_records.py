"""`RUN/steps.json`: what a run did with each step of its recipe, for the report and `whorl runs`.

    {step: {"address", "kind", "state": "made" | "looked up", "seconds", "figures": {label: {"value", "number"}}}}
    {step: {"state": "left out" | "failed", "reason"}}

Records of earlier calls with the same settings are kept, so a run of some steps does not hide the others. A step that is
made at another address drops the artifacts of the steps that depend on it. `RUN/lock` is held while the run is active.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import WhorlError, without_credentials
from whorl.recipes.sweep import training_seeds
from whorl.store.lock import FileLock
from whorl.tracking.run import write_json

if TYPE_CHECKING:
    from whorl.recipes.recipe import Recipe
    from whorl.store import Artifact

STEPS_FILE, LOCK_FILE = "steps.json", "lock"
MADE, LEFT_OUT, FAILED = "made", "left out", "failed"


class StepRecords:
    """The records of a run folder; every change is written at once, also by several processes with one folder."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.path, self.recipe, self._lock = folder / STEPS_FILE, recipe, FileLock(folder / LOCK_FILE)
        self._lock.acquire()

    def set_artifact(self, step: str, artifact: Artifact, state: str) -> None:
        self._set(step, {
            "address": artifact.address, "kind": artifact.kind, "state": state, "seconds": artifact.seconds,
            "figures": artifact.summary.get("figures", {}),
        })  # fmt: skip

    def set_reason(self, step: str, state: str, error: BaseException) -> None:
        """Record that a step was left out or failed."""
        what = (
            error.what
            if isinstance(error, WhorlError)
            else without_credentials(f"{type(error).__name__}: {error}")
        )
        record = {"state": state, "reason": what}
        if read_step_records(self.path.parent).get(step) != record:  # else this would become the latest run
            self._set(step, record)

    def close(self) -> None:
        self._lock.release()

    def _set(self, step: str, record: dict[str, Any]) -> None:
        writing = FileLock(self.path.with_suffix(".lock"))
        writing.wait()
        try:
            records = read_step_records(self.path.parent)
            if records.get(step, {}).get("address") != (address := record.get("address")) and address:
                for name in self.recipe.dependants(step):
                    if "address" in records.get(name, {}):
                        del records[name]
            write_json(self.path, {**records, step: record})
        finally:
            writing.release()
        self._lock.acquire()  # if another process had it, which has ended


def run_config(recipe: Recipe) -> dict[str, Any]:
    """Return the contents of `config.json`: name and seeds of the run, what options changed, and the resolved recipe."""
    seeds = sorted({*training_seeds(recipe).values()})
    return {"run": recipe.run_name, "seeds": seeds, "changed": recipe.changed, **recipe.to_json()}


def read_step_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return step -> record; empty without a readable file."""
    try:
        found = json.loads((folder / STEPS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def steps_in_state(records: dict[str, dict[str, Any]], state: str) -> dict[str, str]:
    """Return step -> reason of the steps that were left out, or failed."""
    return {name: record["reason"] for name, record in records.items() if record["state"] == state}
