"""`whorl eval`: evaluate a model on tasks, or compare two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from whorl.evals.model.open_model import ModelOptions
    from whorl.evals.results import TaskResult
    from whorl.evals.tasks import EvalTask

Names = Annotated[list[str] | None, typer.Option(metavar="NAME|FILE")]


def eval(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An artifact, a folder of a model or of results, or the URL of an API."),
    ] = "",
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME|FILE", help="A suite: a name that --list shows, or a TOML file.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME|FILE", help="A task: a ready one, or a TOML or YAML file.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="PATH|TASK=PATH", help="Records of a task; replaces those of its file.")
    ] = None,
    train: Annotated[
        list[str] | None, typer.Option(metavar="PATH|TASK=PATH", help="Records for few-shot examples.")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="MODEL", help="Compare with this model on the same items.")
    ] = "",
    margin: Annotated[float, typer.Option(min=0, help="Difference that does not matter, for --against.")] = 0.0,
    corpus: Annotated[
        str, typer.Option(metavar="ARTIFACT", help="Corpus of the suite own; default: that of the model's lineage.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task, the first ones.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated suites.")] = 0,
    model_name: Annotated[str, typer.Option(help="With a URL: the model that requests state.")] = "",
    tokenizer: Annotated[
        str, typer.Option(metavar="FOLDER", help="With a URL: the model's tokenizer, to score by ids.")
    ] = "",
    judge: Annotated[str, typer.Option(metavar="MODEL", help="The judge of tasks that have one.")] = "",
    judge_name: Annotated[str, typer.Option(help="With a URL: the judge's model.")] = "",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 64,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Scores equal to the bit for any batch.")
    ] = False,
    max_length: Annotated[int | None, typer.Option(min=2, help="Positions of a request at most.")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Responses; default: responses.sqlite in the store.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of results and page.")] = Path("evaluation"),
    all_metrics: Annotated[bool, typer.Option("--all", help="Print all metrics of each task.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the ready tasks and suites.")] = False,
    store: StoreOption = None,
) -> None:
    """Evaluate a model on tasks, or compare two models on the same items.

    Responses are stored: another metric, or a run after an interruption, requests only what is missing. A figure has a 95 %
    interval over items, the value of random answers, and the hash of its task; figures with equal hashes compare.

    Examples:

        whorl eval quickstart/pretrain --task lambada --data lambada.jsonl

        whorl eval quickstart/sft --task arc --data ARC-Challenge-Test.jsonl --against quickstart/pretrain

        whorl eval http://127.0.0.1:8000/v1 --model-name my-model --task gsm8k --data gsm8k_test.jsonl
    """
    from rich.console import Console

    from whorl.cli.models.eval_table import catalog_table, figure_notes, figures_table
    from whorl.errors import ConfigError
    from whorl.evals.comparisons import compare_results, summary_sentence
    from whorl.evals.model.open_model import ModelOptions
    from whorl.evals.results_io import RESULTS_FILE, load_results
    from whorl.evals.suites import SUITES
    from whorl.evals.suites.held_out import held_out_documents
    from whorl.report.evaluation import write_page
    from whorl.store import Store

    console = Console(width=None, soft_wrap=False)
    if list_:
        console.print(catalog_table())
        if names := list(SUITES):
            console.print(f"suites: {', '.join(names)}", highlight=False)
        return
    if not model:
        raise ConfigError("no model is given", expected="an artifact, a folder or a URL", do="whorl eval MODEL --task NAME")
    options = ModelOptions(model_name, tokenizer, dtype, batch_size, batch_invariant, max_length, store)
    judge_options = ModelOptions(judge_name, store=store)
    cache_path = cache or Store(store).root / "responses.sqlite"
    tasks: list[EvalTask] = []
    folders, found, labels = [], [], []
    for ref, label in ((model, "a"), (against, "b")):
        if not ref:
            continue
        if (Path(ref) / RESULTS_FILE).is_file():
            folders.append(Path(ref))
            found.append(load_results(Path(ref)))
        else:
            tasks = tasks or _load_tasks(suite, task, data, train, limit=limit, seed=seed, documents=lambda: held_out_documents(
                Store(store), corpus or model))  # fmt: skip
            folders.append(out / label if against else out)
            found.append(_evaluate(ref, options, tasks, cache_path, folders[-1], (judge, judge_options)))
        labels.append(found[-1][0].model if found[-1] else ref)
        if against:
            console.print(f"{label.upper()}: {ref}", highlight=False)
        console.print(figures_table(found[-1], all_metrics=all_metrics), highlight=False)
        for line in figure_notes(found[-1]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    verdicts: list[str] = []
    if against:
        pair = (labels[0], labels[1]) if labels[0] != labels[1] else ("A", "B")
        compared = compare_results(found[0], found[1], pair, margin=margin)
        verdicts = [summary_sentence(compared, pair), *(each.text for each in compared)]
        for line in verdicts:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    page = write_page(folders, out / "page.html", verdicts=verdicts)
    console.print(f"wrote {page}: open it in a browser", highlight=False, markup=False, soft_wrap=True)


def _load_tasks(
    suites: Sequence[str] | None, names: Sequence[str] | None, data: Sequence[str] | None, train: Sequence[str] | None,
    *, limit: int | None, seed: int, documents: Callable[[], Sequence[tuple[str, str]]],
) -> list[EvalTask]:  # fmt: skip
    """Return the tasks of all options. Raises ConfigError: there are none, or two have one name."""
    from whorl.errors import ConfigError
    from whorl.evals.suites import SuiteInputs, TaskSources, load_suite, load_tasks

    sources = TaskSources(_by_task(data), _by_task(train))
    found = load_tasks(names, sources, limit) if names else []
    for name in suites or ():
        inputs = SuiteInputs(documents() if name == "own" else (), limit, seed)
        found += load_suite(name, inputs, TaskSources() if names else sources)
    if not found:
        raise ConfigError(
            "no task is given", expected="--suite or --task", do="whorl eval --list shows the ready ones"
        )
    labels = [task.config.name for task in found]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError(f"two tasks have the name {twice[0]!r}", expected="different names")
    return found


def _by_task(given: Sequence[str] | None) -> dict[str, list[str]]:
    """Return task -> paths of options PATH or TASK=PATH."""
    found: dict[str, list[str]] = {}
    for entry in given or ():
        name, equals, path = entry.partition("=")
        if not equals or "/" in name:
            name, path = "", entry
        found.setdefault(name, []).append(path)
    return found


def _evaluate(
    ref: str, options: ModelOptions, tasks: Sequence[EvalTask], cache: Path, out: Path, judge: tuple[str, ModelOptions]
) -> list[TaskResult]:
    """Return the results of one model, and write them after each task."""
    from whorl.evals.model.open_model import open_backend
    from whorl.evals.model.response_cache import CachedBackend, ResponseCache
    from whorl.evals.results_io import save_results
    from whorl.evals.runner import evaluate
    from whorl.tracking.progress import Progress

    with ResponseCache(cache) as responses:
        backend = CachedBackend(open_backend(ref, options), responses)
        roles = {"judge": CachedBackend(open_backend(*judge), responses)} if judge[0] else {}
        done: list[TaskResult] = []

        def save(result: TaskResult) -> None:
            done.append(result)
            save_results(out, done)

        return evaluate(backend, tasks, roles=roles, progress=Progress(), on_result=save)
