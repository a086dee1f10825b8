"""From `ReportData` to one self-contained HTML page.

Results come first, evidence next, provenance last. Numbers are formatted here; the template `page.html` holds markup and
fixed text.

Prompts, samples, file names and configurations are untrusted text, and reports are passed on. Everything goes through the
template's autoescape; only the style sheet, the script and the charts are marked safe. The script inserts text as text. A
content security policy forbids the page to load or send anything.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from whorl.report.data import LineageNode, PlanRow, ReportData, Score, TextSample
from whorl.report.format import (
    NBSP,
    format_duration,
    format_number,
    format_percent,
    format_quantity,
    format_si,
)
from whorl.report.induction_onset import find_induction_onset, find_loss_drop
from whorl.report.stages import objective_rows, stage_charts, stage_samples, stage_table
from whorl.report.training import MAX_EVENTS, describe_loss_drop, event_rows, training_charts, training_facts

_SECTIONS = (
    ("result", "Result"),
    ("scores", "Bits per byte"),
    ("samples", "Samples"),
    ("training", "Training"),
    ("stages", "After pretraining"),
    ("plan", "Plan"),
    ("corpus", "Corpus"),
    ("tokenizer", "Tokenizer"),
    ("time", "Time"),
    ("lineage", "Lineage"),
    ("environment", "Environment"),
)


def render(data: ReportData, out: Path) -> Path:
    """Write the page to `out`, create its folder if needed, and return the path.

    The page is written to a temporary file and renamed, so that a browser never reads a partial page.
    """
    page = to_html(data)
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
    drop = None
    if data.training and data.training.points:
        drop = find_induction_onset(data.training.induction, data.training.points) or find_loss_drop(
            data.training.points
        )
    charts = [
        {"title": title, "note": note, "svg": Markup(svg)}
        for title, note, svg in training_charts(data.training, drop)
    ]
    return template.render(
        data=data,
        style=Markup((resources / "style.css").read_text("utf-8")),
        script=Markup((resources / "page.js").read_text("utf-8")),
        sections=_sections(data),
        stamp=" · ".join(part for part in (data.run, data.created) if part),
        cards=list(_result_cards(data)),
        scores=_score_rows(data.scores.scores) if data.scores else [],
        completed=_format_ratio(data.completions.parsed, data.completions.prompts)
        if data.completions
        else "",
        real=_format_ratio(data.completions.real_parsed, data.completions.prompts)
        if data.completions
        else "",
        samples=[_sample_rows(sample) for sample in data.samples],
        charts=charts,
        loss_drop=describe_loss_drop(drop) if drop else "",
        training_facts=training_facts(data.training),
        events=event_rows(data.training),
        stages=stage_table(data.stages),
        objectives=objective_rows(data.stages),
        stage_charts=[(title, note, Markup(svg)) for title, note, svg in stage_charts(data.stages)],
        stage_samples=stage_samples(data.stages),
        hidden_events=max(0, len(data.training.events) - MAX_EVENTS) if data.training else 0,
        plan_rows=_plan_rows(data),
        funnel=_funnel(data),
        rejected=_rejected_rows(data),
        domains=_domains(data),
        times=_step_rows(data),
        time_summary=_time_summary(data),
        lineage=_lineage_tree(data.lineage, "", set()) if data.lineage else None,
        format_si=format_si,
        format_duration=format_duration,
    )


def _sections(data: ReportData) -> dict[str, str]:
    """Return id -> name of the sections on this page."""
    kept = {
        id: name for id, name in _SECTIONS if id not in data.omitted_sections or (id == "plan" and data.model)
    }
    if "plan" in data.omitted_sections and data.model:
        kept["plan"] = "Model"
    if "training" in data.omitted_sections and "stages" in kept:
        kept["stages"] = "Stages"
    return kept


def _format_ratio(count: int, total: int) -> str:
    return f"{count} of {total} ({format_percent(count / total)})"


# Result


def _result_cards(data: ReportData) -> Iterator[dict[str, str]]:
    def card(label: str, value: str, unit: str = "", more: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "unit": unit, "more": more}

    if data.scores:
        ours = [score.bits_per_byte for score in data.scores.scores if score.kind == "model"]
        others = [score for score in data.scores.scores if score.kind == "compressor" and score.bits_per_byte]
        if ours:
            best = min(others, key=lambda score: score.bits_per_byte, default=None)
            more = ""
            if best is not None:
                times = format_number(min(ours) / best.bits_per_byte)
                more = f"{times} × the best compressor, {best.name} {best.setting}".rstrip()
            yield card("Bits per byte, held-out", f"{min(ours):.3f}", "", more)
    if data.model:
        yield card("Parameters", *_split_unit(format_si(data.model.parameters, "")), more=data.model.name)
    if data.training and data.training.points:
        last = data.training.points[-1]
        tokens = last.tokens or next(
            (r.actual for r in _plan_quantities(data) if r.unit == "tokens" and r.actual), None
        )
        if tokens:
            steps = f"in {last.step:,} steps"
            yield card("Tokens trained on", *_split_unit(format_si(tokens, "")), more=steps)
        if last.seconds:
            planned = next((r.planned for r in _plan_quantities(data) if r.unit == "s" and r.planned), None)
            more = f"planned: {format_duration(planned)}" if planned else ""
            yield card("Training time", format_duration(last.seconds), more=more)
        if data.training.tokens_per_second:
            used = data.training.mfu
            more = f"{format_percent(used)} of the measured peak" if used is not None else ""
            yield card("Speed", f"{data.training.tokens_per_second:,.0f}", "tokens/s", more)
    if data.completions:
        done, real = data.completions.parsed, data.completions.real_parsed
        rate = format_percent(done / data.completions.prompts)
        yield card(
            "Completions that parse",
            rate,
            more=f"real code: {format_percent(real / data.completions.prompts)}",
        )
    tested = [stage for stage in data.stages if stage.accuracy is not None]
    if tested and (passed := tested[-1].accuracy):
        more = f"{format_percent(passed.before)} before {tested[-1].name}"
        yield card("Accuracy on held-out tasks", format_percent(passed.after), more=more)


def _split_unit(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(NBSP)
    return value, unit


def _plan_quantities(data: ReportData) -> list[PlanRow]:
    return list(data.plan.rows) if data.plan else []


def _score_rows(scores: list[Score]) -> list[dict[str, str]]:
    ordered = sorted(scores, key=lambda score: score.bits_per_byte)
    largest = max((score.bits_per_byte for score in ordered), default=0) or 1
    ours = min((score.bits_per_byte for score in ordered if score.kind == "model"), default=0)
    return [
        {
            "name": score.name,
            "setting": score.setting,
            "kind": score.kind,
            "value": f"{score.bits_per_byte:.3f}",
            "times": f"{score.bits_per_byte / ours:.2f}" if ours else "–",
            "width": f"{100 * score.bits_per_byte / largest:.1f}",
        }
        for score in ordered
    ]


# Samples


def _sample_rows(sample: TextSample) -> dict[str, Any]:
    tokens = []
    for token in sample.tokens:
        surprise = -math.log2(max(token.probability, 2.0**-8))  # 8 bits and more have one colour
        percent = f"{100 * token.probability:.2f} %"
        tokens.append(
            {
                "text": token.text,
                "p": f"{token.probability:.6g}",
                "heat": f"{surprise * 70 / 8:.0f}",
                "others": json.dumps(token.alternatives, ensure_ascii=False) if token.alternatives else "",
                "title": percent,
                "parts": _split_lines(token.text),
            }
        )
    return {"prompt": sample.prompt, "note": sample.note, "tokens": tokens}


def _split_lines(text: str) -> list[str]:
    """Split a text into lines and line breaks."""
    pieces: list[str] = []
    for i, line in enumerate(text.split("\n")):
        pieces += ["\n"] if i else []
        pieces += [line] if line else []
    return pieces


def _plan_rows(data: ReportData) -> list[dict[str, str]]:
    rows = []
    for row in _plan_quantities(data):
        difference = "–"
        if row.planned and row.actual is not None:
            difference = f"{100 * (row.actual / row.planned - 1):+.1f}{NBSP}%".replace("-", "\N{MINUS SIGN}")
        planned, actual = format_quantity(row.planned, row.unit), format_quantity(row.actual, row.unit)
        rows.append(
            {"quantity": row.quantity, "planned": planned, "actual": actual, "difference": difference}
        )
    return rows


# Corpus, tokenizer


def _funnel(data: ReportData) -> list[dict[str, str]]:
    if data.corpus is None:
        return []
    largest = max((stage.bytes for stage in data.corpus.funnel), default=0) or 1
    return [
        {
            "stage": stage.stage,
            "documents": f"{stage.documents:,}",
            "size": format_si(stage.bytes, "B"),
            "share": format_percent(stage.bytes / largest),
            "width": f"{100 * stage.bytes / largest:.1f}",
        }
        for stage in data.corpus.funnel
    ]


def _rejected_rows(data: ReportData) -> list[tuple[str, str, int]]:
    if data.corpus is None:
        return []
    parts = ((data.corpus.quarantine, "quarantine"), (data.corpus.dropped, "selection"))
    rows = [(reason, where, n) for reasons, where in parts for reason, n in reasons.items()]
    return sorted(rows, key=lambda row: -row[2])


def _domains(data: ReportData) -> list[dict[str, str]]:
    if data.tokenizer is None:
        return []
    rows = [d for d in data.tokenizer.domains if d.tokens]
    largest = max((d.bytes / d.tokens for d in rows), default=0) or 1
    return [
        {
            "domain": d.domain,
            "size": format_si(d.bytes, "B"),
            "tokens": format_si(d.tokens, ""),
            "value": f"{d.bytes / d.tokens:.2f}",
            "width": f"{100 * d.bytes / d.tokens / largest:.1f}",
        }
        for d in rows
    ]


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
