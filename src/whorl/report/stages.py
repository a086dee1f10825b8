"""The blocks of a stage after pretraining: a row before and after, its objective, its curves, answers to the same tasks.

Each figure is shown before and after the stage: accuracy may rise while bits per byte of pretraining text get worse.
Answers are shown side by side. A verdict is given in words and by a sign, not by colour alone, for readers without
colour vision and for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from whorl.errors import DOCS_URL
from whorl.report.blocks import (
    EMPTY,
    Answer,
    Answers,
    Block,
    Card,
    Cell,
    Change,
    Column,
    Curve,
    Line,
    StepReport,
    Table,
)
from whorl.report.format import NBSP, format_duration, format_number, format_percent
from whorl.report.induction_onset import smooth
from whorl.report.training import event_table

SECTION = "After pretraining"
LOSSES = ("loss", "nll")  # metrics of a loss, of which a panel shows the first that exists
_NOTE = (
    "Each stage starts from the previous model. Held-out tasks are answered by sampling and by greedy decoding; bits "
    "per byte and perplexity are measured on the start of the test split, so they differ from those of all its files. "
    "A rise means forgetting."
)


def stage_report(
    name: str,
    summary: Mapping[str, Any],
    curve: Sequence[Mapping[str, Any]],
    *,
    objective: str,
    loss: tuple[str, str],
    trained_on: str = "",
    samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> StepReport:
    """Return the report of a stage.

    Args:
        summary: figures of the step; `eval`, `bits_per_byte` and `perplexity` hold {"before": ..., "after": ...}.
        curve: metrics of its steps; of a repeated step the last record counts.
        objective: name in `objectives/catalog.py`.
        loss: (metric, description with its unit) of the loss curve.
        samples: {"before": answers, "after": answers} to the same tasks.
    """
    measured = summary.get("eval", {})
    found: dict[str, Cell] = {
        "Accuracy, sampled": _percent_change(measured, "accuracy"),
        "Accuracy, greedy": _percent_change(measured, "accuracy_greedy"),
        "Held-out loss": _change({when: found.get("held_out_nll") for when, found in measured.items()}, 3),
        "Bits per byte, test start": _change(summary.get("bits_per_byte", {}), 3),
        "Perplexity, test start": _change(summary.get("perplexity", {}), 2),
    }
    criterion = summary.get("pass_criterion")
    table = Table(
        section=SECTION, title="Stages", note=_NOTE + (f" A task is passed if {criterion}." if criterion else ""),
        columns=[
            Column(name="Stage"), Column(name="Trained on", optional=True),
            *(Column(name=heading, number=True) for heading in found), Column(name="Time", number=True),
        ],
        rows=[[name, trained_on or EMPTY, *found.values(), format_duration(summary["seconds"])]],
    )  # fmt: skip
    blocks: list[Block] = [table, *_objective_table(name, objective), *stage_curves(name, curve, loss)]
    blocks += event_table(curve, SECTION, f"{name}: events")
    if samples:
        blocks += _answers(name, samples, summary.get("tasks", {}).get("test"))
    cards, after = [], measured.get("after", {})
    key, how = ("accuracy", "") if "accuracy" in after else ("accuracy_greedy", ", greedy")
    if key in after:
        more = f"{format_percent(measured['before'][key])} before {name}"
        if criterion:
            more += f"; a pass: {criterion}"
        cards.append(percent_card(f"Accuracy on held-out tasks{how}", after[key], more))
    if (loss_after := after.get("held_out_nll")) is not None:
        more = f"nats per token; {measured['before']['held_out_nll']:.3f} before {name}"
        value = f"{loss_after:.3f}"
        cards.append(Card(label="Loss of held-out texts", value=value, more=more, number=loss_after))
    return StepReport(cards=cards, blocks=blocks)


def percent_card(label: str, share: float, more: str) -> Card:
    """Return the card of a result that is a fraction."""
    return Card(label=label, value=format_percent(share), more=more, number=100 * share)


def training_panel(curve: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Yield the panel of any training step: its loss (`loss`, or `nll`), and its events. Both may be absent."""
    found = (points for metric in LOSSES if (points := metric_points(curve, metric)))
    if losses := next(found, []):
        note = "Every step that was recorded, and smoothed."
        yield smoothed_curve("Training loss", note, "loss", losses, height=190)
    yield from event_table(curve, "")


def _objective_table(name: str, objective: str) -> Iterator[Table]:
    from whorl.objectives.catalog import CATALOG

    if (info := CATALOG.get(objective)) is not None:
        columns = [Column(name="Stage"), Column(name="Objective"), Column(name="Formula", code=True)]
        yield Table(
            section=SECTION, title="Objectives",
            note=f"The function that each stage minimized; the notation is that of {DOCS_URL}/objectives.md.",
            columns=[*columns, Column(name="Paper", optional=True)],
            rows=[[name, info.name, info.formula, info.paper]],
        )  # fmt: skip


