"""Figures of an evaluation: reliability diagrams, and quality against cost with the Pareto hull."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from whorl.evals.results import ItemResult, TaskMeasure
from whorl.report.charts import Series, line_chart, ticks
from whorl.report.evaluation.folders import EvaluatedModel
from whorl.report.format import format_duration, format_number, format_si

Point = tuple[float, float]  # cost (lower is better), quality (higher is better)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 300, 56, 20, 18, 40
_COLORS = 7  # classes c0 to c6 of the style sheet
_STYLES = ("main", "second", "faint")

COSTS = {  # entry of a cost -> (title, name of the axis, sign that makes lower better)
    "seconds": ("Quality by time", "seconds of the evaluation", 1),
    "tokens_per_second": ("Quality by speed", "tokens per second", -1),
    "memory_bytes": ("Quality by memory", "peak memory, MB", 1),
    "joules": ("Quality by energy", "energy, J", 1),
}


def reliability_bins(items: Sequence[ItemResult], bins: int = 10) -> list[tuple[float, float, int]]:
    """Return (mean confidence, share right, items) of each bin with items, by rising confidence.

    Bins have equal width in the confidence, which is `details["confidence"]`. Items without one are left out, as are
    those without a verdict.
    """
    found: dict[int, list[tuple[float, bool]]] = {}
    for item in items:
        confidence = item.details.get("confidence")
        if (
            isinstance(confidence, int | float)
            and 0 <= confidence <= 1
            and item.outcome in ("right", "wrong")
        ):
            place = min(int(confidence * bins), bins - 1)
            found.setdefault(place, []).append((confidence, item.outcome == "right"))
    return [
        (sum(c for c, _ in pairs) / len(pairs), sum(right for _, right in pairs) / len(pairs), len(pairs))
        for _, pairs in sorted(found.items())
    ]


def reliability_chart(task: str, models: Mapping[str, Sequence[ItemResult]]) -> str:
    """Return the reliability diagram of a task: share of right answers over confidence; "" if no item has one.

    models: label -> items.
    """
    series = []
    for number, (label, items) in enumerate(models.items()):
        if bins := reliability_bins(items):
            x, y = [b[0] for b in bins], [b[1] for b in bins]
            series.append(Series(label, x, y, _STYLES[min(number, len(_STYLES) - 1)], dots=True))
    if not series:
        return ""
    diagonal = Series("calibrated", [0.0, 1.0], [0.0, 1.0], "faint", has_tooltip=False)
    return line_chart(
        [diagonal, *series], label=f"Reliability diagram of {task}: share of right answers over confidence",
        x_label="confidence", height=240, x_range=(0.0, 1.0), y_range=(0.0, 1.0),
    )  # fmt: skip


def pareto_hull(points: Mapping[str, Point]) -> list[str]:
    """Return the names of the points on the Pareto hull, by rising cost.

    A point is on the hull if no mixture of two others is as cheap and as good. A mixture sends each request to one of two
    models at random. So a point of the Pareto front below the line of two others is left out. Of equal points the first
    is kept.
    """
    hull: list[tuple[str, Point]] = []
    for name, (cost, quality) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if hull and quality <= hull[-1][1][1]:
            continue  # dominated: not cheaper and not better
        while len(hull) > 1 and _is_below(hull[-2][1], hull[-1][1], (cost, quality)):
            hull.pop()
        hull.append((name, (cost, quality)))
    return [name for name, _ in hull]


def _is_below(left: Point, middle: Point, right: Point) -> bool:
    """Return whether `middle` is on or below the line from `left` to `right`; the costs ascend."""
    rise = (middle[1] - left[1]) * (right[0] - left[0])
    return rise <= (right[1] - left[1]) * (middle[0] - left[0])


def cost_charts(task: str, models: Sequence[EvaluatedModel]) -> Iterator[tuple[str, str, str]]:
    """Yield (title, note, markup) of the quality of at least two models over each cost that was measured."""
    quality: dict[str, float] = {}
    name, better = "", 1
    for model in models:
        first = model.tasks[task].first if task in model.tasks else None
        if first is not None and not math.isnan(first.value) and first.higher_is_better is not None:
            name, quality[model.label] = first.metric, first.value
            better = 1 if first.higher_is_better else -1
    for field, (title, axis, sign) in COSTS.items():
        points: dict[str, Point] = {}
        for model in models:
            cost = model.cost.get(field)
            if cost is not None and model.label in quality:
                points[model.label] = (sign * cost, better * quality[model.label])
        if len(points) < 2:
            continue
        hull = pareto_hull(points)
        note = f"On the Pareto hull: {', '.join(hull)}."
        if others := [label for label in points if label not in hull]:
            note += (
                f" At the same {name}, {', '.join(others)} costs more than one of these or a mixture of two."
            )
        yield title, note, _scatter(points, hull, (sign, better), axis, f"{task}, {name}")


def scaling_charts(task: str, models: Sequence[EvaluatedModel]) -> Iterator[tuple[str, str, str]]:
    """Yield (title, note, markup) of the accuracy over sampled tokens, of each model with curves (`kinds/scaling.py`).

    Longer thinking and more samples share one axis: the tokens sampled for one answer.
    """
    for model in models:
        found = {m.metric: m for m in model.tasks[task].measures} if task in model.tasks else {}
        each = found["tokens"].value if "tokens" in found else math.nan
        curves: dict[str, list[tuple[float, TaskMeasure]]] = {}
        for name, measure in found.items():
            curve, _, k = name.partition("@")
            own = found.get(f"{name} tokens")
            if not k.isdigit():
                continue
            tokens = each * int(k) if own is None else own.value
            if not math.isnan(tokens) and not math.isnan(measure.value):
                curves.setdefault(curve, []).append((math.log2(max(1.0, tokens)), measure))
        if not curves:
            continue
        series, keys = [], ""
        for number, (curve, points) in enumerate(curves.items()):
            points.sort(key=lambda point: point[0])
            x, color = [point[0] for point in points], number % _COLORS
            for bound in ("low", "high"):
                y = [m.value if math.isnan(end := getattr(m, bound)) else end for _, m in points]
                series.append(Series("", x, y, f"b{color}", has_tooltip=False))
            series.append(Series(curve, x, [m.value for _, m in points], f"c{color}", dots=True))
            keys += f'<span class="key c{color}">{escape(curve)}</span> '
        chart = line_chart(
            series, label=f"Accuracy of {task} against tokens sampled per answer, one curve per method",
            x_label="log2 of tokens per answer", height=380, y_range=(0.0, 1.0), y_format=lambda y: f"{y:.1%}",
        )  # fmt: skip
        note = f"{model.label}. x: tokens sampled per answer, log2 (8 is 256 tokens). Dashed: 95 % intervals over items."
        yield "Accuracy over sampled tokens", note, f"{chart}<p>{keys}</p>"


def format_cost(field: str, value: float | None) -> str:
    """Return a cost as displayed."""
    if value is None:
        return "–"
    if field == "seconds":
        return format_duration(value)
    return {"memory_bytes": format_si(value, "B"), "joules": format_si(value, "J")}.get(
        field, format_number(value)
    )


def _scatter(
    points: Mapping[str, Point], hull: Sequence[str], signs: tuple[int, int], x_label: str, y_label: str
) -> str:
    """Return a scatter plot with the names of the points and the line of the hull."""
    scale = 1e-6 if "MB" in x_label else 1.0
    shown = {name: (signs[0] * cost * scale, signs[1] * quality) for name, (cost, quality) in points.items()}
    xs, ys = [p[0] for p in shown.values()], [p[1] for p in shown.values()]
    x_low, x_high = _range(xs)
    y_low, y_high = _range(ys)

    def at(point: Point) -> tuple[float, float]:
        x = _LEFT + (point[0] - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - (point[1] - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<svg class="scatter" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
             f'aria-label="{escape(f"{y_label} over {x_label}; hull: {chr(44).join(hull)}", quote=True)}">']  # fmt: skip
    for tick in ticks(y_low, y_high, 5):
        y = at((x_low, tick))[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
        )
    for tick in ticks(x_low, x_high, 6):
        x = at((tick, y_low))[0]
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,.6g}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for text, x, y, anchor in ((x_label, right, _HEIGHT - 4, "end"), (y_label, _LEFT, 11, "start")):
        parts.append(f'<text class="axis-name" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(shown[name]) for name in hull))
    parts.append(f'<polyline class="line main" points="{line}"/>')
    for name, point in shown.items():
        (x, y), kind = at(point), "dot" if name in hull else "dot off"
        anchor, shift = ("end", -8) if x > _WIDTH / 2 else ("start", 8)
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        place = f'x="{x + shift:.1f}" y="{y - 7:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text class="point-name" {place}>{escape(name[:40])}</text>')
    return "".join([*parts, "</svg>"])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds with room at both ends."""
    low, high = min(values), max(values)
    room = 0.12 * (high - low) or abs(high) / 10 or 1.0
    return low - room, high + room
