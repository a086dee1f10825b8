"""The chart of `whorl eval-scaling`: accuracy against sampled tokens per answer, all curves of one model.

Longer thinking and more samples share one x axis: the tokens sampled for one answer, on a log2 scale. Dashed lines are 95 %
intervals; a table below lists every value.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from whorl.evals.test_time.scaling import CURVES, ScalingPoint, ScalingResult
from whorl.report.charts import Series, line_chart

COLORS = ("#0f6a73", "#b4471b", "#6a4fa3", "#2e7d32", "#8a6d00", "#1565c0", "#ad1457")


def scaling_page(scaling: ScalingResult, title: str, about: Sequence[str]) -> str:
    """Return one self-contained HTML page.

    Args:
        title: name of the model.
        about: sentences on the measurement.
    """
    names = list(scaling.curves)
    style = (files("whorl.report") / "style.css").read_text("utf-8")
    script = (files("whorl.report") / "page.js").read_text("utf-8")
    for k, colour in enumerate(COLORS):
        style += f".line.c{k} {{ stroke: {colour}; }} .key.c{k} {{ background: {colour}; }}\n"
        style += (
            f".line.b{k} {{ stroke: {colour}; stroke-width: 1; stroke-dasharray: 2 3; opacity: 0.45; }}\n"
        )
    style += ".key { display: inline-block; width: 18px; height: 3px; margin: 0 6px 4px 0; vertical-align: middle; }\n"
    style += "#tip { max-width: none; }\n.keys span { margin-right: 18px; white-space: nowrap; }"
    keys = "".join(
        f'<span><i class="key c{k % len(COLORS)}"></i>{escape(CURVES.get(name, name))}</span>'
        for k, name in enumerate(names)
    )
    rows = "".join(_row(name, point) for name in names for point in scaling.curves[name])
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in about)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Test-time scaling of {escape(title)}</title><style>{style}</style></head><body>
<header><h1>Test-time scaling of {escape(title)}</h1></header><main>{paragraphs}
{scaling_chart(scaling)}
<p class="note keys">{keys}</p>
<p class="note">x: tokens sampled per answer, log2 (8 is 256 tokens). y: accuracy.
Dashed: 95 % intervals over tasks.</p>
<div class="scroll"><table><thead><tr><th>curve</th><th class="n">budget or n</th><th class="n">tokens per answer</th>
<th class="n">accuracy</th><th class="n">95 % interval</th></tr></thead><tbody>{rows}</tbody></table></div>
</main><div id="tip"></div><script>{script}</script></body></html>
"""


def scaling_chart(scaling: ScalingResult) -> str:
    """Return the chart as SVG in both widths."""
    series = []
    for k, points in enumerate(scaling.curves.values()):
        ordered = sorted(points, key=lambda p: p.tokens)
        x = [math.log2(max(1.0, p.tokens)) for p in ordered]
        for bound in ("low", "high"):
            series.append(
                Series("", x, [getattr(p, bound) for p in ordered], f"b{k % len(COLORS)}", has_tooltip=False)
            )
    for k, (name, points) in enumerate(scaling.curves.items()):
        ordered = sorted(points, key=lambda p: p.tokens)
        x = [math.log2(max(1.0, p.tokens)) for p in ordered]
        series.append(
            Series(CURVES.get(name, name), x, [p.accuracy for p in ordered], f"c{k % len(COLORS)}", dots=True)
        )
    return line_chart(
        series, label="Accuracy against tokens sampled per answer, one curve per method",
        x_label="log2 of tokens per answer", height=380, y_range=(0.0, 1.0), y_format=lambda y: f"{y:.1%}",
    )  # fmt: skip


def write_atomically(text: str, out: Path) -> None:
    """Write a page to a temporary file and rename it, so that a browser never reads a partial page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _row(name: str, point: ScalingPoint) -> str:
    return (
        f'<tr><td>{escape(CURVES.get(name, name))}</td><td class="n">{point.compute:,}</td>'
        f'<td class="n">{point.tokens:,.0f}</td>'
        f'<td class="n">{point.accuracy:.1%}</td><td class="n">{point.low:.1%} to {point.high:.1%}</td></tr>'
    )
