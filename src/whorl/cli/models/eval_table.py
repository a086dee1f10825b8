"""Tables of `whorl eval`: figures of each task, and the ready tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whorl.evals.results import TaskMeasure, TaskResult


def figures_table(results: Sequence[TaskResult], *, all_metrics: bool = False) -> Any:
    """Return the figures as a table of rich: the shown metrics of each task, or all."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "metric", "value", "95 % interval", "n", "chance", "outcomes", "hash"):
        table.add_column(name, justify="right" if name in ("value", "n", "chance") else "left", overflow="fold")
    for result in results:
        shown = [m for m in result.measures if all_metrics or m.metric in result.metrics]
        for number, measure in enumerate(shown):
            first = number == 0
            table.add_row(
                result.task if first else "", measure.metric, format_value(measure.value, measure), _interval(measure),
                f"{measure.n:,}", "" if measure.chance is None else format_value(measure.chance, measure),
                _outcomes(result) if first else "", result.hash if first else "",
            )  # fmt: skip
    return table


def figure_notes(results: Sequence[TaskResult]) -> list[str]:
    """Return lines under the table: bounds of figures with missing responses, and notes."""
    lines = []
    for result in results:
        measure = next((m for m in result.measures if m.metric == result.metrics[0]), None)
        if measure is not None and measure.bounds is not None:
            low, high = (format_value(end, measure) for end in measure.bounds)
            missing = result.outcomes.get("missing", 0) + result.outcomes.get("error", 0)
            lines.append(f"{result.task}: {missing:,} items have no score; {measure.metric} is between {low} and {high}")
            reasons = {item.reason for item in result.items if item.outcome in ("missing", "error")}
            lines += [f"    {reason}" for reason in sorted(reasons)[:3]]
        lines += [f"{result.task}: {note}" for note in result.notes]
    return lines


def format_value(value: float, measure: TaskMeasure) -> str:
    """Return a figure: shares in percent, others with four digits."""
    if math.isnan(value):
        return "-"
    return f"{value:.1%}" if measure.unit == "share" else f"{value:.4g}"


def catalog_table() -> Any:
    """Return the ready tasks as a table of rich."""
    from rich import box
    from rich.table import Table

    from whorl.evals.suites import catalog

    table = Table("task", "kind", "about", "data", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, config in catalog().items():
        table.add_row(name, config.kind, config.about, config.source)
    return table


def _interval(measure: TaskMeasure) -> str:
    if math.isnan(measure.low) or math.isnan(measure.high):
        return ""
    return f"{format_value(measure.low, measure)} to {format_value(measure.high, measure)}"


def _outcomes(result: TaskResult) -> str:
    return ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in result.outcomes.items())
