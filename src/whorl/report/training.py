"""The training section: charts, a sentence on the onset of induction, figures.

All charts share one range of steps, so that the drop of the loss, the induction loss and the learning rate line up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whorl.report.charts import Mark, Series, line_chart
from whorl.report.data import ExpertUsage, TrainingSection
from whorl.report.format import format_duration, format_percent, format_si
from whorl.report.induction_onset import LossDrop, smooth

MAX_EVENTS = 50  # rows of the table


def training_charts(
    training: TrainingSection | None, drop: LossDrop | None
) -> Iterator[tuple[str, str, str]]:
    if training is None or not training.points:
        return
    points = training.points
    steps = [float(point.step) for point in points]
    losses = [point.loss for point in points]
    curve = [float(value) for value in smooth(losses, len(losses) / 150)]
    x_range = (0.0, steps[-1])
    mark = Mark(drop.step, f"drop, step {drop.step:,}") if drop else None
    # The first steps start at the logarithm of the vocabulary; including them would flatten the rest.
    top = max(curve[len(curve) // 40 :])
    series = [Series("every step", steps, losses, "faint"), Series("smoothed", steps, curve)]
    label = f"Training loss against step, from {losses[0]:.2f} to {curve[-1]:.2f} nats per token"
    low = min(min(curve), *sorted(losses)[len(losses) // 100 :][:1])
    yield (
        "Training loss",
        "Nats per token: every step, and smoothed.",
        line_chart(series, label=label, x_range=x_range, y_range=(low, max(top, low)), mark=mark),
    )
    if training.held_out:
        bits = [point.bits_per_byte for point in training.held_out]
        at = [float(point.step) for point in training.held_out]
        yield (
            "Held-out bits per byte",
            "Measured during training on a part of the validation split.",
            line_chart(
                [Series("bits per byte", at, bits, "main", dots=len(bits) <= 60)],
                label=f"Held-out bits per byte against step, ending at {bits[-1]:.3f}",
                height=190,
                x_range=x_range,
                mark=mark,
            ),
        )
    if training.induction:
        yield (
            "Induction",
            "Nats per token on the second half of rows that repeat shuffled tokens. Only induction heads can lower it.",
            line_chart(
                [
                    Series(
                        "second half",
                        [float(point.step) for point in training.induction],
                        [point.nll for point in training.induction],
                        "main",
                        dots=len(training.induction) <= 60,
                    )
                ],
                label=f"Induction loss against step, ending at {training.induction[-1].nll:.2f} nats per token",
                height=150,
                x_range=x_range,
                mark=mark,
            ),
        )
    if training.experts:
        yield _expert_chart(training.experts, x_range)
    rates = [(float(p.step), p.learning_rate) for p in points if p.learning_rate is not None]
    if rates:
        yield (
            "Learning rate",
            "Learning rate of the weight matrices at each step.",
            line_chart(
                [Series("learning rate", [x for x, _ in rates], [y for _, y in rates])],
                label="Learning rate against step",
                height=150,
                x_range=x_range,
                y_range=(0.0, max(y for _, y in rates)),
            ),
        )


def _expert_chart(layers: list[ExpertUsage], x_range: tuple[float, float]) -> tuple[str, str, str]:
    """Return the chart of load imbalance: every layer, and the mean over layers."""
    steps = sorted({point.step for layer in layers for point in layer.gini_points})
    of_step: dict[int, list[float]] = {step: [] for step in steps}
    for layer in layers:
        for point in layer.gini_points:
            of_step[point.step].append(point.gini)
    means = [sum(of_step[step]) / len(of_step[step]) for step in steps]
    series = [
        Series(
            f"layer {layer.layer}",
            [float(p.step) for p in layer.gini_points],
            [p.gini for p in layer.gini_points],
            "faint",
        )
        for layer in layers
    ]
    shares = [share for layer in layers for share in layer.load_fractions]
    dropped = max(layer.dropped_fraction for layer in layers)
    return (
        "Experts",
        "Gini coefficient of the expert loads, every layer and their mean: 0 for equal loads. At the end the "
        f"least used expert of a layer had {format_percent(min(shares))} of its tokens, the most used "
        f"{format_percent(max(shares))}; equal loads would be {format_percent(1 / len(layers[0].load_fractions))}. "
        f"Dropped assignments: at most {format_percent(dropped)}.",
        line_chart(
            [*series, Series("mean", [float(step) for step in steps], means)],
            label=f"Gini coefficient of the expert loads against step, ending at {means[-1]:.3f}",
            height=170,
            x_range=x_range,
            y_range=(0.0, max(0.1, *means)),
        ),
    )


def describe_loss_drop(drop: LossDrop) -> str:
    after = f" ({format_duration(drop.seconds)} into training)" if drop.seconds is not None else ""
    if drop.from_copy_loss:
        return (
            f"around step {drop.step:,}{after} attention learned to copy the token that followed an earlier "
            f"occurrence: on repeated shuffled tokens the loss went from {drop.before:.2f} to "
            f"{drop.after:.2f} nats per token."
        )
    return (
        f"around step {drop.step:,}{after} the loss went from {drop.before:.2f} to {drop.after:.2f} nats a "
        "token in the steepest stretch of the run. In small language models such a drop occurs when attention "
        "learns to copy the token that followed an earlier occurrence of the current one."
    )


def event_rows(training: TrainingSection | None) -> list[dict[str, Any]]:
    """Return the first events as rows of a table."""
    shown = training.events[:MAX_EVENTS] if training is not None else []
    return [{**e.model_dump(), "more": e.n_documents - len(e.documents)} for e in shown]


def training_facts(training: TrainingSection | None) -> list[tuple[str, str]]:
    if training is None or training.peak_memory_bytes is None:
        return []
    return [("peak memory", format_si(training.peak_memory_bytes, "B"))]
