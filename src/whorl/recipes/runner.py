"""Run a recipe: look up or make every step in order, and log one line per step.

The runner has no state. The store decides which steps are done, and an interrupted step finds its scratch
folder. So the same command continues after Ctrl-C or kill -9. Two concurrent runs on one store share the work: the second
waits for the lock of the first and then looks up the artifact.

A step that has nothing to work on in the data (`NotApplicableError`) is left out, with the steps that need its result.
`RUN/steps.json` records what became of each step (`step_records.py`).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from whorl.errors import ConfigError, NotApplicableError, StoreError, WhorlError
from whorl.machine.device_probe import restore_threads, usable_cores
from whorl.machine.kernel_choice import force_choices, recorded_choices
from whorl.plan.forecast import RunInputs, forecast
from whorl.recipes.given_models import A_MODEL, LOGGED, given_artifacts, logged_model
from whorl.recipes.recipe import Recipe, RecipeStep
from whorl.recipes.registry import (
    StepContext,
    StepKind,
    deterministic_replicas,
    is_deterministic,
    start_native_builds,
)
from whorl.recipes.step_records import FAILED, LEFT_OUT, MADE, StepRecords, run_config
from whorl.store import Artifact, Build, Store
from whorl.store.address import canonical_json
from whorl.tracking.progress import Progress, format_duration
from whorl.tracking.run import Run
from whorl.tracking.sinks import SafeSinks, Sink


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, and step name -> artifact."""

    run: Run
    artifacts: Mapping[str, Artifact]
    seconds: float


def run_folder(recipe: Recipe, store: Store) -> Path:
    """Return the folder of a recipe's run; equal settings and names give the same folder."""
    digest = hashlib.sha256(canonical_json(recipe.to_json())).hexdigest()[:8]
    return store.root / "runs" / f"{recipe.run_name}-{digest}"


def run_recipe(
    recipe: Recipe,
    store: Store,
    progress: Progress,
    *,
    until: str | Collection[str] | None = None,
    sinks: Iterable[Sink] = (),
    existing: Mapping[str, Artifact] | None = None,
) -> RunResult:
    """Make or look up every step of a recipe, or only the steps that `until` needs.

    Args:
        until: one step, or several.
        sinks: further receivers of the metrics; their failures do not stop the run.
        existing: name -> artifact of parents that no step of the recipe makes.

    Raises:
        WhorlError: from a step or the store; finished steps are kept.
    """
    start = time.monotonic()
    recipe.permit_code()
    wanted = [until] if isinstance(until, str) else [*(until or ())]
    selected = recipe.with_ancestors(*wanted) if until is not None else recipe
    safe_sinks = SafeSinks(sinks, progress.log)
    try:
        store.make_folders()
        is_new = not run_folder(recipe, store).exists()
        run = _open_run(recipe, store, safe_sinks, progress)
        records = StepRecords(run.dir, recipe)
        progress.sinks.append(run.log)
    except OSError as error:
        raise store.wrap_os_error(error) from error
    is_refused = False
    try:
        steps = "1 step" if len(selected.steps) == 1 else f"{len(selected.steps)} steps"
        progress.log(f"{recipe.run_name}: {steps}; store {store.location}; run {run.dir}")
        artifacts, states = dict(existing or {}), set[str]()
        given = {**artifacts, **open_given(selected, store, artifacts)}
        if selected.shrunk:
            sizes = ", ".join(f"{name} = {value:g}" for name, value in selected.shrunk.items())
            progress.log(f"    smaller, as the budget: {sizes}")
        left_out = set[str]()
        for number, step in enumerate(selected.steps.values(), start=1):
            if step.name in left_out:
                continue
            label = f"[{number}/{len(selected.steps)}] {step.name}"
            started = time.monotonic()
            try:
                artifact, state = _run_step(
                    selected, step, {**given, **artifacts}, store, run, progress, label
                )
            except NotApplicableError as error:
                without = [step.name, *selected.dependants(step.name)]
                left_out.update(without)
                if left_out & {*wanted} or not selected.steps.keys() - artifacts.keys() - left_out:
                    records.set_reason(step.name, FAILED, error)
                    raise
                for name in without:
                    records.set_reason(name, LEFT_OUT, error)
                also = f", and with it {', '.join(without[1:])}" if without[1:] else ""
                progress.log(f"{label}: left out{also}: {error.what}")
                continue
            except Exception as error:
                if getattr(error, "exit_code", 1) <= 128:  # else stopped by a signal
                    records.set_reason(step.name, FAILED, error)
                raise
            artifacts[step.name] = artifact
            states.add(state)
            outcome = f"made in {format_duration(time.monotonic() - started)}" if state == MADE else state
            progress.log(f"{label}: {outcome}. {artifact.summary.get('headline', '')}".rstrip())
            records.set_artifact(step.name, artifact, state)
            if artifact.kind == "plan" and state == MADE:
                later = {n: s for n, s in selected.steps.items() if n not in {*artifacts, *left_out}}
                if text := _forecast(later, artifacts.values(), artifact, store):
                    progress.log(text)
    except WhorlError as error:
        is_refused = is_new and error.exit_code <= 128 and MADE not in states and not run.has_metrics
        raise
    finally:
        safe_sinks.close()
        records.close()
        progress.sinks.remove(run.log)
        if is_refused:  # a refused setting is no run
            shutil.rmtree(run.dir, ignore_errors=True)
    return RunResult(run, artifacts, time.monotonic() - start)


