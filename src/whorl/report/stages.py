"""The section on stages after pretraining: a table before and after, curves, objectives, and answers to the same tasks.

Each figure is shown before and after the stage: accuracy may rise while bits per byte of pretraining text get worse.
Answers are shown side by side, task by task. A verdict is given in words and by a sign, not by colour alone, for readers
without colour vision and for screen readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from whorl.report.charts import Series, line_chart
from whorl.report.data import BeforeAfter, StageSection, TaskCompletion
from whorl.report.format import NBSP, format_duration, format_number, format_percent
from whorl.report.induction_onset import smooth

Chart = tuple[str, str, str]  # title, note, markup


def stage_table(stages: Sequence[StageSection]) -> dict[str, Any]:
    """Return the headings of what was measured, and one row per stage."""
    columns = [
        ("Accuracy, sampled", [_percent_change(stage.accuracy) for stage in stages]),
        ("Accuracy, greedy", [_percent_change(stage.accuracy_greedy) for stage in stages]),
        ("Bits per byte", [_bits_change(stage.bits_per_byte) for stage in stages]),
    ]
    columns = [(heading, cells) for heading, cells in columns if any(cells)]
    rows = [
        {
            "name": stage.name,
            "trained_on": stage.trained_on,
            "changes": [cells[i] for _, cells in columns],
            "time": format_duration(stage.seconds) if stage.seconds is not None else "–",
        }
        for i, stage in enumerate(stages)
    ]
    return {"headings": [heading for heading, _ in columns], "rows": rows}


def objective_rows(stages: Sequence[StageSection]) -> list[dict[str, str]]:
    """Return one row per stage with the objective that it minimized, its formula and its paper."""
    return [
        {"stage": stage.name, **stage.objective.model_dump()}
        for stage in stages
        if stage.objective is not None
    ]


def _percent_change(change: BeforeAfter | None) -> dict[str, str] | None:
    if change is None:
        return None
    return {"before": format_percent(change.before), "after": format_percent(change.after), "note": ""}


def _bits_change(change: BeforeAfter | None) -> dict[str, str] | None:
    if change is None:
        return None
    cell = {"before": f"{change.before:.3f}", "after": f"{change.after:.3f}", "note": ""}
    if change.before:
        per_cent = round(100 * (change.after / change.before - 1), 1) + 0.0  # avoids a minus sign before zero
        cell["note"] = f"({per_cent:+.1f}{NBSP}%)".replace("-", "\N{MINUS SIGN}")
    return cell


def stage_charts(stages: Sequence[StageSection]) -> Iterator[Chart]:
    """Yield the curves of each stage: the loss, or accuracy and completion length."""
    for stage in stages:
        points = stage.points
        steps = (0.0, float(max((p.step for p in points), default=0)))
        passed = [(p.step, p.accuracy) for p in points if p.accuracy is not None]
        if not passed:
            losses = [(p.step, p.loss) for p in points if p.loss is not None]
            if losses:
                yield _smoothed_chart(
                    f"{stage.name}: loss", f"{stage.loss_description}: every step, and smoothed.",
                    "loss", losses, steps, height=150,
                )  # fmt: skip
            continue
        yield _smoothed_chart(
            f"{stage.name}: accuracy",
            "Completions sampled in a step, on training tasks: every step, and smoothed.",
            "accuracy", passed, steps, y_range=(0.0, 1.0), y_format=format_percent,
        )  # fmt: skip
        lengths = [(float(p.step), p.completion_length) for p in points if p.completion_length is not None]
        wrong = [
            (float(p.step), p.completion_length_incorrect) for p in points if p.completion_length_incorrect
        ]
        if lengths:
            series = [Series("incorrect", [x for x, _ in wrong], [y for _, y in wrong], "faint")]
            series = [*(series if wrong else []), Series("all", *_unzip(lengths))]
            yield (
                f"{stage.name}: completion length",
                "Mean tokens of all completions of a step; the faint line is the mean of the incorrect ones.",
                line_chart(
                    series,
                    label=f"Mean completion length against step, from {format_number(lengths[0][1])} to "
                    f"{format_number(lengths[-1][1])} tokens",
                    height=190,
                    x_range=steps,
                ),
            )


def _unzip(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in points], [y for _, y in points]


def _smoothed_chart(
    title: str,
    note: str,
    quantity: str,
    points: Sequence[tuple[float, float]],
    x_range: tuple[float, float],
    *,
    height: int = 220,
    **options: Any,
) -> Chart:
    """Return a chart with every step drawn faint and a smoothed curve."""
    steps, values = _unzip(points)
    smoothed = [float(value) for value in smooth(values, max(1.0, len(values) / 30))]
    series = [Series("every step", steps, values, "faint"), Series("smoothed", steps, smoothed)]
    label = f"{quantity[:1].upper()}{quantity[1:]} against step, from "
    label += f"{format_number(smoothed[0])} to {format_number(smoothed[-1])}"
    return title, note, line_chart(series, label=label, height=height, x_range=x_range, **options)


def stage_samples(stages: Sequence[StageSection]) -> list[dict[str, Any]]:
    """Return the stages with stored answers, each with its tasks and both answers."""
    return [
        {
            "title": f"Before and after {stage.name}",
            "note": f"The same held-out tasks, with sampled answers. Of the first {len(stage.samples)}"
            f"{f' of {stage.n_test_tasks:,}' if stage.n_test_tasks else ''}, "
            f"{sum(task.before.passed for task in stage.samples)} passed before and "
            f"{sum(task.after.passed for task in stage.samples)} after.",
            "tasks": [
                {
                    "prompt": task.prompt,
                    "sides": [
                        _completion_panel("before", task.before),
                        _completion_panel("after", task.after),
                    ],
                }
                for task in stage.samples
            ],
        }
        for stage in stages
        if stage.samples
    ]


def _completion_panel(when: str, answer: TaskCompletion) -> dict[str, str]:
    verdict = f"{when}: {'passed' if answer.passed else 'not passed'}"
    if answer.reward != float(answer.passed):
        verdict += f", reward {format_number(answer.reward)}"
    return {
        "kind": "passed" if answer.passed else "failed",
        "sign": "✓" if answer.passed else "✗",
        "verdict": verdict,
        "reason": answer.reason if answer.reason != "passed" else "",
        "text": answer.text.strip("\n"),
    }
