"""The pages of generative models: samples and data, measures with their floor, and a comparison of models."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from whorl.data.images import Pixels
from whorl.generative.data import Data
from whorl.generative.measures import SampleMeasure
from whorl.generative.pictures import draw_rows, encode_png
from whorl.generative.saved_model import SavedMeasures
from whorl.generative.trained import SHOWN, Findings
from whorl.generative.views import GuidanceFigure
from whorl.report.blocks import Block, Card, Cell, Column, Facts, Image, StepReport, Table
from whorl.report.data import ReportData

FLOOR = "Real: training rows against the same held-out rows, in groups of the same size."


def model_report(found: Findings, data: Data) -> StepReport:
    """Return the blocks of one model."""
    saved, title = found.saved, found.saved.title
    n = SHOWN if data.info.is_pictures or not saved.measures else len(found.drawn)
    drawn, real = found.drawn[:n], data.test[:n]
    heading, what = "Samples", "samples of the model"
    if not saved.measures:
        heading, what = "Reconstructions", "held-out rows, decoded; pictures beside what is given"
    unseen = f"{len(real):,} rows that were not trained on."
    facts = [
        ("parameters", f"{saved.parameters:,}"),
        ("steps", f"{saved.steps:,}"),
        ("seconds of training", f"{saved.seconds:.1f}"),
        *[("seconds per 1,000 samples", f"{saved.sample_seconds:.2f}")][: len(saved.measures)],
        *((name, f"{value:.3g}") for name, value in saved.diagnosis.items()),
    ]
    report = StepReport(
        blocks=[
            picture_block(title, heading, draw_rows(drawn, data.info), f"{len(drawn):,} {what}."),
            picture_block(title, "Held-out data", draw_rows(real, data.info), unseen),
            Facts(section=title, rows=facts),
        ]
    )  # fmt: skip
    for first in saved.measures[:1]:
        more = f"real data {_number(first.floor)}"
        label, value = first.name.capitalize(), _number(first.value)
        report.cards.append(Card(label=label, value=value, more=more, number=first.value))
        report.blocks.append(measures_table(title, saved.measures))
    if not saved.measures:
        report.cards += [
            Card(label=name.replace("_", " ").capitalize(), value=_number(value), number=value)
            for name, value in saved.diagnosis.items()
        ]
    for view in found.views:
        report.blocks.append(picture_block(title, view.title, view.pixels, view.note))
        if view.figures:
            report.blocks.append(guidance_table(title, view.figures))
    return report


def guidance_table(section: str, figures: Sequence[GuidanceFigure]) -> Table:
    """Return one row per guidance, and one of real data."""
    names = "Share recognised", "Distance within a class"
    return Table(
        section=section,
        note="Share of the rows that the classifier puts into their class; mean distance between its features of two rows "
        "of a class.",
        columns=[Column(name=""), *(Column(name=name, number=True) for name in names)],
        rows=[[f.name, f"{f.recognised:.0%}", f"{f.distance:.3f}"] for f in figures],
    )


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