def _percent_change(measured: Mapping[str, Mapping[str, float]], metric: str) -> Cell:
    before, after = (measured.get(when, {}).get(metric) for when in ("before", "after"))
    if before is None or after is None:
        return EMPTY
    return Change(before=format_percent(before), after=format_percent(after))


def _change(measured: Mapping[str, float | None], digits: int) -> Cell:
    before, after = measured.get("before"), measured.get("after")
    if before is None or after is None:
        return EMPTY
    note = ""
    if before:
        per_cent = round(100 * (after / before - 1), 1) + 0.0  # avoids a minus sign before zero
        note = f"({per_cent:+.1f}{NBSP}%)".replace("-", "\N{MINUS SIGN}")
    return Change(before=f"{before:.{digits}f}", after=f"{after:.{digits}f}", note=note)


def stage_curves(name: str, curve: Sequence[Mapping[str, Any]], loss: tuple[str, str]) -> Iterator[Curve]:
    """Yield the curves of a stage: its loss, or accuracy and completion length."""
    points = partial(metric_points, curve)
    x_range = (0.0, float(max((record["step"] for record in curve), default=1)))
    if not (passed := points("accuracy")):
        if losses := points(loss[0]):
            note = f"{loss[1]}: every step, and smoothed."
            drawn = smoothed_curve(
                f"{name}: loss", note, "loss", losses, section=SECTION, x_range=x_range, height=150
            )
            if held_out := points("held_out_nll"):
                drawn = drawn.model_copy(
                    update={"lines": [*drawn.lines, _line("held-out", held_out, "second")]}
                )
            yield drawn
        return
    yield smoothed_curve(
        f"{name}: accuracy", "Completions sampled in a step, on training tasks: every step, and smoothed.", "accuracy",
        passed, section=SECTION, x_range=x_range, y_range=(0.0, 1.0), unit="share",
    )  # fmt: skip
    lengths = points("completion_length/mean")
    wrong = [point for point in points("completion_length/incorrect") if point[1]]
    if lengths:
        yield Curve(
            section=SECTION, title=f"{name}: completion length", height=190, x_range=x_range,
            note="Mean tokens of all completions of a step; the faint line is the mean of the incorrect ones.",
            lines=[*([_line("incorrect", wrong, "faint")] if wrong else []), _line("all", lengths)],
            label=f"Mean completion length against step, from {format_number(lengths[0][1])} to "
            f"{format_number(lengths[-1][1])} tokens",
        )  # fmt: skip


def metric_points(curve: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    """Return the finite values of a metric as (step, value), in the order of the steps."""
    found = [(float(step), record[metric]) for step, record in _by_step(curve) if metric in record]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _by_step(curve: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, metrics) in order; of a repeated step the last value of each metric counts. Events are left out."""
    found = dict[int, dict[str, Any]]()
    for record in curve:
        if "event" not in record:
            found.setdefault(record["step"], {}).update(record)
    return sorted(found.items())


def _line(name: str, points: Sequence[tuple[float, float]], style: Any = "main") -> Line:
    return Line(name=name, x=[x for x, _ in points], y=[y for _, y in points], style=style)


def smoothed_curve(
    title: str, note: str, quantity: str, points: Sequence[tuple[float, float]], **options: Any
) -> Curve:
    """Return a curve with every step drawn faint and a smoothed line; `options` are fields of `Curve`."""
    values = [y for _, y in points]
    smoothed = [float(value) for value in smooth(values, max(1.0, len(values) / 30))]
    lines = [
        _line("every step", points, "faint"),
        _line("smoothed", [*zip([x for x, _ in points], smoothed, strict=True)]),
    ]
    label = f"{quantity[:1].upper()}{quantity[1:]} against step, from "
    label += f"{format_number(smoothed[0])} to {format_number(smoothed[-1])}"
    return Curve(title=title, note=note, lines=lines, label=label, **options)


def _answers(
    name: str, samples: Mapping[str, Sequence[Mapping[str, Any]]], n_tasks: int | None
) -> Iterator[Answers]:
    """Yield the answers of the first tasks; the first block has the heading."""
    before, after = samples["before"], samples["after"]
    note = "The same held-out prompts, with greedy answers."
    if all(a["passed"] is not None for a in before):
        note = f"The same held-out tasks, with sampled answers. Of the first {len(before)}"
        note += (
            f"{f' of {n_tasks:,}' if n_tasks else ''}, {sum(a['passed'] for a in before)} passed before and "
        )
        note += f"{sum(a['passed'] for a in after)} after."
    for i, (one, other) in enumerate(zip(before, after, strict=True)):
        yield Answers(
            section=SECTION, title=f"Before and after {name}" if i == 0 else "", note=note if i == 0 else "",
            prompt=one["prompt"], before=_answer(one), after=_answer(other),
        )  # fmt: skip


def _answer(sample: Mapping[str, Any]) -> Answer:
    return Answer(
        text=sample["answer"], passed=sample["passed"], reward=sample["reward"], reason=sample["reason"]
    )
