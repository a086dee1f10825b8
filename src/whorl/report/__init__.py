"""The HTML report of a run: steps write blocks, `ReportData` holds the blocks of all steps, `render` writes the page."""

from whorl.report.blocks import (
    Bar,
    Block,
    Card,
    Cell,
    Column,
    Curve,
    Facts,
    Histogram,
    Line,
    StepReport,
    Table,
    Text,
)
from whorl.report.data import ReportData
from whorl.report.render import render

__all__ = [
    "Bar", "Block", "Card", "Cell", "Column", "Curve", "Facts", "Histogram", "Line", "ReportData", "StepReport", "Table",
    "Text", "render",
]  # fmt: skip
