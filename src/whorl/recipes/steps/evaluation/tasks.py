"""The tasks of the step `evaluate`: whole files of the test split, and those of a suite."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whorl.errors import NotApplicableError
from whorl.recipes.registry import StepContext
from whorl.recipes.steps.evaluation.generations import nearest_to_real_code

if TYPE_CHECKING:
    from whorl.corpus import Document
    from whorl.evals.results import TaskResult


def files_result(ctx: StepContext, documents: list[Document], nats: list[float]) -> TaskResult:
    """Return bits per byte of whole files as the result of a task, with an interval over files."""
    from whorl.evals.kinds.likelihood import TEXT_METRICS
    from whorl.evals.measures import measure
    from whorl.evals.results import ItemResult, TaskResult

    name, model = "bits_per_byte", ctx.parents["model"]
    digest = hashlib.sha256("\n".join(d.id for d in documents).encode()).hexdigest()
    items = [
        ItemResult(
            d.id, {name: cost / math.log(2) / max(1, d.n_bytes)}, "scored", weights={name: float(d.n_bytes)}
        )
        for d, cost in zip(documents, nats, strict=True)
    ]
    return TaskResult(
        "whole-files", "likelihood", "1", digest[:12], "files of the test split", model.name,
        model.address, metrics=(name,), measures=(measure(name, TEXT_METRICS[name], items),),
        outcomes={"scored": len(items)}, items=tuple(items),
    )  # fmt: skip


def run_suite(
    ctx: StepContext,
    suite: str,
    held_out: list[Document],
    result: dict[str, Any],
    files: TaskResult,
    *,
    n: int,
    seed: int,
) -> list[TaskResult]:
    """Write and return the results of whole files and of the suite's tasks; add completed functions to `result`."""
    from whorl.evals.results_io import save_results
    from whorl.evals.suites import SuiteInputs, load_suite
    from whorl.evals.suites.held_out import named_texts

    inputs = SuiteInputs(lambda: named_texts(held_out), n, seed, lambda line: ctx.progress.log(f"    {line}"))
    try:
        tasks = load_suite(suite, inputs) if n else []
    except NotApplicableError as error:  # few short documents
        ctx.progress.log(f"    {error.what}")
        tasks = []
    found = answer_tasks(ctx, tasks)
    save_results(ctx.out / "suite", [files, *found], {"suite": suite})
    for task, each in zip(tasks, found, strict=True):
        if each.task == "own-functions":
            counts = each.outcomes
            result["completions"] = {
                "prompts": len(each.items), "parsed": counts.get("right", 0), "unfinished": counts.get("truncated", 0),
                "nearest": nearest_to_real_code(task, each),
            }  # fmt: skip
    return [files, *found]


def answer_tasks(ctx: StepContext, tasks: Sequence[Any]) -> list[TaskResult]:
    """Return the results of the parent `model`; responses that the store has are not computed again."""
    from whorl.evals.model.engine_backend import EngineBackend
    from whorl.evals.model.response_cache import CachedBackend, ResponseCache
    from whorl.evals.runner import evaluate

    if not tasks:
        return []
    dtype = str(ctx.machine.torch_dtype).removeprefix("torch.")
    with ResponseCache(ctx.store.root / "responses.sqlite") as responses:
        opened = EngineBackend.open(ctx.parents["model"].address, store=str(ctx.store.root), dtype=dtype)
        return evaluate(CachedBackend(opened, responses), tasks, progress=ctx.progress)


def summary_of(result: TaskResult) -> dict[str, Any]:
    """Return the shown figures of a task as JSON."""
    figures = [result.measure(name) for name in result.metrics]
    return {
        "task": result.task, "hash": result.hash, "outcomes": dict(result.outcomes),
        "figures": [
            {"metric": m.metric, "value": _finite(m.value), "low": _finite(m.low), "high": _finite(m.high), "n": m.n,
             "chance": m.chance}
            for m in figures
        ],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
