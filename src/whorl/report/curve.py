"""A self-contained page with one chart of several runs, for learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from whorl.report.charts import Series, line_chart


def write_curve_page(
    out: Path, title: str, facts: Sequence[tuple[str, str]], series: Sequence[Series], *, y: str, x: str
) -> Path:
    """Write a page with the facts as a table and the series in one chart; return its path.

    Args:
        facts: (name, value) rows of the table.
        y, x: names of the axes.
    """
    here = files("whorl.report")
    style, script = ((here / name).read_text("utf-8") for name in ("style.css", "page.js"))
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    chart = line_chart(series, label=f"{y} against {x}, one curve a run", x_label=x)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    out.parent.mkdir(parents=True, exist_ok=True)
    head = (
        f'<meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style} main {{ padding: 28px 0 }} h2 {{ margin-top: 32px }}</style>"
    )
    body = (
        f"<main><h1>{escape(title)}</h1><table>{rows}</table><h2>{escape(y)}</h2>{chart}</main>"
        f'<div id="tip" role="status"></div><script>{script}</script>'
    )
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'
    out.write_text(page, encoding="utf-8")
    return out