def open_given(recipe: Recipe, store: Store, existing: Collection[str] = ()) -> dict[str, Artifact]:
    """Return the artifacts that a recipe is given (`given_models.py`), by reference.

    Raises:
        StoreError: one does not exist. ConfigError: it is of another kind, or not given.
    """
    found = {}
    for ref, kind in given_artifacts(recipe.steps).items():
        if not ref:
            raise ConfigError(
                f"{recipe.name} needs a model to start from", expected=A_MODEL,
                do=f"`whorl run {recipe.name} --from MODEL`; `whorl ls` lists the artifacts",
            )  # fmt: skip
        if ref in existing:
            continue
        found[ref] = artifact = logged_model(recipe.steps, store) if ref == LOGGED else store.open(ref)
        if artifact.kind != kind:
            raise ConfigError(
                f"{ref} is an artifact of the kind {artifact.kind}", expected=f"one of the kind {kind}"
            )
    return found


def _forecast(
    later: Mapping[str, RecipeStep], made: Collection[Artifact], plan: Artifact, store: Store
) -> str:
    """Return a line with the expected time of the steps after the plan, or "" if the plan has timed nothing."""
    from whorl.evals.suites.held_out import held_out_documents

    selection = next((a for a in made if a.kind == "selection"), None)
    splits: Mapping[str, Mapping[str, float]] = (
        {} if selection is None else selection.summary.get("splits", {})
    )
    tasks = next((a for a in made if a.kind == "tasks"), None)
    texts = "pairs.train.jsonl" if tasks is not None and "pairs.train.jsonl" in tasks.files else None
    known = RunInputs(
        expected=plan.summary.get("expected", {}),
        train_bytes=splits.get("train", {}).get("bytes", 0),
        test_bytes=splits.get("test", {}).get("bytes", 0),
        task_bytes=tasks.file(texts).stat().st_size if tasks is not None and texts is not None else 0,
        test_tasks=tasks.summary.get("counts", {}).get("test", 0) if tasks is not None else 0,
        cores=usable_cores(),
        documents=tuple if selection is None else partial(held_out_documents, store, selection.address),
    )
    seconds = forecast({name: (step.kind.name, step.config) for name, step in later.items()}, known)
    parts = [
        f"{name} {format_duration(value)}"
        for name, value in seconds.items()
        if value is not None and value >= 1
    ]
    others = [name for name, value in seconds.items() if value is None]
    if not parts:
        return ""
    total = format_duration(round(sum(value or 0.0 for value in seconds.values()), -1))
    more = f", and {', '.join(others)}" if others else ""
    return f"    about {total} to go: {', '.join(parts)}{more}"


