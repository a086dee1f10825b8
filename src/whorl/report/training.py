"""The training chapter: its charts, the fall in words, its figures.

All charts share one range of steps, so that they can be read one under the other: the fall of the loss, the copying
that made it, and the learning rate at that moment stand above each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whorl.report.charts import Mark, Series, line_chart
from whorl.report.data import ExpertUsage, TrainingSection
from whorl.report.format import format_duration, format_si
from whorl.report.format import format_percent as percent
from whorl.report.induction_onset import LossDrop, smooth

MAX_EVENTS = 50  # are shown


def training_charts(
    training: TrainingSection | None, fall: LossDrop | None
) -> Iterator[tuple[str, str, str]]:
    if training is None or not training.points:
        return
    points = training.points
    steps = [float(point.step) for point in points]
    losses = [point.loss for point in points]
    curve = [float(value) for value in smooth(losses, len(losses) / 150)]
    whole = (0.0, steps[-1])
    mark = Mark(fall.step, f"the fall, step {fall.step:,}") if fall else None
    # The first moments (from the logarithm of the vocabulary down) would press the rest flat.
    top = max(curve[len(curve) // 40 :])
    series = [Series("each step", steps, losses, "faint"), Series("smoothed", steps, curve)]
    label = f"Training loss against step, from {losses[0]:.2f} to {curve[-1]:.2f} nats a token"
    low = min(min(curve), *sorted(losses)[len(losses) // 100 :][:1])
    yield (
        "Training loss",
        "Nats a token: each step, and smoothed.",
        line_chart(series, label=label, x_range=whole, y_range=(low, max(top, low)), mark=mark),
    )
    if training.held_out:
        bits = [point.bits_per_byte for point in training.held_out]
        at = [float(point.step) for point in training.held_out]
        yield (
            "Held-out bits per byte",
            "Measured on a part of the validation split on the way.",
            line_chart(
                [Series("bits per byte", at, bits, "main", dots=len(bits) <= 60)],
                label=f"Held-out bits per byte against step, ending at {bits[-1]:.3f}",
                height=190,
                x_range=whole,
                mark=mark,
            ),
        )
    if training.induction:
        yield (
            "Copying",
            "Nats a token on the second half of rows that repeat shuffled tokens: nothing but heads that look up "
            "what followed before can lower it.",
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
                label=f"Loss on copies against step, ending at {training.induction[-1].nll:.2f} nats a token",
                height=150,
                x_range=whole,
                mark=mark,
            ),
        )
    if training.experts:
        yield _expert_chart(training.experts, whole)
    rates = [(float(p.step), p.learning_rate) for p in points if p.learning_rate is not None]
    if rates:
        yield (
            "Learning rate",
            "Of matrices, as it was at each step: a warm-up, then what the schedule says.",
            line_chart(
                [Series("learning rate", [x for x, _ in rates], [y for _, y in rates])],
                label="Learning rate against step",
                height=150,
                x_range=whole,
                y_range=(0.0, max(y for _, y in rates)),
            ),
        )


def _expert_chart(layers: list[ExpertUsage], whole: tuple[float, float]) -> tuple[str, str, str]:
    """How evenly the experts were used: every layer, and the mean over layers."""
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
    lost = max(layer.dropped_fraction for layer in layers)
    return (
        "Experts",
        "Gini coefficient of the experts' loads, each layer and their mean: 0 when all are used alike. At the end the "
        f"least used expert of a layer had {percent(min(shares))} of its tokens, the most used {percent(max(shares))}; "
        f"even would be {percent(1 / len(layers[0].load_fractions))}. Assignments that found no place: at most {percent(lost)}.",
        line_chart(
            [*series, Series("mean", [float(step) for step in steps], means)],
            label=f"Unevenness of the experts' loads against step, ending at a Gini coefficient of {means[-1]:.3f}",
            height=170,
            x_range=whole,
            y_range=(0.0, max(0.1, *means)),
        ),
    )


def describe_loss_drop(fall: LossDrop) -> str:
    after = f" ({format_duration(fall.seconds)} into training)" if fall.seconds is not None else ""
    if fall.from_copy_loss:
        return (
            f"around step {fall.step:,}{after} attention heads learnt to copy what followed an earlier occurrence "
            f"of the same token: on repeated shuffled tokens the loss went from {fall.before:.2f} to "
            f"{fall.after:.2f} nats a token."
        )
    return (
        f"around step {fall.step:,}{after} the loss went from {fall.before:.2f} to {fall.after:.2f} nats a "
        "token in the steepest stretch of the run. In small language models such a fall is the moment when "
        "attention heads learn to copy what followed an earlier occurrence of the same token."
    )


def event_rows(training: TrainingSection | None) -> list[dict[str, Any]]:
    """The first events as rows of a table."""
    shown = training.events[:MAX_EVENTS] if training is not None else []
    return [{**e.model_dump(), "more": e.n_documents - len(e.documents)} for e in shown]


def training_facts(training: TrainingSection | None) -> list[tuple[str, str]]:
    if training is None or training.peak_memory_bytes is None:
        return []
    return [("peak memory", format_si(training.peak_memory_bytes, "B"))]
