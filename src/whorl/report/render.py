"""From `ReportData` to one self-contained HTML page.

The page is for three readings: a glance at the result, a comparison with what was planned and with the
compressors, and a look for where something went wrong. So the figures come first, the evidence after them,
the provenance last, and every table has its figures right-aligned in one column.

The subtle part is trust. Prompts, samples, file names and configurations come from data that nobody has
read, and a report is a file that people open in a browser and pass on. So everything goes through the
template's escaping (the style, the script and the charts, which are ours, are the only marked-safe
strings), the script puts text in as text, and a content security policy forbids the page to load or send
anything at all.

What is said here is arranged here: the template holds markup and words, this file holds the numbers' form.
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
from whorl.report.stages import stage_charts, stage_samples, stage_table
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
    """Write the page to `out` (its folder is made) and return the path.

    The page is written aside and renamed, so that a browser that reloads never sees half of it.
    """
    page = to_html(data)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def to_html(data: ReportData) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    here = files("whorl.report")
    environment = jinja2.Environment(autoescape=True, trim_blocks=False, undefined=jinja2.StrictUndefined)
    template = environment.from_string((here / "page.html").read_text("utf-8"))
    fall = None
    if data.training and data.training.points:
        fall = find_induction_onset(data.training.induction, data.training.points) or find_loss_drop(
            data.training.points
        )
    drawn = [
        {"title": title, "note": note, "svg": Markup(svg)}
        for title, note, svg in training_charts(data.training, fall)
    ]
    return template.render(
        data=data,
        style=Markup((here / "style.css").read_text("utf-8")),
        script=Markup((here / "page.js").read_text("utf-8")),
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
        charts=drawn,
        fall=describe_loss_drop(fall) if fall else "",
        training_facts=training_facts(data.training),
        events=event_rows(data.training),
        stages=stage_table(data.stages),
        stage_charts=[(title, note, Markup(svg)) for title, note, svg in stage_charts(data.stages)],
        stage_samples=stage_samples(data.stages),
        unshown=max(0, len(data.training.events) - MAX_EVENTS) if data.training else 0,
        plan_rows=_plan_rows(data),
        funnel=_funnel(data),
        set_aside=_rejected_rows(data),
        domains=_domains(data),
        times=_step_rows(data),
        time_words=_time_summary(data),
        lineage=_lineage_tree(data.lineage, "", set()) if data.lineage else None,
        scaled=format_si,
        duration=format_duration,
    )


def _sections(data: ReportData) -> dict[str, str]:
    """Id -> name of the sections that this page has."""
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
        yield card("Held-out tasks passed", format_percent(passed.after), more=more)


def _split_unit(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(NBSP)
    return value, unit


def _plan_quantities(data: ReportData) -> list[PlanRow]:
    return list(data.plan.rows) if data.plan else []


def _score_rows(scores: list[Score]) -> list[dict[str, str]]:
    ordered = sorted(scores, key=lambda score: score.bits_per_byte)
    most = max((score.bits_per_byte for score in ordered), default=0) or 1
    ours = min((score.bits_per_byte for score in ordered if score.kind == "model"), default=0)
    return [
        {
            "name": score.name,
            "setting": score.setting,
            "kind": score.kind,
            "value": f"{score.bits_per_byte:.3f}",
            "times": f"{score.bits_per_byte / ours:.2f}" if ours else "–",
            "width": f"{100 * score.bits_per_byte / most:.1f}",
        }
        for score in ordered
    ]


# Samples


def _sample_rows(sample: TextSample) -> dict[str, Any]:
    tokens = []
    for token in sample.tokens:
        surprise = -math.log2(max(token.probability, 2.0**-8))  # 8 bits and more are one colour
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
    """The text's pieces with each line break as a piece of its own."""
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
        rows.append({"what": row.quantity, "planned": planned, "actual": actual, "difference": difference})
    return rows


# Corpus, tokenizer


def _funnel(data: ReportData) -> list[dict[str, str]]:
    if data.corpus is None:
        return []
    most = max((stage.bytes for stage in data.corpus.funnel), default=0) or 1
    return [
        {
            "stage": stage.stage,
            "documents": f"{stage.documents:,}",
            "size": format_si(stage.bytes, "B"),
            "share": format_percent(stage.bytes / most),
            "width": f"{100 * stage.bytes / most:.1f}",
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
    most = max((d.bytes / d.tokens for d in rows), default=0) or 1
    return [
        {
            "domain": d.domain,
            "size": format_si(d.bytes, "B"),
            "tokens": format_si(d.tokens, ""),
            "value": f"{d.bytes / d.tokens:.2f}",
            "width": f"{100 * d.bytes / d.tokens / most:.1f}",
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
            "note": " · ".join(part for part in ("looked up" if step.cached else "", step.note) if part),
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
    words = f"{format_duration(total)} of work in {len(data.time.steps)} steps"
    if data.time.budget_seconds is not None:
        words += f", of which training was given {format_duration(data.time.budget_seconds)}"
    known = [step for step in data.time.steps if step.cached]
    if known:
        words += f"; {len(known)} looked up, not redone (the time is that of the run that made it)"
    if data.time.cost_per_hour is not None:
        words += f"; {_format_cost(total, data)} at {format_number(data.time.cost_per_hour)} {data.time.currency} an hour"
    return words + "."


def _lineage_tree(node: LineageNode, role: str, seen: set[str]) -> dict[str, Any]:
    """The tree as shown: an artifact that stands there already is not unfolded again."""
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
        notes.append("its parents stand above")
    seen.add(node.address)
    parents = [] if again else [_lineage_tree(parent, name, seen) for name, parent in node.parents.items()]
    return {"title": title, "address": node.address[:12], "note": " · ".join(notes), "parents": parents}
