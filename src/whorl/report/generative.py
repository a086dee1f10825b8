"""The pages of generative models: samples and data, measures with their floor, and a comparison of models."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from torch import Tensor

from whorl.data.images import Pixels
from whorl.generative.data import DataInfo
from whorl.generative.measures import SampleMeasure
from whorl.generative.pictures import draw_rows, encode_png
from whorl.generative.saved_model import SavedMeasures
from whorl.report.blocks import Block, Card, Cell, Column, Facts, Image, StepReport, Table
from whorl.report.data import ReportData

FLOOR = "Real: training rows against the same held-out rows, in groups of the same size."


def model_report(title: str, saved: SavedMeasures, drawn: Tensor, real: Tensor, info: DataInfo) -> StepReport:
    """Return the blocks of one model. drawn, real: rows [N, *shape] that are shown."""
    facts = [
        ("parameters", f"{saved.parameters:,}"),
        ("steps", f"{saved.steps:,}"),
        ("seconds of training", f"{saved.seconds:.1f}"),
        ("seconds per 1,000 samples", f"{saved.sample_seconds:.2f}"),
        *((name, f"{value:.3g}") for name, value in saved.diagnosis.items()),
    ]
    shown = (
        ("Samples", "samples of the model")
        if saved.measures
        else ("Reconstructions", "held-out rows, decoded")
    )
    report = StepReport(
        blocks=[
            picture_block(title, shown[0], draw_rows(drawn, info), f"{len(drawn):,} {shown[1]}."),
            picture_block(title, "Held-out data", draw_rows(real, info), f"{len(real):,} rows that were not trained on."),
            Facts(section=title, rows=facts),
        ]
    )  # fmt: skip
    for first in saved.measures[:1]:
        more = f"real data {_number(first.floor)}"
        report.cards.append(Card(label=first.name.capitalize(), value=_number(first.value), more=more))
        report.blocks.append(measures_table(title, saved.measures))
    return report


def picture_block(section: str, title: str, pixels: Pixels, note: str) -> Image:
    """Return a picture uint8 [H, W, 3] as a block."""
    data = base64.b64encode(encode_png(pixels)).decode()
    return Image(
        section=section, title=title, note=note, media_type="image/png", data=data, alt=f"{title}: {note}"
    )


def measures_table(section: str, measures: Sequence[SampleMeasure]) -> Table:
    """Return one row per measure."""
    rows: list[list[Cell]] = [
        [
            m.name,
            _number(m.value),
            _interval(m.interval),
            _number(m.floor),
            _interval(m.floor_interval),
            m.note,
        ]
        for m in measures
    ]
    columns = [
        Column(name="Measure"), *(Column(name=name, number=True) for name in ("Samples", "", "Real", " ")),
        Column(name="Note", optional=True),
    ]  # fmt: skip
    return Table(
        section=section,
        title="Measures",
        note=f"{FLOOR} Brackets: 95 % intervals over groups.",
        columns=columns,
        rows=rows,
    )


def comparison_table(models: Mapping[str, SavedMeasures]) -> Table:
    """Return one row per model and a last one of real data; the columns are the measures that any of them has."""
    names = [*dict.fromkeys(m.name for saved in models.values() for m in saved.measures)]
    floors = {m.name: m.floor for saved in models.values() for m in saved.measures}
    rows: list[list[Cell]] = []
    for label, saved in models.items():
        found = {m.name: m for m in saved.measures}
        cells = [_marked(found.get(name)) for name in names]
        rows.append([label, saved.method, *cells, f"{saved.seconds:.0f}", f"{saved.sample_seconds:.2f}"])
    rows.append(["real data", "", *(_number(floors[name]) for name in names), "", ""])
    heads = [*names, "seconds", "seconds per 1,000 samples"]
    columns = [
        Column(name="Model"),
        Column(name="Method"),
        *(Column(name=name, number=True) for name in heads),
    ]
    note = f"{FLOOR} A bound is marked with <=."
    return Table(
        section="Comparison", title="Distances, likelihoods and time", note=note, columns=columns, rows=rows
    )


def comparison_page(
    models: Mapping[str, SavedMeasures], pictures: Mapping[str, Pixels], data: str
) -> ReportData:
    """Return the page: the table, and a picture of each model's samples."""
    blocks: list[Block] = [
        comparison_table(models),
        *(
            picture_block("Samples", name, pixels, "Samples of the model.")
            for name, pixels in pictures.items()
        ),
    ]
    return ReportData(title=f"Generative models of {data}", reports=[("compare", StepReport(blocks=blocks))])


def _marked(measure: SampleMeasure | None) -> str:
    if measure is None:
        return "not measured"
    return f"{'<= ' if 'upper bound' in measure.note else ''}{_number(measure.value)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"[{ends[0]:.3g}, {ends[1]:.3g}]"
