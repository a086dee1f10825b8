"""From `ReportData` to one self-contained HTML page.

Results come first, evidence next, provenance last. Every kind of block has one macro in the template `page.html`, which
holds markup and fixed text. No code depends on a particular step.

Prompts, samples, file names and configurations are untrusted text, and reports are passed on. Everything goes through the
template's autoescape; only the style sheet, the script and the charts are marked safe. The script inserts text as text. A
content security policy forbids the page to load or send anything.
"""

from __future__ import annotations

import json
import math
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError
from whorl.report.blocks import Answer, Answers, Card, Curve, HeatMap, Histogram, Sample, sections
from whorl.report.charts import Mark, Series, line_chart
from whorl.report.data import LineageNode, ReportData
from whorl.report.format import format_duration, format_number, format_percent, format_si

_CLOSING = {"time": "Time", "lineage": "Lineage", "environment": "Environment"}


def render(data: ReportData, out: Path) -> Path:
    """Write the page to `out`, create its folder if needed, and return the path.

    The page is written to a temporary file and renamed, so that a browser never reads a partial page. A link is followed.

    Raises:
        ConfigError: `out` is a folder or a device.
    """
    return write_html(to_html(data), out)


def write_html(page: str, out: Path) -> Path:
    """Write a page to `out` as `render` does, and return the path.

    Raises:
        ConfigError: `out` is a folder or a device.
    """
    out = out.resolve()
    if out.exists() and not out.is_file():
        raise ConfigError(f"{out} is not a file", expected="the path of a page, e.g. report.html")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return out


def to_html(data: ReportData) -> str:
    """Return the page as text."""
    import jinja2
    from markupsafe import Markup

    resources = files("whorl.report")
    environment = jinja2.Environment(autoescape=True, trim_blocks=False, undefined=jinja2.StrictUndefined)
    template = environment.from_string((resources / "page.html").read_text("utf-8"))
    drawn = [
        (id, heading, [_drawn(block) for block in blocks])
        for id, (heading, blocks) in _with_ids(sections(data.reports)).items()
    ]
    names = {"result": "Result", **{id: heading for id, heading, _ in drawn}, **_closing(data)}
    return template.render(
        data=data,
        style=Markup((resources / "style.css").read_text("utf-8")),
        script=Markup((resources / "page.js").read_text("utf-8")),
        names=names,
        stamp=" · ".join(part for part in (data.run, data.created) if part),
        cards=_cards(data),
        summary=" ".join(report.summary for _, report in data.reports if report.summary),
        sections=drawn,
        times=_step_rows(data),
        time_summary=_time_summary(data),
        lineage=_lineage_tree(data.lineage, "", set()) if data.lineage else None,
    )


def _with_ids(found: dict[str, list[Any]]) -> dict[str, tuple[str, list[Any]]]:
    """Return id -> (heading, blocks); an id is the heading in small letters, made unique by a number."""
    ids: dict[str, tuple[str, list[Any]]] = {}
    for heading, blocks in found.items():
        base = re.sub(r"\W+", "_", heading.lower()).strip("_") or "section"
        number, id = 2, base
        while id in ids or id in ("result", "tip", *_CLOSING):
            id, number = f"{base}_{number}", number + 1
        ids[id] = heading, blocks
    return ids


def _closing(data: ReportData) -> dict[str, str]:
    """Return id -> heading of the sections at the end that have content."""
    given = (data.time, data.lineage, data.environment or data.next_commands)
    return {id: name for (id, name), content in zip(_CLOSING.items(), given, strict=True) if content}


def _cards(data: ReportData) -> list[Card]:
    """Return the headline figures, those of the youngest step first, one for each label."""
    found: dict[str, Card] = {}
    for _, report in reversed(data.reports):
        for card in report.cards:
            found.setdefault(card.label, card)
    return list(found.values())


# Blocks


def _drawn(block: Any) -> dict[str, Any]:
    """Return a block with the values that the template needs and its fields lack."""
    from markupsafe import Markup

    found: dict[str, Any] = {"block": block}
    if isinstance(block, Curve):
        found["svg"] = Markup(_chart(block))
    elif isinstance(block, Histogram):
        longest = max((bar.value for bar in block.bars), default=0) or 1
        found["widths"] = [f"{100 * bar.value / longest:.1f}" for bar in block.bars]
    elif isinstance(block, HeatMap):
        found["cells"] = _heat_map_cells(block)
    elif isinstance(block, Sample):
        found["tokens"] = _sample_tokens(block)
    elif isinstance(block, Answers):
        found["sides"] = [_side("before", block.before), _side("after", block.after)]
    return found


