"""Figures of an evaluation as rows of text, for the command line and for reports.

task   metric     value   95 % interval      chance   n     hash
quiz   acc        61.0%   51.2% to 70.0%     25.0%    100   42384191c378
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whorl.evals.results import TaskMeasure, TaskResult

HEADS = ("task", "metric", "value", "95 % interval", "chance", "n", "hash")
SHOWN_REASONS = 3


def figure_rows(results: Sequence[TaskResult], *, all_metrics: bool = False) -> list[list[str]]:
    """Return a row of `HEADS` for each shown figure, or for all; the first row of a task has its name and hash."""
    rows = []
    for result in results:
        shown = [m for m in result.measures if all_metrics or m.metric in result.metrics]
        for number, measure in enumerate(shown):
            chance = "" if measure.chance is None else format_value(measure.chance, measure)
            first = number == 0
            rows.append(
                [result.task if first else "", measure.metric, format_value(measure.value, measure),
                 format_interval(measure), chance, f"{measure.n:,}", result.hash if first else ""]
            )  # fmt: skip
    return rows


def outcome_lines(results: Sequence[TaskResult]) -> list[str]:
    """Return a line for each task: counts of outcomes, and of requests."""
    lines = []
    for result in results:
        counts = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in result.outcomes.items())
        cached = f", {result.cached:,} answered by stored responses" if result.cached else ""
        lines.append(f"{result.task}: {counts}; {result.requests:,} requests{cached}")
    return lines


def figure_notes(results: Sequence[TaskResult]) -> list[str]:
    """Return lines under the table: bounds of figures with missing responses, and notes."""
    lines = []
    for result in results:
        measure = next((m for m in result.measures if m.metric == result.metrics[0]), None)
        missing = result.outcomes.get("missing", 0) + result.outcomes.get("error", 0)
        if missing:
            line = f"{result.task}: {missing:,} {'item has' if missing == 1 else 'items have'} no score"
            if measure is not None and measure.bounds is not None:
                low, high = (format_value(end, measure) for end in measure.bounds)
                line += f"; {measure.metric} is between {low} and {high}"
            lines.append(line)
            reasons = {item.reason for item in result.items if item.outcome in ("missing", "error")}
            lines += [f"    {reason}" for reason in sorted(reasons)[:SHOWN_REASONS]]
        lines += [f"{result.task}: {note}" for note in result.notes]
    return lines


def format_value(value: float, measure: TaskMeasure) -> str:
    """Return a figure: shares in percent, others with four digits."""
    if math.isnan(value):
        return "-"
    return f"{value:.1%}" if measure.unit == "share" else f"{value:.4g}"


def format_interval(measure: TaskMeasure) -> str:
    """Return the interval of a figure; "" if it has none."""
    if math.isnan(measure.low) or math.isnan(measure.high):
        return ""
    return f"{format_value(measure.low, measure)} to {format_value(measure.high, measure)}"
