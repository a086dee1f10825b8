"""The page of one or several evaluations: static, offline, one file.

The summary, figures and notes are markup. The items are packed (`embed.py`) and shown by `items.js` in a list that only
holds the rows in view. All texts of models and data are untrusted: those in the markup pass through autoescape, and
those in the items are inserted as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError
from whorl.evals.results import OUTCOMES, ItemResult, TaskMeasure
from whorl.report.evaluation.embed import CHUNK_ITEMS, pack, task_blocks
from whorl.report.evaluation.figures import COSTS, cost_charts, format_cost, reliability_chart, scaling_charts
from whorl.report.evaluation.folders import EvaluatedModel, read_evaluations
from whorl.report.format import NBSP, format_number
from whorl.report.render import write_html

MINUS = "\N{MINUS SIGN}"
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
    blocks, contents, figures = [], [], []
    for number, task in enumerate(names):
        items = {model.label: model.items(task) for model in models}
        made = [*task_blocks(number, [*items.values()])]
        blocks += made
        contents.append({"name": task, "chunks": len(made) - 1})
        figures += [(task, *figure) for figure in _figures(task, models, items)]
    listed = {
        "models": [model.label for model in models],
        "outcomes": [*OUTCOME_TEXT.values(), "not in this evaluation"],
        "chunk": CHUNK_ITEMS,
        "tasks": contents,
    }
    heading = title or " and ".join(model.label for model in models)
    return write_html(
        _render(models, names, [("contents", pack(listed)), *blocks], figures, heading, verdicts), out
    )


def _figures(
    task: str, models: Sequence[EvaluatedModel], items: Mapping[str, Sequence[ItemResult]]
) -> Iterator[tuple[str, str, str]]:
    """Yield (title, note, markup) of the figures of a task."""
    if chart := reliability_chart(task, items):
        note = "Share of right answers over the confidence of the choice, in ten bins; on the diagonal both agree."
        yield "Reliability", note, chart
    yield from scaling_charts(task, models)
    yield from cost_charts(task, models)


def _render(
    models: Sequence[EvaluatedModel],
    tasks: Sequence[str],
    blocks: Sequence[tuple[str, str]],
    figures: Sequence[tuple[str, str, str, str]],
    title: str,
    verdicts: Sequence[str],
) -> str:
    import jinja2
    from markupsafe import Markup

    shared, here = files("whorl.report"), files("whorl.report.evaluation")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    used = [field for field in COSTS if any(field in model.cost for model in models)]
    return environment.from_string((here / "page.html").read_text("utf-8")).render(
        title=title,
        style=Markup((shared / "style.css").read_text("utf-8") + (here / "items.css").read_text("utf-8")),
        script=Markup((shared / "page.js").read_text("utf-8") + (here / "items.js").read_text("utf-8")),
        models=[(model.label, model.address, _costs(model, used)) for model in models],
        costs=[COSTS[field][0].removeprefix("Quality by ") for field in used],
        rows=[row for task in tasks for row in _rows(task, models)],
        groups=_group_rows(tasks, models),
        outcomes=_outcomes(tasks, models),
        notes=_notes(tasks, models),
        figures=[(task, name, note, Markup(chart)) for task, name, note, chart in figures],
        verdicts=verdicts,
        blocks=[(name, Markup(text)) for name, text in blocks],
    )


def _costs(model: EvaluatedModel, fields: Sequence[str]) -> list[str]:
    return [format_cost(field, model.cost.get(field)) for field in fields]


def _rows(task: str, models: Sequence[EvaluatedModel]) -> list[dict[str, Any]]:
    """Return one row for each figure of a task, with a cell per model."""
    found: dict[str, dict[str, TaskMeasure]] = {}  # figure -> model -> value
    for model in models:
        if task in model.tasks:
            for each in model.tasks[task].measures:
                found.setdefault(each.metric, {})[model.label] = each
    rows = []
    for number, (name, cells) in enumerate(found.items()):
        first = next(iter(cells.values()))
        chance = next((m.chance for m in cells.values() if m.chance is not None), None)
        rows.append(
            {
                "task": task if number == 0 else "", "metric": name, "about": first.about,
                "chance": "–" if chance is None else _value(chance, first.unit),
                "cells": [_cell(cells.get(model.label)) for model in models],
            }
        )  # fmt: skip
    return rows


def _cell(measure: TaskMeasure | None) -> tuple[str, str]:
    """Return (value, interval)."""
    if measure is None or math.isnan(measure.value):
        return "–", ""
    interval = ""
    if not math.isnan(measure.low) and not math.isnan(measure.high):
        interval = f"{_value(measure.low, measure.unit)} to {_value(measure.high, measure.unit)}"
    return _value(measure.value, measure.unit), interval


def _value(value: float, unit: str) -> str:
    """Return a figure; shares in percent, with one decimal."""
    return f"{100 * value:.1f}{NBSP}%".replace("-", MINUS) if unit == "share" else format_number(value)


def _group_rows(tasks: Sequence[str], models: Sequence[EvaluatedModel]) -> list[dict[str, Any]]:
    """Return one row for each group of items of a task, with a cell per model."""
    rows = []
    for task in tasks:
        by_model = [model.tasks[task].by_group if task in model.tasks else {} for model in models]
        groups = dict.fromkeys(group for groups in by_model for group in groups)
        for number, group in enumerate(groups):
            cells = [_cell(groups.get(group)) for groups in by_model]
            rows.append({"task": task if number == 0 else "", "group": group or "no group", "cells": cells})
    return rows


def _outcomes(tasks: Sequence[str], models: Sequence[EvaluatedModel]) -> list[dict[str, Any]]:
    """Return one row for each task and model: items, outcomes, hash."""
    rows = []
    for task in tasks:
        for model in models:
            if (found := model.tasks.get(task)) is None:
                continue
            bounds, first = "–", found.first
            if first is not None and first.bounds is not None:
                bounds = " to ".join(_value(end, first.unit) for end in first.bounds)
            rows.append(
                {
                    "task": task, "model": model.label, "hash": found.hash[:12],
                    "items": f"{sum(found.outcomes.values()):,}",
                    "counts": [f"{found.outcomes.get(name, 0):,}" for name in OUTCOMES], "bounds": bounds,
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
