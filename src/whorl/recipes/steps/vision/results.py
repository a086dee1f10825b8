"""Common parts of the steps that train image models: inputs, progress, summary, and blocks of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whorl.recipes.registry import StepContext
from whorl.recipes.stage import Metrics, StageResult, train_stage
from whorl.report import Block, Card, Cell, Column, Curve, Facts, Table
from whorl.report.blocks import Change
from whorl.report.format import format_percent

if TYPE_CHECKING:
    import torch

    from whorl.vision.image_set import ImageSet
    from whorl.vision.train import VisionTask

SECTION = "Image models"


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


def train_images(
    ctx: StepContext, title: str, task: VisionTask, evaluate: Callable[[], Metrics], loss: str = "loss"
) -> StageResult:
    """Measure, train, and measure again; write the summary's figures and the report.

    Args:
        evaluate: fractions on held-out images, by description.
        loss: metric of the curve.
    """
    from whorl.vision.train import train_vision

    result = train_stage(
        ctx, title, partial(train_vision, task), evaluate=lambda when: evaluate(), total=task.steps,
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
    ctx.report.cards.append(
        Card(label=name.capitalize(), value=format_percent(value), more=f"{before} before {ctx.name}")
    )
    return result


def headline(evaluation: Mapping[str, Metrics]) -> str:
    """Return each figure before and after: `accuracy on 359 held-out images 10.0 %, then 98.9 %`."""
    return "; ".join(
        f"{name} {evaluation['before'][name]:.1%}, then {value:.1%}"
        for name, value in evaluation["after"].items()
    )


def _blocks(
    ctx: StepContext, evaluation: Mapping[str, Metrics], loss: str, parameters: int, task: VisionTask
) -> Iterator[Block]:
    from whorl.report.stages import smoothed_curve
    from whorl.report.training import objective_lines

    facts = [
        ("model", ctx.name), ("parameters trained", f"{parameters:,}"), ("steps", f"{task.steps:,}"),
        ("images per step", f"{task.config.batch_size:,}"), ("images to train on", f"{len(task.pixels):,}"),
    ]  # fmt: skip
    yield Facts(
        section=SECTION, title=ctx.name, note=" ".join(objective_lines(task.objective_name)), rows=facts
    )
    rows: list[list[Cell]] = [
        [
            f"{ctx.name}: {name}",
            Change(before=format_percent(evaluation["before"][name]), after=format_percent(value)),
        ]
        for name, value in evaluation["after"].items()
    ]
    columns = [Column(name="Figure"), Column(name="Before, after", number=True)]
    yield Table(section=SECTION, title="Held-out images", columns=columns, rows=rows)
    records = sorted({record["step"]: record for record in ctx.run.read_metrics(ctx.name)}.items())
    yield from _curve(
        ctx.name,
        "loss",
        "Loss in nats per image or token",
        [(float(s), r[loss]) for s, r in records if loss in r],
        smoothed_curve,
    )
    correct = [(float(step), record["correct"]) for step, record in records if "correct" in record]
    note = "Training images of a step that the network assigned correctly"
    yield from _curve(
        ctx.name, "training accuracy", note, correct, smoothed_curve, y_range=(0.0, 1.0), unit="share"
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
            section=SECTION,
            height=150,
            **options,
        )
