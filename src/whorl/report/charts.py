"""Line charts as SVG strings.

A plotting library would add 4.5 MB of script to a page of about 100 kB. SVG needs no script, takes its colours from the
page's style sheet, prints well and stays sharp at any size. Only the tooltip needs the points; they are stored as JSON in
a data attribute.

Each chart is drawn twice, wide and narrow, so that labels keep their size on a phone. The style sheet shows the one that
fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from whorl.report.format import format_number

_WIDE, _NARROW = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 34
_MAX_POINTS = 420  # points of a curve at most; more would exceed the pixels


@dataclass(frozen=True)
class Series:
    """One curve.

    style: class of the style sheet, a `LineStyle`. joined: whether a line goes through the points.
    low, high: ends of an interval around each y, drawn as a band; empty for none.
    has_tooltip: whether the pointer shows its values.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "main"
    dots: bool = False
    joined: bool = True
    has_tooltip: bool = True
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def tooltips(self, y_format: Callable[[float], str]) -> list[str]:
        """Return the text of each value, with its interval."""
        texts = [*map(y_format, self.y)]
        if not self.low:
            return texts
        ends = zip(texts, self.low, self.high, strict=True)
        return [f"{text} ({y_format(low)} to {y_format(high)})" for text, low, high in ends]


@dataclass(frozen=True)
class Mark:
    """A vertical line with a label."""

    x: float
    label: str


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str = "step",
    height: int = 260,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    y_format: Callable[[float], str] = format_number,
    mark: Mark | None = None,
) -> str:
    """Return the markup of one chart in both widths.

    Args:
        series: non-empty curves over a common x axis.
        label: text alternative of the picture, one sentence.
        height: pixels.
        x_range, y_range: lowest and highest value; curves are clipped to them. By default all values fit.
        y_format: format of a y value in the tooltip.
        mark: at most one event.
    """
    series = [_downsample(s) for s in series]
    x_low, x_high = x_range or (min(min(s.x) for s in series), max(max(s.x) for s in series))
    values = [value for s in series for value in (*s.y, *s.low, *s.high)]
    low, high = y_range or (min(values), max(values))
    if x_high <= x_low:
        x_high = x_low + 1
    if high <= low:
        low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
    spare = 0.04 * (high - low)
    low, high = (low if low == 0 else low - spare), high + spare
    data = {
        "x": x_label,
        "digits": _decimals(ticks(x_low, x_high, 6)),
        "left": _LEFT,
        "right": _RIGHT,
        "domain": [x_low, x_high],
        "series": [
            {
                "name": s.name,
                "style": s.style,
                "x": [round(x, 3) for x in s.x],
                "y": s.tooltips(y_format),
            }
            for s in series
            if s.has_tooltip
        ],
    }
    pictures = "".join(
        _draw(series, (x_low, x_high), (low, high), width, height, x_label, mark, label)
        for width in (_WIDE, _NARROW)
    )
    key = _key(series) if any(s.style not in ("main", "faint") for s in series) else ""
    return f'<div class="chart" data-chart="{escape(json.dumps(data), quote=True)}">{pictures}{key}</div>'


def _key(series: Sequence[Series]) -> str:
    """Return the legend: a piece of each line with its name."""
    items = "".join(
        f'<li><svg viewBox="0 0 30 8" aria-hidden="true"><path class="line {s.style}" d="M0 4H30"/></svg>'
        f"{escape(s.name)}</li>"
        for s in series
    )
    return f'<ul class="key">{items}</ul>'


def _draw(
    series: Sequence[Series],
    xs: tuple[float, float],
    ys: tuple[float, float],
    width: int,
    height: int,
    x_label: str,
    mark: Mark | None,
    label: str,
) -> str:
    right, bottom = width - _RIGHT, height - _BOTTOM

    def px(x: float) -> float:
        return _LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (right - _LEFT)

    def py(y: float) -> float:
        return bottom - (y - ys[0]) / (ys[1] - ys[0]) * (bottom - _TOP)

    size = "wide" if width == _WIDE else "narrow"
    parts = [
        f'<svg class="{size}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">'
    ]
    y_ticks, x_ticks = ticks(*ys, 5 if height > 200 else 3), ticks(*xs, 6 if width == _WIDE else 3)
    decimals, x_decimals = _decimals(y_ticks), _decimals(x_ticks)
    for tick in y_ticks:
        y = py(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        at = f'x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="tick" {at}>{tick:,.{decimals}f}</text>')
    for tick in x_ticks:
        anchor = "end" if px(tick) > right - 14 else "middle"
        at = f'x="{px(tick):.1f}" y="{bottom + 18}" text-anchor="{anchor}"'
        parts.append(f'<text class="tick" {at}>{tick:,.{x_decimals}f}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    at = f'x="{right}" y="{height - 3}" text-anchor="end"'
    parts.append(f'<text class="axis-name" {at}>{escape(x_label)}</text>')
    if mark is not None:
        x = px(mark.x)
        anchor, shift = ("end", -7) if x > (_LEFT + right) / 2 else ("start", 7)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="mark-label" x="{x + shift:.1f}" y="{_TOP + 12}" text-anchor="{anchor}">'
            f"{escape(mark.label)}</text>"
        )
    # A nested <svg> clips the curves; a clip path would need an id that is unique on the page.
    inner = f'x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}"'
    parts.append(f'<svg {inner} viewBox="{_LEFT} {_TOP} {right - _LEFT} {bottom - _TOP}" overflow="hidden">')
    dots = []
    for s in series:
        points = _points(s.x, s.y, px, py)
        if s.low:
            outline = [*_points(s.x, s.high, px, py), *reversed(_points(s.x, s.low, px, py))]
            parts.append(f'<polygon class="band {s.style}" points="{" ".join(outline)}"/>')
        if s.joined:
            parts.append(f'<polyline class="line {s.style}" points="{" ".join(points)}"/>')
        if s.dots:
            dots += [
                f'<circle class="dot {s.style}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6"/>'
                for x, y in zip(s.x, s.y, strict=True)
            ]
    parts += ["</svg>", *dots]
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{bottom}"/></svg>')
    return "".join(parts)


def _points(
    xs: Sequence[float], ys: Sequence[float], px: Callable[[float], float], py: Callable[[float], float]
) -> list[str]:
    return [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(xs, ys, strict=True)]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round values between low and high, about `about` many: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda candidate: abs(candidate - raw))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _decimals(values: Sequence[float]) -> int:
    """Return the decimals that all values need to be written exactly."""
    return max([len(f"{value:.10g}".partition(".")[2]) for value in values], default=0)


def _downsample(series: Series) -> Series:
    """Average neighbouring points until at most `_MAX_POINTS` are left."""
    n = len(series.x)
    if n <= _MAX_POINTS:
        return series
    groups = np.array_split(np.arange(n), _MAX_POINTS)
    x = np.asarray(series.x, float)
    # The last x is kept, so that the curve ends where the run ended.
    xs = [float(x[g].mean()) for g in groups[:-1]] + [float(x[-1])]
    means = [
        [float(np.mean(np.asarray(values, float)[g])) for g in groups] if len(values) else []
        for values in (series.y, series.low, series.high)
    ]
    return replace(series, x=xs, y=means[0], low=means[1], high=means[2])
