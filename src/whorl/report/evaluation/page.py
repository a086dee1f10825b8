"""The page of one or several evaluations: static, offline, one file.

The summary, figures and notes are markup. The items are packed (`embed.py`) and shown by `items.js` in a list that only
holds the rows in view. All texts of models and data are untrusted: those in the markup pass through autoescape, and
those in the items are inserted as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError
from whorl.report.evaluation.embed import CHUNK_ITEMS, pack, task_blocks
from whorl.report.evaluation.figures import COSTS, cost_charts, format_cost, reliability_chart
from whorl.report.evaluation.folders import OUTCOMES, EvaluatedModel, PageMetric, read_evaluations
from whorl.report.format import format_number, format_percent
from whorl.report.render import write_html

OUTCOME_TEXT = {name: name.replace("_", " ") for name in OUTCOMES}


def write_page(
    folders: Path | Sequence[Path], out: Path, title: str = "", verdicts: Sequence[str] = ()
) -> Path:
    """Write the page of one evaluation, or of several side by side, and return its path.

    Args:
        folders: each with `results.json` and `items-TASK.jsonl`; the first two are A and B.
        title: heading; by default the names of the models.
        verdicts: sentences for the top of the page, as those of a comparison.

    Raises:
        ConfigError: no folder is given, or `out` is a folder or a device.
        DataError: a file of a folder is missing or damaged.
    """
    given = [folders] if isinstance(folders, Path) else list(folders)
    if not given:
        raise ConfigError("no folder of an evaluation is given", expected="at least one")
    models = read_evaluations(given)
    names = list(dict.fromkeys(task for model in models for task in model.tasks))
    blocks, contents = [], []
    for number, task in enumerate(names):
        made = [*task_blocks(task, number, models)]
        blocks += made
        kinds = [model.tasks[task].kind for model in models if task in model.tasks]
        contents.append({"name": task, "chunks": len(made) - 1, "kind": kinds[0]})
    listed = {
        "models": [model.label for model in models],
        "outcomes": [*OUTCOME_TEXT.values(), "not in this evaluation"],
        "chunk": CHUNK_ITEMS,
        "tasks": contents,
    }
    return write_html(_render(models, names, [("contents", pack(listed)), *blocks], title, verdicts), out)


def _render(
    models: Sequence[EvaluatedModel],
    tasks: Sequence[str],
    blocks: Sequence[tuple[str, str]],
    title: str,
    verdicts: Sequence[str],
) -> str:
    import jinja2
    from markupsafe import Markup

    shared, here = files("whorl.report"), files("whorl.report.evaluation")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    figures = []
    for task in tasks:
        charts = (
            [("Reliability", _calibration_note(task, models), chart)]
            if (chart := reliability_chart(task, models))
            else []
        )
        charts += cost_charts(task, models)
        if charts:
            figures.append((task, [(name, note, Markup(chart)) for name, note, chart in charts]))
    used = [field for field in COSTS if any(getattr(model.cost, field) is not None for model in models)]
    return environment.from_string((here / "page.html").read_text("utf-8")).render(
        title=title or " and ".join(model.label for model in models),
        style=Markup((shared / "style.css").read_text("utf-8") + (here / "items.css").read_text("utf-8")),
        script=Markup((shared / "page.js").read_text("utf-8") + (here / "items.js").read_text("utf-8")),
        models=[(model.label, model.address, _costs(model, used)) for model in models],
        costs=[COSTS[field][0].removeprefix("Quality by ") for field in used],
        rows=[row for task in tasks for row in _rows(task, models)],
        outcomes=_outcomes(tasks, models),
        notes=_notes(tasks, models),
        figures=figures,
        verdicts=verdicts,
        blocks=[(name, Markup(text)) for name, text in blocks],
    )


def _costs(model: EvaluatedModel, fields: Sequence[str]) -> list[str]:
    return [format_cost(field, getattr(model.cost, field)) for field in fields]


def _rows(task: str, models: Sequence[EvaluatedModel]) -> list[dict[str, Any]]:
    """Return one row for each metric of a task, with a cell per model."""
    metrics = list(
        dict.fromkeys(name for model in models if task in model.tasks for name in model.tasks[task].metrics)
    )
    rows = []
    for number, name in enumerate(metrics):
        found = [model.tasks[task].metrics.get(name) if task in model.tasks else None for model in models]
        chance = next((m.chance for m in found if m is not None and m.chance is not None), None)
        rows.append(
            {
                "task": task if number == 0 else "",
                "metric": name,
                "chance": "–" if chance is None else format_number(chance),
                "cells": [_cell(metric) for metric in found],
            }
        )
    return rows


def _cell(metric: PageMetric | None) -> tuple[str, str]:
    """Return (value, interval)."""
    if metric is None or metric.value is None:
        return "–", ""
    interval = ""
    if metric.low is not None and metric.high is not None:
        interval = f"{format_number(metric.low)} to {format_number(metric.high)}"
    return format_number(metric.value), interval


def _outcomes(tasks: Sequence[str], models: Sequence[EvaluatedModel]) -> list[dict[str, Any]]:
    """Return one row for each task and model: items, outcomes, hash."""
    rows = []
    for task in tasks:
        for model in models:
            if (found := model.tasks.get(task)) is None:
                continue
            bounds = ""
            if found.bounds is not None:
                bounds = f"{format_number(found.bounds[0])} to {format_number(found.bounds[1])}"
            rows.append(
                {
                    "task": task, "model": model.label, "hash": found.hash[:12], "items": f"{found.items:,}",
                    "counts": [f"{found.outcomes.get(name, 0):,}" for name in OUTCOMES], "bounds": bounds or "–",
                }
            )  # fmt: skip
    return rows


def _notes(tasks: Sequence[str], models: Sequence[EvaluatedModel]) -> list[str]:
    """Return the notes of tasks, and tasks that differ between models."""
    notes = []
    for task in tasks:
        found = [model.tasks[task] for model in models if task in model.tasks]
        if len({entry.hash for entry in found}) > 1:
            notes.append(
                f"{task}: the models ran different versions of this task, so the figures do not compare."
            )
        for model in models:
            notes += [
                f"{task}, {model.label}: {note}"
                for note in (model.tasks[task].notes if task in model.tasks else ())
            ]
    return notes


def _calibration_note(task: str, models: Sequence[EvaluatedModel]) -> str:
    """Return ECE and Brier score of each model in words."""
    parts = []
    for model in models:
        calibration = model.tasks[task].calibration if task in model.tasks else None
        if calibration is not None:
            ece = (
                ""
                if calibration.ece is None
                else f"expected calibration error {format_percent(calibration.ece)}"
            )
            brier = "" if calibration.brier is None else f"Brier score {format_number(calibration.brier)}"
            parts.append(f"{model.label}: {', '.join(part for part in (ece, brier) if part)}")
    return (
        "Share of right answers over the confidence of the choice; on the diagonal both agree. "
        + "; ".join(parts)
    )
