"""Running a recipe: each step looked up or made, in order, and one line said about each.

The runner holds no state of its own. Which steps are done is what the store answers; a step that was
interrupted finds its scratch folder; so the same command continues after Ctrl-C or kill -9, and two runs at
once on one store share the work (the second waits for the first one's lock, then looks up).

`RUN/steps.json` records what each step of the run came to, for the report:
{step: {"address", "kind", "state": "made" | "looked up", "seconds"}}.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.errors import WhorlError
from whorl.recipes.recipe import Recipe, RecipeStep
from whorl.recipes.registry import StepContext
from whorl.store import Artifact, Store
from whorl.store.address import canonical_json
from whorl.tracking.progress import Progress, format_duration
from whorl.tracking.run import Run, write_json
from whorl.tracking.sinks import SafeSinks, Sink


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, and the artifact of each step."""

    run: Run
    artifacts: Mapping[str, Artifact]
    seconds: float


def run_folder(recipe: Recipe, store: Store) -> Path:
    """Where a recipe's run is recorded: the same settings, the same folder."""
    mark = hashlib.sha256(canonical_json(recipe.to_json())).hexdigest()[:8]
    return store.root / "runs" / f"{recipe.name}-{mark}"


def run_recipe(
    recipe: Recipe,
    store: Store,
    progress: Progress,
    *,
    until: str | None = None,
    sinks: Iterable[Sink] = (),
    existing: Mapping[str, Artifact] | None = None,
) -> RunResult:
    """Make (or look up) every step of a recipe, or only those that `until` needs.

    sinks: who else hears the metrics; no failure of theirs stops the run. given: artifacts that are there already, by the
    name under which steps have them as parents.

    Raises:
        WhorlError: what a step or the store raised; everything finished before it is kept.
    """
    began = time.monotonic()
    wanted = recipe.with_ancestors(until) if until is not None else recipe
    heard = SafeSinks(sinks, progress.log)
    try:
        store.make_folders()
        run = Run(run_folder(recipe, store), config=recipe.to_json(), sinks=heard)
        progress.sinks.append(run.log)
    except OSError as error:
        raise store.wrap_os_error(error) from error
    try:
        steps = "1 step" if len(wanted.steps) == 1 else f"{len(wanted.steps)} steps"
        progress.log(f"{recipe.name}: {steps}; store {store.location}; run {run.dir}")
        artifacts: dict[str, Artifact] = dict(existing or {})
        records: dict[str, Any] = {}
        for number, step in enumerate(wanted.steps.values(), start=1):
            mark = f"[{number}/{len(wanted.steps)}] {step.name}"
            started = time.monotonic()
            artifact, state = _run_step(recipe, step, artifacts, store, run, progress, mark)
            artifacts[step.name] = artifact
            took = f"made in {format_duration(time.monotonic() - started)}" if state == "made" else state
            progress.log(f"{mark}: {took}. {artifact.summary.get('headline', '')}".rstrip())
            records[step.name] = {
                "address": artifact.address,
                "kind": artifact.kind,
                "state": state,
                "seconds": artifact.seconds,
            }
            write_json(run.dir / "steps.json", records)
    finally:
        heard.close()
        progress.sinks.remove(run.log)
    return RunResult(run, artifacts, time.monotonic() - began)


def _run_step(
    recipe: Recipe,
    step: RecipeStep,
    artifacts: Mapping[str, Artifact],
    store: Store,
    run: Run,
    progress: Progress,
    mark: str,
) -> tuple[Artifact, str]:
    kind = step.kind
    config = kind.complete_config(step.config) if kind.complete_config is not None else step.config
    parents = {role: artifacts[parent] for role, parent in step.parents.items()}
    try:
        with store.build(
            kind=kind.output_kind,
            name=f"{recipe.name}/{step.name}",
            parents=parents,
            config=config.model_dump(mode="json", exclude=set(kind.not_hashed)),
            version=kind.version,
            step=kind.name,
            on_message=progress.log,
        ) as build:
            if build.existing is None:
                progress.log(
                    f"{mark}: {'continues where it was interrupted' if build.resumed else kind.about}"
                )
                run.record_environment()
                kind.function(
                    StepContext(
                        step.name, build.path, build.scratch, parents, run, progress, store, build.summary
                    ),
                    config,
                )
    except WhorlError as error:
        how = "stopped" if error.exit_code > 128 else "failed"  # by a signal
        progress.log(f"{mark}: {how}; the steps before it are kept")
        raise
    assert build.artifact is not None
    return build.artifact, "looked up" if build.existing is not None else "made"
