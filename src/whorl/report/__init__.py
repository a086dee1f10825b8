"""One run on one page: `ReportData` is what the page may say, `render` writes it."""

from whorl.report.data import ReportData
from whorl.report.render import render

__all__ = ["ReportData", "render"]
