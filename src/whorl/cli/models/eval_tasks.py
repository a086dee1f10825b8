"""Tasks of `whorl eval`, and the run of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from whorl.cli.models.eval_samples import generated_task, with_samples
from whorl.errors import ConfigError, DataError, StoreError
from whorl.evals.contamination import (
    ContaminatedItems,
    find_contaminated,
    training_text,
    with_contamination,
)
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.metered_backend import MeteredBackend
from whorl.evals.model.open_model import is_url, open_backend
from whorl.evals.model.options import ModelOptions, SampleSettings
from whorl.evals.model.requests import ModelBackend
from whorl.evals.model.response_cache import CachedBackend, ResponseCache
from whorl.evals.results import TaskResult
from whorl.evals.results_io import RESULTS_FILE, load_cost, save_results
from whorl.evals.runner import evaluate
from whorl.evals.suites import SuiteInputs, TaskSources, load_suite
from whorl.evals.suites import load_tasks as named_tasks
from whorl.store import Store, user_path
from whorl.tracking.progress import Progress


def load_tasks(
    suites: Sequence[str] | None, names: Sequence[str] | None, data: Sequence[str] | None, train: Sequence[str] | None,
    *, limit: int | None, documents: Callable[[], Sequence[tuple[str, str]]], sampling: SampleSettings,
) -> list[EvalTask]:  # fmt: skip
    """Return the tasks of all options. Raises ConfigError: there are none, or two have one name."""
    n, chat, seed = sampling.num_fewshot, sampling.apply_chat_template, sampling.seed
    sources = TaskSources(_by_task(data), _by_task(train), n)
    made = {name: generated_task(name, limit=limit, seed=seed, chat=chat) for name in names or ()}
    found = [task for task in made.values() if task is not None]
    named = [name for name, task in made.items() if task is None]
    found += named_tasks(named, sources, limit) if named else []
    for name in suites or ():
        own = TaskSources(num_fewshot=n) if names else sources
        found += load_suite(name, SuiteInputs(documents, limit, seed), own)
    if not found:
        raise ConfigError(
            "no task is given", expected="--suite or --task", do="whorl eval --list shows the ready ones"
        )
    for task in found:
        if n and task.config.num_fewshot != n:
            raise ConfigError(
                f"--num-fewshot {n}: the task {task.config.name} has no training records",
                expected="a task of a file, with records of --train", do="leave out --num-fewshot for it",
            )  # fmt: skip
    labels = [task.config.name for task in found]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError(f"two tasks have the name {twice[0]!r}", expected="different names")
    plain = sampling == SampleSettings(seed=seed, num_fewshot=n)
    return found if plain else [with_samples(task, sampling) for task in found]


def check_output(out: Path) -> None:
    """Raises ConfigError: a file is where the folder of results, or one of its parents, would be."""
    nearest = next((each for each in (out, *out.parents) if each.exists()), Path())
    if not nearest.is_dir():
        raise ConfigError(
            f"{nearest} is a file, so no results can be written to {out}", expected="a folder, or a new path",
            do="give another --out",
        )  # fmt: skip


def results_folder(ref: str, store: str | None) -> Path | None:
    """Return the folder of results that a model's place names: itself, or that of an artifact of `evaluate`."""
    if is_url(ref):
        return None
    path = user_path(ref)
    if (path / RESULTS_FILE).is_file():
        return path
    if path.exists():
        return None
    try:
        artifact = Store(store).open(ref)
    except StoreError:  # a system, or no such model
        return None
    if artifact.kind != "evaluation":
        return None
    artifact.check()
    return artifact.path / "suite"


def without_scores(labels: Sequence[str], found: Sequence[Sequence[TaskResult]]) -> DataError | None:
    """Return the error that ends the run if no item of a model has a score, so that nothing was evaluated; else None."""
    for label, results in zip(labels, found, strict=True):
        items = [item for result in results for item in result.items]
        if any(item.outcome not in ("missing", "error") for item in items):
            continue
        reason = f": {items[0].reason}" if items and items[0].reason else ""
        count = "the only item has" if len(items) == 1 else f"all {len(items):,} items have"
        return DataError(
            f"{label} was not evaluated: {count} no score{reason}", expected="a score of at least one item",
            do="remove the cause and run the command again: it requests what is missing",
        )  # fmt: skip
    return None


def _by_task(given: Sequence[str] | None) -> dict[str, list[str]]:
    """Return task -> paths of options PATH or TASK=PATH."""
    found: dict[str, list[str]] = {}
    for entry in given or ():
        name, equals, path = entry.partition("=")
        if not equals or "/" in name:
            name, path = "", entry
        found.setdefault(name, []).append(path)
    return found


def evaluate_model(
    ref: str,
    options: ModelOptions,
    tasks: Sequence[EvalTask],
    cache: Path,
    out: Path,
    judge: tuple[str, ModelOptions],
    *,
    roles: Mapping[str, ModelBackend],
    contamination: bool = False,
) -> list[TaskResult]:
    """Return the results of one model, and write them after each task.

    roles: back ends of further roles than the judge.
    contamination: search the items in the training tokens of the model's lineage.
    """
    found = _search(ref, options, tasks) if contamination else {}
    with ResponseCache(cache) as responses:
        metered = MeteredBackend(open_backend(ref, options), local=not is_url(ref))
        backend = CachedBackend(metered, responses)
        if judge[0]:
            roles = {**roles, "judge": CachedBackend(open_backend(*judge), responses)}
        done: list[TaskResult] = []
        earlier = load_cost(out, backend.address)  # of a run whose responses are used again

        def save(result: TaskResult) -> None:
            if result.task in found:
                task = next(each for each in tasks if each.config.name == result.task)
                result = with_contamination(task, result, found[result.task])
            done.append(result)
            save_results(out, done, {"cost": metered.cost() or earlier})

        progress = Progress()
        evaluate(backend, tasks, roles=roles, progress=progress, on_result=save)
        if metered.cost() and metered.local and metered.no_energy:
            progress.log(f"energy is not measured: {metered.no_energy}")
        return done


def _search(ref: str, options: ModelOptions, tasks: Sequence[EvalTask]) -> dict[str, ContaminatedItems]:
    text = training_text(ref, Store(options.store))
    with Progress().task("Searching training tokens", total=text.n_documents, unit="documents") as bar:
        return find_contaminated(tasks, text.documents(), advance=bar.advance)
