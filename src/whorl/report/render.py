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

from whorl.report.data import LineageNode, PlanRow, ReportData, Sample, Score
from whorl.report.format import NBSP, duration, figure, quantity, scaled, share
from whorl.report.induction_onset import copying_fall, find_fall
from whorl.report.stages import stage_charts, stage_samples, stage_table
from whorl.report.training import MOST_EVENTS, charts, events, fall_words, training_facts

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
        fall = copying_fall(data.training.copying, data.training.points) or find_fall(data.training.points)
    drawn = [
        {"title": title, "note": note, "svg": Markup(svg)} for title, note, svg in charts(data.training, fall)
    ]
    return template.render(
        data=data,
        style=Markup((here / "style.css").read_text("utf-8")),
        script=Markup((here / "page.js").read_text("utf-8")),
        sections=_sections(data),
        stamp=" · ".join(part for part in (data.run, data.created) if part),
        cards=list(_cards(data)),
        scores=_scores(data.scores.scores) if data.scores else [],
        completed=_of(data.completions.parsed, data.completions.prompts) if data.completions else "",
        real=_of(data.completions.real_parsed, data.completions.prompts) if data.completions else "",
        samples=[_sample(sample) for sample in data.samples],
        charts=drawn,
        fall=fall_words(fall) if fall else "",
        training_facts=training_facts(data.training),
        events=events(data.training),
        stages=stage_table(data.stages),
        stage_charts=[(title, note, Markup(svg)) for title, note, svg in stage_charts(data.stages)],
        stage_samples=stage_samples(data.stages),
        unshown=max(0, len(data.training.events) - MOST_EVENTS) if data.training else 0,
        plan_rows=_plan_rows(data),
        funnel=_funnel(data),
        set_aside=_set_aside(data),
        domains=_domains(data),
        times=_times(data),
        time_words=_time_words(data),
        lineage=_branch(data.lineage, "", set()) if data.lineage else None,
        scaled=scaled,
        duration=duration,
    )


def _sections(data: ReportData) -> dict[str, str]:
    """Id -> name of the sections that this page has."""
    kept = {id: name for id, name in _SECTIONS if id not in data.absent or (id == "plan" and data.model)}
    if "plan" in data.absent and data.model:
        kept["plan"] = "Model"
    if "training" in data.absent and "stages" in kept:
        kept["stages"] = "Stages"
    return kept


def _of(count: int, total: int) -> str:
    return f"{count} of {total} ({share(count / total)})"


# Result


def _cards(data: ReportData) -> Iterator[dict[str, str]]:
    def card(label: str, value: str, unit: str = "", more: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "unit": unit, "more": more}

    if data.scores:
        ours = [score.bits_per_byte for score in data.scores.scores if score.kind == "model"]
        others = [score for score in data.scores.scores if score.kind == "compressor" and score.bits_per_byte]
        if ours:
            best = min(others, key=lambda score: score.bits_per_byte, default=None)
            more = ""
            if best is not None:
                times = figure(min(ours) / best.bits_per_byte)
                more = f"{times} × the best compressor, {best.name} {best.setting}".rstrip()
            yield card("Bits per byte, held-out", f"{min(ours):.3f}", "", more)
    if data.model:
        yield card("Parameters", *_split(scaled(data.model.parameters, "")), more=data.model.name)
    if data.training and data.training.points:
        last = data.training.points[-1]
        tokens = last.tokens or next((r.actual for r in _rows(data) if r.unit == "tokens" and r.actual), None)
        if tokens:
            steps = f"in {last.step:,} steps"
            yield card("Tokens trained on", *_split(scaled(tokens, "")), more=steps)
        if last.seconds:
            planned = next((r.planned for r in _rows(data) if r.unit == "s" and r.planned), None)
            more = f"planned: {duration(planned)}" if planned else ""
            yield card("Training time", duration(last.seconds), more=more)
        if data.training.tokens_per_second:
            used = data.training.utilisation
            more = f"{share(used)} of the measured peak" if used is not None else ""
            yield card("Speed", f"{data.training.tokens_per_second:,.0f}", "tokens/s", more)
    if data.completions:
        done, real = data.completions.parsed, data.completions.real_parsed
        rate = share(done / data.completions.prompts)
        yield card(
            "Completions that parse", rate, more=f"real code: {share(real / data.completions.prompts)}"
        )
    tested = [stage for stage in data.stages if stage.passed is not None]
    if tested and (passed := tested[-1].passed):
        more = f"{share(passed.before)} before {tested[-1].name}"
        yield card("Held-out tasks passed", share(passed.after), more=more)


