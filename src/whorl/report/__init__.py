"""The HTML report of a run: `ReportData` holds its content, `render` writes the page."""

from whorl.report.data import ReportData
from whorl.report.render import render

__all__ = ["ReportData", "render"]
