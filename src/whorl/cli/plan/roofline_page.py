"""The page of a roofline: what bounds each operator of a model's steps on a device, and measured products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

from whorl.plan.accounting.devices import Device
from whorl.report.blocks import Column, Curve, Line, LineStyle, StepReport, Table
from whorl.report.data import ReportData
from whorl.report.render import render

STYLES: tuple[LineStyle, ...] = ("main", "second", "third", "fourth", "fifth")
NOTE = (
    "Logarithms of base 10 of FLOP/s against FLOPs per byte. The slope is the bandwidth of the memory, the flat part the "
    "peak. Operators lie on the roof, which no program exceeds. Measured products lie below it by what they lose."
)


def write_roofline(
    title: str, device: Device, dtype: str, steps: Mapping[str, Sequence[Mapping[str, Any]]],
    measured: Sequence[tuple[float, float]], out: Path,
) -> None:  # fmt: skip
    """Write the page. steps: of `Operator.on`, by step. measured: (FLOPs per byte, FLOP/s) of products on the device."""
    peak, ridge = device.peak(dtype), device.peak(dtype) / device.bandwidth
    found = {step: [one["intensity"] for one in each if one["flops"]] for step, each in steps.items()}
    ends = [ridge, *(x for each in found.values() for x in each), *(x for x, _ in measured)]
    found = {"roof": [min(ends) / 2, ridge, 2 * max(ends)], **found}
    points = {n: [(x, min(peak, x * device.bandwidth)) for x in sorted(each)] for n, each in found.items()}
    lines = []
    for (name, pairs), style in zip({**points, "measured": measured}.items(), STYLES, strict=True):
        if pairs:
            x, y = ([log10(value) for value in axis] for axis in zip(*pairs, strict=True))
            lines.append(Line(name=name, x=x, y=y, style=style, dots=name != "roof", joined=name == "roof"))
    about = f"{device.title}, {dtype}"
    blocks: list[Any] = [Curve(title=about, lines=lines, x_label="log10 FLOPs per byte", note=NOTE)]
    for step, each in steps.items():
        columns = [Column(name=name, number=name not in ("name", "part", "bound")) for name in each[0]]
        rows: list[Any] = [[v if isinstance(v, str) else f"{v:.3g}" for v in one.values()] for one in each]
        blocks.append(Table(title=step, columns=columns, rows=rows))
    render(ReportData(title=title, reports=[("roofline", StepReport(blocks=blocks))]), out)
