"""`RUN/steps.json`: what a run did with each step of its recipe, for the report.

    {step: {"address", "kind", "state": "made" | "looked up", "seconds"}}
    {step: {"state": "left out" | "failed", "reason"}}

Records of earlier calls with the same settings are kept, so a run of some steps does not hide the others. A step that is
made at another address drops the artifacts of the steps that depend on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import WhorlError, without_credentials
from whorl.tracking.run import write_json

if TYPE_CHECKING:
    from whorl.recipes.recipe import Recipe
    from whorl.store import Artifact

STEPS_FILE = "steps.json"
MADE, LEFT_OUT, FAILED = "made", "left out", "failed"


class StepRecords:
    """The records of a run folder; every change is written at once."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.path, self.recipe = folder / STEPS_FILE, recipe
        self.records: dict[str, dict[str, Any]] = read_step_records(folder)

    def set_artifact(self, step: str, artifact: Artifact, state: str) -> None:
        if self.records.get(step, {}).get("address") != artifact.address:
            for name in self.recipe.dependants(step):
                if "address" in self.records.get(name, {}):
                    del self.records[name]
        self._set(step, {
            "address": artifact.address, "kind": artifact.kind, "state": state, "seconds": artifact.seconds,
        })  # fmt: skip

    def set_reason(self, step: str, state: str, error: BaseException) -> None:
        """Record that a step was left out or failed."""
        what = (
            error.what
            if isinstance(error, WhorlError)
            else without_credentials(f"{type(error).__name__}: {error}")
        )
        record = {"state": state, "reason": what}
        if self.records.get(step) != record:  # the same failure again does not make this the latest run
            self._set(step, record)

    def _set(self, step: str, record: dict[str, Any]) -> None:
        self.records[step] = record
        write_json(self.path, self.records)


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
