"""The chapter after pretraining: what each stage changed, in figures, in curves, and in answers to the same tasks.

A stage is told by what was there before it and what is there after it, since neither says anything alone: a share of tasks
passed that rose, and the bits per byte that were paid for it. Answers stand side by side, task by task.

The subtle part is who reads it. Whether an answer passed is said in words and by a sign before it is said by a colour, so
that it is there for those who tell no colours apart, on paper, and for those who listen to the page.
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
    """Headings of what was measured, and one row for each stage."""
    columns = [
        ("Passed, sampled", [_percent_change(stage.accuracy) for stage in stages]),
        ("Passed, greedy", [_percent_change(stage.accuracy_greedy) for stage in stages]),
        ("Bits per byte", [_bits_change(stage.bits_per_byte) for stage in stages]),
    ]
    columns = [(heading, cells) for heading, cells in columns if any(cells)]
    rows = [
        {
            "name": stage.name,
            "learnt_from": stage.trained_on,
            "changes": [cells[i] for _, cells in columns],
            "time": format_duration(stage.seconds) if stage.seconds is not None else "–",
        }
        for i, stage in enumerate(stages)
    ]
    return {"headings": [heading for heading, _ in columns], "rows": rows}


def _percent_change(change: BeforeAfter | None) -> dict[str, str] | None:
    if change is None:
        return None
    return {"before": format_percent(change.before), "after": format_percent(change.after), "note": ""}


def _bits_change(change: BeforeAfter | None) -> dict[str, str] | None:
    if change is None:
        return None
    told = {"before": f"{change.before:.3f}", "after": f"{change.after:.3f}", "note": ""}
    if change.before:
        per_cent = round(100 * (change.after / change.before - 1), 1) + 0.0  # no minus before a zero
        told["note"] = f"({per_cent:+.1f}{NBSP}%)".replace("-", "\N{MINUS SIGN}")
    return told


def stage_charts(stages: Sequence[StageSection]) -> Iterator[Chart]:
    """Of each stage what it recorded by step: the loss, or the share passed and the length of answers."""
    for stage in stages:
        points = stage.points
        whole = (0.0, float(max((p.step for p in points), default=0)))
        passed = [(p.step, p.accuracy) for p in points if p.accuracy is not None]
        if not passed:
            losses = [(p.step, p.loss) for p in points if p.loss is not None]
            if losses:
                yield _smoothed_chart(
                    f"{stage.name}: loss", f"{stage.loss_description}: each step, and smoothed.",
                    "loss", losses, whole, height=150,
                )  # fmt: skip
            continue
        yield _smoothed_chart(
            f"{stage.name}: share of answers that passed",
            "Of those sampled in a step, on tasks to learn from: each step, and smoothed.",
            "share passed", passed, whole, y_range=(0.0, 1.0), y_format=format_percent,
        )  # fmt: skip
        lengths = [(float(p.step), p.completion_length) for p in points if p.completion_length is not None]
        wrong = [
            (float(p.step), p.completion_length_incorrect) for p in points if p.completion_length_incorrect
        ]
        if lengths:
            series = [Series("wrong answers", [x for x, _ in wrong], [y for _, y in wrong], "faint")]
            series = [*(series if wrong else []), Series("all answers", *_unzip(lengths))]
            yield (
                f"{stage.name}: length of answers",
                "Mean in tokens of all answers of a step; the faint line is that of the wrong ones.",
                line_chart(
                    series,
                    label=f"Mean length of answers against step, from {format_number(lengths[0][1])} to "
                    f"{format_number(lengths[-1][1])} tokens",
                    height=190,
                    x_range=whole,
                ),
            )


def _unzip(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in points], [y for _, y in points]


def _smoothed_chart(
    title: str,
    note: str,
    what: str,
    points: Sequence[tuple[float, float]],
    whole: tuple[float, float],
    *,
    height: int = 220,
    **how: Any,
) -> Chart:
    """Each step faint, and their smoothed course."""
    steps, values = _unzip(points)
    course = [float(value) for value in smooth(values, max(1.0, len(values) / 30))]
    series = [Series("each step", steps, values, "faint"), Series("smoothed", steps, course)]
    label = f"{what[:1].upper()}{what[1:]} against step, from {format_number(course[0])} to {format_number(course[-1])}"
    return title, note, line_chart(series, label=label, height=height, x_range=whole, **how)


def stage_samples(stages: Sequence[StageSection]) -> list[dict[str, Any]]:
    """The stages that kept answers, each with its tasks and their two sides."""
    return [
        {
            "title": f"Before and after {stage.name}",
            "note": f"The same held-out tasks, answered as sampled. Of the first {len(stage.samples)}"
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
