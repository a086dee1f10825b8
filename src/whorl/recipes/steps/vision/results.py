"""Common parts of the steps that train image models and text classifiers: inputs, summary, blocks of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whorl.recipes.registry import StepContext
from whorl.recipes.stage import Metrics, StageResult, train_stage
from whorl.report import Block, Cell, Column, Curve, Facts, Table
from whorl.report.blocks import Change
from whorl.report.format import format_percent
from whorl.report.stages import percent_card

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from whorl.train.rows import RowTask
    from whorl.vision.image_set import ImageSet

SECTION = "Image models"
SECTIONS = {"images": SECTION, "texts": "Text models"}  # of the report, by `RowTask.unit`


def open_images(ctx: StepContext, what: str, threads: int | None) -> ImageSet:
    """Return the parent `images`, which has labels or captions as `what` demands; set torch's threads."""
    import torch

    from whorl.vision.image_set import ImageSet

    found = ImageSet(ctx.parent_folder("images"))
    found.need(what, ctx.name)
    ctx.machine.apply()
    if threads is not None:
        torch.set_num_threads(threads)
    return found


def weights_generator(seed: int) -> torch.Generator:
    """Return the generator of the initial weights."""
    from whorl.tracking.seeds import generator

    return generator(seed, "weights")


def train_rows_stage(
    ctx: StepContext, title: str, task: RowTask, evaluate: Callable[[], Metrics], loss: str = "loss"
) -> StageResult:
    """Measure, train, and measure again; write the summary's figures and the report.

    Args:
        evaluate: fractions of held-out rows, by description.
        loss: metric of the curve.
    """
    from whorl.train.rows import train_rows

    result = train_stage(
        ctx, title, partial(train_rows, task), evaluate=lambda when: evaluate(), total=task.steps,
        note=lambda m: f"loss {m.get('nll', m['loss']):.3f}" + (f", correct {m['correct']:.0%}" if "correct" in m else ""),
    )  # fmt: skip
    parameters = sum(p.numel() for p in task.networks.parameters() if p.requires_grad)
    ctx.summary.update(
        eval=result.evaluation, final=result.final, steps=task.steps, seconds=result.seconds,
        params={"trained": parameters, "total": sum(p.numel() for p in task.networks.parameters())},
        headline=headline(result.evaluation),
    )  # fmt: skip
    ctx.report.blocks += [*_blocks(ctx, result.evaluation, loss, parameters, task)]
    name, value = next(iter(result.evaluation["after"].items()))
    before = format_percent(result.evaluation["before"][name])
    ctx.report.cards.append(percent_card(name.capitalize(), value, f"{before} before {ctx.name}"))
    return result


def headline(evaluation: Mapping[str, Metrics]) -> str:
    """Return each figure before and after: `accuracy on 359 held-out images 10.0 %, then 98.9 %`."""
    return "; ".join(
        f"{name} {evaluation['before'][name]:.1%}, then {value:.1%}"
        for name, value in evaluation["after"].items()
    )


def class_table(name: str, classes: Sequence[str], matrix: NDArray[np.int64], unit: str) -> Table:
    """Return the held-out rows, the correct ones and the most frequent mistake of each class. matrix: `confusion_matrix`."""
    rows: list[list[Cell]] = []
    for number, label in enumerate(classes):
        n, right = int(matrix[number].sum()), int(matrix[number, number])
        wrong = matrix[number].copy()
        wrong[number] = 0
        mistaken = f"{classes[int(wrong.argmax())]} ({wrong.max()})" if wrong.max() else ""
        rows.append([label, f"{n:,}", format_percent(right / n) if n else "", mistaken])
    columns = [
        Column(name="Class"), Column(name=f"Held-out {unit}", number=True), Column(name="Correct", number=True),
        Column(name="Most frequent mistake", optional=True),
    ]  # fmt: skip
    return Table(section=SECTIONS[unit], title=f"{name}: classes", columns=columns, rows=rows)


def _blocks(
    ctx: StepContext, evaluation: Mapping[str, Metrics], loss: str, parameters: int, task: RowTask
) -> Iterator[Block]:
    from whorl.report.stages import smoothed_curve
    from whorl.report.training import objective_lines

    section = SECTIONS[task.unit]
    facts = [
        ("model", ctx.name), ("parameters trained", f"{parameters:,}"), ("steps", f"{task.steps:,}"),
        (f"{task.unit} per step", f"{task.config.batch_size:,}"), (f"{task.unit} to train on", f"{task.n_rows:,}"),
    ]  # fmt: skip
    yield Facts(
        section=section, title=ctx.name, note=" ".join(objective_lines(task.objective_name)), rows=facts
    )
    rows: list[list[Cell]] = [
        [
            f"{ctx.name}: {name}",
            Change(before=format_percent(evaluation["before"][name]), after=format_percent(value)),
        ]
        for name, value in evaluation["after"].items()
    ]
    columns = [Column(name="Figure"), Column(name="Before, after", number=True)]
    yield Table(section=section, title=f"Held-out {task.unit}", columns=columns, rows=rows)
    records = sorted({record["step"]: record for record in ctx.run.read_metrics(ctx.name)}.items())
    yield from _curve(
        ctx.name,
        "loss",
        "Loss in nats per row or token",
        [(float(s), r[loss]) for s, r in records if loss in r],
        smoothed_curve,
        section=section,
    )
    correct = [(float(step), record["correct"]) for step, record in records if "correct" in record]
    note = f"Training {task.unit} of a step that the network assigned correctly"
    yield from _curve(
        ctx.name,
        "training accuracy",
        note,
        correct,
        smoothed_curve,
        section=section,
        y_range=(0.0, 1.0),
        unit="share",
    )


def _curve(
    name: str,
    what: str,
    note: str,
    points: Sequence[tuple[float, float]],
    draw: Callable[..., Curve],
    **options: Any,
) -> Iterator[Curve]:
    if points:
        yield draw(
            f"{name}: {what}",
            f"{note}: every step, and smoothed.",
            what,
            points,
            height=150,
            **options,
        )