def _open_run(recipe: Recipe, store: Store, sinks: SafeSinks, progress: Progress) -> Run:
    """Open the run folder; of a read-only store, whose finished steps can be looked up, a temporary one."""
    try:
        return Run(run_folder(recipe, store), config=run_config(recipe), sinks=sinks)
    except OSError as error:
        if not isinstance(store.wrap_os_error(error), StoreError):
            raise
    folder = Path(tempfile.mkdtemp(prefix="whorl-run-"))
    progress.log(f"the store {store.location} is read-only: log and metrics are in {folder}")
    return Run(folder, config=run_config(recipe), sinks=sinks)


def _deterministic(enabled: bool) -> AbstractContextManager[None]:
    if not enabled:
        return nullcontext()
    from whorl.train.determinism import deterministic  # imports torch

    return deterministic()


def _hashed_config(kind: StepKind, config: BaseModel) -> dict[str, Any]:
    """Return the settings of a step that are part of its address.

    The number of replicas decides the last bits. So it belongs to a deterministic step.
    """
    found = config.model_dump(mode="json", exclude=set(kind.not_hashed))
    if is_deterministic(config):
        found["deterministic_replicas"] = deterministic_replicas(config)
    return found


def _check_installed(recipe: Recipe, first: str) -> None:
    """Check the packages that a step and those after it need: a run may work for hours before it gets to the last.

    A configuration that needs some has a method `check_installed` of the step's name.
    """
    names = [*recipe.steps]
    for name in names[names.index(first) :]:
        if (check := getattr(recipe.steps[name].config, "check_installed", None)) is not None:
            check(name)


def _run_step(
    recipe: Recipe, step: RecipeStep, artifacts: Mapping[str, Artifact], store: Store, run: Run, progress: Progress,
    label: str,
) -> tuple[Artifact, str]:  # fmt: skip
    kind = step.kind
    config = kind.complete_config(step.config, store) if kind.complete_config is not None else step.config
    parents = {role: artifacts[parent] for role, parent in step.parents.items() if parent in artifacts}
    if kind.find_parents is not None:
        parents |= kind.find_parents(parents, store)
    try:
        with (
            force_choices(recipe.kernels),
            Build(
                store,
                kind=kind.output_kind,
                name=f"{recipe.run_name}/{step.name}",
                parents=parents,
                config=_hashed_config(kind, config),
                version=kind.version,
                step=kind.name,
                on_message=progress.log,
            ) as build,
        ):
            if build.existing is None:
                _check_installed(recipe, step.name)
                start_native_builds(kind.name, {s.kind.name: s.config for s in recipe.steps.values()})
                progress.log(f"{label}: {'continues after an interruption' if build.resumed else kind.about}")
                run.record_environment()
                ctx = StepContext(
                    step.name, build.path, build.scratch, parents, run, progress, store, build.summary,
                    deterministic=is_deterministic(config),
                )  # fmt: skip
                with recorded_choices(build.scratch / "choices"), _deterministic(ctx.deterministic):
                    kind.function(ctx, config)
                ctx.report.write(build.path)
                if ctx.report.cards:  # for `whorl runs`
                    ctx.summary["figures"] = {
                        card.label: {"value": f"{card.value} {card.unit}".strip(), "number": card.number}
                        for card in ctx.report.cards
                    }
    except NotApplicableError:
        raise
    except WhorlError as error:
        verb = "stopped" if error.exit_code > 128 else "failed"  # stopped by a signal
        progress.log(f"{label}: {verb}; finished steps are kept")
        raise
    finally:
        restore_threads()
    assert build.artifact is not None
    return build.artifact, "looked up" if build.existing is not None else MADE