def _chart(curve: Curve) -> str:
    series = [
        Series(line.name, line.x, line.y, line.style, line.dots, line.joined, low=line.low, high=line.high)
        for line in curve.lines
    ]
    return line_chart(
        series, label=curve.label or f"{curve.title} against {curve.x_label}", x_label=curve.x_label,
        height=curve.height, x_range=curve.x_range, y_range=curve.y_range,
        y_format=format_percent if curve.unit == "share" else format_number,
        mark=Mark(*curve.mark) if curve.mark else None,
    )  # fmt: skip


def _heat_map_cells(block: HeatMap) -> list[list[dict[str, str]]]:
    """Return the cells as displayed; heat: per cent of the strongest colour."""
    known = [value for row in block.values for value in row if value is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    return [
        [
            {"sign": sign, "value": "", "heat": "0"}
            if value is None
            else {
                "sign": sign,
                "value": format_number(value).removesuffix(".00"),
                "heat": f"{45 * (value - low) / span:.0f}",
            }
            for value, sign in zip(values, signs, strict=True)
        ]
        for values, signs in zip(block.values, block.signs, strict=True)
    ]


def _sample_tokens(sample: Sample) -> list[dict[str, Any]]:
    tokens = []
    for token in sample.tokens:
        surprise = -math.log2(max(token.probability, 2.0**-8))  # 8 bits and more have one colour
        tokens.append(
            {
                "text": token.text,
                "p": f"{token.probability:.6g}",
                "heat": f"{surprise * 70 / 8:.0f}",
                "others": json.dumps(token.alternatives, ensure_ascii=False) if token.alternatives else "",
                "title": f"{100 * token.probability:.2f} %",
                "parts": _split_lines(token.text),
            }
        )
    return tokens


def _split_lines(text: str) -> list[str]:
    """Split a text into lines and line breaks."""
    pieces: list[str] = []
    for i, line in enumerate(text.split("\n")):
        pieces += ["\n"] if i else []
        pieces += [line] if line else []
    return pieces


def _side(when: str, answer: Answer) -> dict[str, str]:
    kind, sign, words = {
        True: ("passed", "✓", ": passed"), False: ("failed", "✗", ": not passed"), None: ("plain", "", ""),
    }[answer.passed]  # fmt: skip
    verdict = f"{when}{words}"
    if answer.passed is not None and answer.reward != float(answer.passed):
        verdict += f", reward {format_number(answer.reward)}"
    return {
        "kind": kind,
        "sign": sign,
        "verdict": verdict,
        "reason": answer.reason if answer.reason != "passed" else "",
        "text": answer.text.strip("\n"),
    }


# Time, lineage


def _step_rows(data: ReportData) -> list[dict[str, str]]:
    if data.time is None:
        return []
    total = sum(step.seconds for step in data.time.steps) or 1
    longest = max((step.seconds for step in data.time.steps), default=0)
    return [
        {
            "step": step.step,
            "time": format_duration(step.seconds),
            "share": format_percent(step.seconds / total),
            "cost": _format_cost(step.seconds, data),
            "size": format_si(step.bytes, "B") if step.bytes is not None else "–",
            "note": " · ".join(part for part in ("from the store" if step.cached else "", step.note) if part),
            "flex": f"{step.seconds / total:.5f}",
            "style": "main" if step.seconds == longest else "",
        }
        for step in data.time.steps
    ]


def _format_cost(seconds: float, data: ReportData) -> str:
    if data.time is None or data.time.cost_per_hour is None:
        return "–"
    return f"{data.time.cost_per_hour * seconds / 3600:.4f} {data.time.currency}"


def _time_summary(data: ReportData) -> str:
    if data.time is None:
        return ""
    total = sum(step.seconds for step in data.time.steps)
    text = f"{format_duration(total)} in {len(data.time.steps)} steps"
    if data.time.budget_seconds is not None:
        text += f"; training budget {format_duration(data.time.budget_seconds)}"
    cached = [step for step in data.time.steps if step.cached]
    if cached:
        text += f"; {len(cached)} found in the store (with the time of the run that made it)"
    if data.time.cost_per_hour is not None:
        text += f"; {_format_cost(total, data)} at {format_number(data.time.cost_per_hour)} {data.time.currency} per hour"
    return text + "."


def _lineage_tree(node: LineageNode, role: str, seen: set[str]) -> dict[str, Any]:
    """Return the tree as displayed; a repeated artifact is not expanded again."""
    title = node.name or node.kind or "artifact"
    if role and role != title:
        title = f"{role}: {title}"
    notes = []
    if node.kind and node.kind != node.name:
        notes.append(node.kind)
    if node.seconds is not None:
        notes.append(format_duration(node.seconds))
    if node.bytes is not None:
        notes.append(format_si(node.bytes, "B"))
    if node.missing:
        notes.append("no longer in the store")
    again = node.address in seen and bool(node.parents)
    if again:
        notes.append("parents listed above")
    seen.add(node.address)
    parents = [] if again else [_lineage_tree(parent, name, seen) for name, parent in node.parents.items()]
    return {"title": title, "address": node.address[:12], "note": " · ".join(notes), "parents": parents}