def _split(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(NBSP)
    return value, unit


def _rows(data: ReportData) -> list[PlanRow]:
    return list(data.plan.rows) if data.plan else []


def _scores(scores: list[Score]) -> list[dict[str, str]]:
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


def _sample(sample: Sample) -> dict[str, Any]:
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
                "parts": _lines(token.text),
            }
        )
    return {"prompt": sample.prompt, "note": sample.note, "tokens": tokens}


def _lines(text: str) -> list[str]:
    """The text's pieces with each line break as a piece of its own."""
    pieces: list[str] = []
    for i, line in enumerate(text.split("\n")):
        pieces += ["\n"] if i else []
        pieces += [line] if line else []
    return pieces


def _plan_rows(data: ReportData) -> list[dict[str, str]]:
    rows = []
    for row in _rows(data):
        difference = "–"
        if row.planned and row.actual is not None:
            difference = f"{100 * (row.actual / row.planned - 1):+.1f}{NBSP}%".replace("-", "\N{MINUS SIGN}")
        planned, actual = quantity(row.planned, row.unit), quantity(row.actual, row.unit)
        rows.append({"what": row.what, "planned": planned, "actual": actual, "difference": difference})
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
            "size": scaled(stage.bytes, "B"),
            "share": share(stage.bytes / most),
            "width": f"{100 * stage.bytes / most:.1f}",
        }
        for stage in data.corpus.funnel
    ]


def _set_aside(data: ReportData) -> list[tuple[str, str, int]]:
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
            "size": scaled(d.bytes, "B"),
            "tokens": scaled(d.tokens, ""),
            "value": f"{d.bytes / d.tokens:.2f}",
            "width": f"{100 * d.bytes / d.tokens / most:.1f}",
        }
        for d in rows
    ]


# Time, lineage


def _times(data: ReportData) -> list[dict[str, str]]:
    if data.time is None:
        return []
    total = sum(step.seconds for step in data.time.steps) or 1
    longest = max((step.seconds for step in data.time.steps), default=0)
    return [
        {
            "step": step.step,
            "time": duration(step.seconds),
            "share": share(step.seconds / total),
            "cost": _money(step.seconds, data),
            "size": scaled(step.bytes, "B") if step.bytes is not None else "–",
            "note": " · ".join(part for part in ("looked up" if step.looked_up else "", step.note) if part),
            "flex": f"{step.seconds / total:.5f}",
            "style": "main" if step.seconds == longest else "",
        }
        for step in data.time.steps
    ]


def _money(seconds: float, data: ReportData) -> str:
    if data.time is None or data.time.cost_per_hour is None:
        return "–"
    return f"{data.time.cost_per_hour * seconds / 3600:.4f} {data.time.currency}"


def _time_words(data: ReportData) -> str:
    if data.time is None:
        return ""
    total = sum(step.seconds for step in data.time.steps)
    words = f"{duration(total)} of work in {len(data.time.steps)} steps"
    if data.time.budget_seconds is not None:
        words += f", of which training was given {duration(data.time.budget_seconds)}"
    known = [step for step in data.time.steps if step.looked_up]
    if known:
        words += f"; {len(known)} looked up, not redone (the time is that of the run that made it)"
    if data.time.cost_per_hour is not None:
        words += f"; {_money(total, data)} at {figure(data.time.cost_per_hour)} {data.time.currency} an hour"
    return words + "."


def _branch(node: LineageNode, role: str, seen: set[str]) -> dict[str, Any]:
    """The tree as shown: an artifact that stands there already is not unfolded again."""
    title = node.name or node.kind or "artifact"
    if role and role != title:
        title = f"{role}: {title}"
    notes = []
    if node.kind and node.kind != node.name:
        notes.append(node.kind)
    if node.seconds is not None:
        notes.append(duration(node.seconds))
    if node.bytes is not None:
        notes.append(scaled(node.bytes, "B"))
    if node.missing:
        notes.append("no longer in the store")
    again = node.address in seen and bool(node.parents)
    if again:
        notes.append("its parents stand above")
    seen.add(node.address)
    parents = [] if again else [_branch(parent, name, seen) for name, parent in node.parents.items()]
    return {"title": title, "address": node.address[:12], "note": " · ".join(notes), "parents": parents}
