"""The blocks of a law: a sentence to act on, loss against compute, IsoFLOP curves, residuals, constants, the backtest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from whorl.plan.config import BATCHES, FACTORS
from whorl.plan.laws.fits import LawFit
from whorl.plan.laws.law import MORE, ScalingLaw, ends
from whorl.plan.laws.points import Points, groups
from whorl.report.blocks import Block, Card, Column, Curve, Line, LineStyle, StepReport, Table, Text
from whorl.report.format import NBSP, format_number, format_si

if TYPE_CHECKING:
    from whorl.plan.laws.grids import Grids

GRID_STYLES: tuple[LineStyle, ...] = ("main", "second", "third")
CONSTANTS = ("E", "A", "alpha", "B", "beta")


def law_report(fit: LawFit, flops: float | None = None) -> StepReport:
    """Return the blocks of a law. flops: budget of the sentence."""
    law, points, test = fit.law, fit.points, fit.backtest
    flops = flops or MORE * law.flops[1]
    best, sentence = law.optimum(flops), advice(law, flops)
    cards = [
        Card(label="Best size", value=format_si(best.parameters, ""), more=f"for {flops:.2g} FLOPs"),
        Card(label=f"Expected {law.loss_name}", value=format_number(best.loss, 4), number=best.loss),
        Card(label="Runs fitted", value=f"{int(fit.used.sum()):,} of {len(points):,}"),
    ]
    samples = np.array(law.samples or [law.constants])
    constants = zip(CONSTANTS, law.constants, *np.quantile(samples, [0.05, 0.95], axis=0), strict=True)
    rows = [[name, *(format_number(float(value), 5) for value in values)] for name, *values in constants]
    blocks: list[Block] = [
        Text(section="Law", lines=[*filter(None, [law.warning(flops), sentence, backtest_line(fit)])]),
        _loss_curve(fit, flops), *_isoflop_curve(fit), _residual_curve(fit),
        _table("Constants", "Constant,Value,Low,High", rows, "90 % intervals, by bootstrap."),
        _table("Approaches", "Approach,a,Spread", [
            [name, f"{a:.3f}", f"{100 * fit.spread[name]:.2g} %" if name in fit.spread else "–"]
            for name, a in fit.exponents.items()
        ], "a: of best size ~ FLOPs^a. Spread: of residuals. Kaplan's count: without embeddings, at his sizes."),
    ]  # fmt: skip
    if test is not None:
        dear = points.where(fit.used & (points.flops > test.limit))
        rows = [
            [name, f"{c:.3g}", format_number(loss * (1 + error), 4), format_number(loss, 4), f"{error:+.1%}"]
            for name, c, loss, error in zip(dear.names, dear.flops, dear.loss, test.errors, strict=True)
        ]
        blocks.append(_table("Backtest", "Run,FLOPs,Predicted,Measured,Error", rows))
    if not fit.used.all():
        rows = [
            [points.names[i], f"{points.flops[i]:.3g}", format_number(points.loss[i], 4),
             f"{fit.residuals[i]:+.0%} from the law" if np.isfinite(points.loss[i]) else "diverged"]
            for i in np.flatnonzero(~fit.used)
        ]  # fmt: skip
        blocks.append(_table("Runs that are not fitted", "Run,FLOPs,Loss,Why", rows))
    return StepReport(summary=sentence, cards=cards, blocks=blocks)


def advice(law: ScalingLaw, flops: float) -> str:
    """Return the sentence to act on: what to train for FLOPs, and what it will reach."""
    best = law.optimum(flops)
    size, data = (
        f"{format_si(value, '').strip(NBSP)} ({' to '.join(format_si(end, '').strip(NBSP) for end in interval)})"
        for value, interval in ((best.parameters, best.parameters_interval), (best.data, best.data_interval))
    )  # fmt: skip
    low, high = (format_number(value, 4) for value in best.loss_interval)
    return (
        f"For {flops:.2g} FLOPs, {law.extrapolation(flops):,.3g} times the runs, train {size} {law.size_name} on {data} "
        f"{law.data_name}; expected: {format_number(best.loss, 4)} ({low} to {high}) {law.loss_name}."
    ).replace(NBSP, " ")


def backtest_line(fit: LawFit) -> str:
    """Return the backtest in a sentence."""
    if (test := fit.backtest) is None:
        return "No backtest: the runs below half of the largest FLOPs do not determine a law."
    worst, kaplan = (max(map(abs, errors)) for errors in (test.errors, test.kaplan_errors))
    return (
        f"Backtest: the law of the {test.fitted} runs up to {test.limit:.2g} FLOPs errs by at most {worst:.1%} on the "
        f"{len(test.errors)} dearer ones, up to {fit.law.flops[1] / test.limit:.1f} x as dear; Kaplan's form {kaplan:.1%}."
    )


def grid_blocks(grids: Grids) -> list[Block]:
    """Return the blocks of a study's grids."""
    narrow, wide, mup = grids.rates
    cost = ", ".join(f"{rows:g} x: {more:.2f}" for rows, more in zip(BATCHES, grids.data[1:], strict=True))
    critical, found = grids.critical_tokens, f"{grids.critical_tokens:,.0f} tokens"
    if not math.isfinite(critical):
        found = (
            "more than was tried"
            if critical > 0
            else "not found: a run diverged, or the law is above the losses"
        )
    text = Text(section="Rates and batches", lines=[
        f"Best learning rates: {narrow.best:.2f} x the defaults at {narrow.name}, {wide.best:.2f} x at {wide.name}. With "
        f"those of {narrow.name} it loses {wide.lost:.1%}, by muP {mup.lost:.1%}.",
        f"Critical batch: {found}; a step has {grids.step_tokens:,}. Text that more rows need for the same loss: {cost}.",
    ])  # fmt: skip
    lines, diverged, x = list[Line](), list[str](), np.log2(FACTORS)
    for each, style in zip(grids.rates, GRID_STYLES, strict=True):
        known = np.isfinite(each.losses)
        diverged += [f"{each.name}, {factor:g} x" for factor in np.array(FACTORS)[~known]]
        if known.any():
            y = np.array(each.losses)[known].tolist()
            lines.append(Line(name=each.name, x=x[known].tolist(), y=y, style=style, dots=True))
    note, title = f"Diverged: {'; '.join(diverged)}." if diverged else "", "Loss against learning rate"
    curve = Curve(section=text.section, title=title, lines=lines, x_label="log2 of the factor", note=note)
    return [text, curve] if lines else [text]


def _loss_curve(fit: LawFit, flops: float) -> Curve:
    points, law = fit.points, fit.law
    lines = [_line("envelope of the runs", points.where(fit.envelope), "flops", "second")]
    runs = points.where(fit.used)
    for group in groups(runs.parameters):
        order = group[np.argsort(runs.flops[group])]
        lines.append(
            _line(
                format_si(float(runs.parameters[order[0]]), "").strip(NBSP),
                runs.where(order),
                "flops",
                "faint",
            )
        )
    x = np.linspace(math.log10(law.flops[0]), math.log10(max(flops, law.flops[1])), 40).tolist()
    best = [law.optimum(10**value) for value in x]
    low, high = ([o.loss_interval[i] for o in best] for i in (0, 1))
    name = "the law at its best size"
    lines.append(Line(name=name, x=x, y=[o.loss for o in best], low=low, high=high, style="third"))
    return Curve(
        section="Law", title="Loss against compute", lines=lines, x_label="log10 FLOPs", height=300,
        mark=(math.log10(law.flops[1]), "largest run"),
        note=f"{law.loss_name}; a thin line for each size, a band for the 90 % interval of the law.",
    )  # fmt: skip


def _isoflop_curve(fit: LawFit) -> list[Block]:
    lines = []
    for parabola in fit.parabolas:
        runs, name = fit.points.where(parabola.members), f"{parabola.flops:.2g} FLOPs"
        low, high = np.log(ends(runs.parameters))
        x = np.linspace(low, high, 30)
        y = np.polyval(parabola.coefs, x).tolist()
        lines += [
            _line(name, runs, "parameters", "faint"),
            Line(name=f"parabola, {name}", x=(x / np.log(10)).tolist(), y=y),
        ]
    note = "Runs of equal FLOPs, and a parabola through each group; its lowest point is the best size."
    return (
        [Curve(section="Law", title="IsoFLOP curves", lines=lines, x_label="log10 size", note=note)]
        if lines
        else []
    )


def _residual_curve(fit: LawFit) -> Curve:
    order = [i for i in np.argsort(fit.points.flops) if fit.used[i]]
    line = _line("per cent", replace(fit.points, loss=100 * fit.residuals).where(order), "flops", "faint")
    note = "Measured / predicted - 1, in per cent. A trend over the compute would mean that the law is of the wrong form."
    return Curve(section="Law", title="Residuals", lines=[line], x_label="log10 FLOPs", note=note, height=160)


def _line(name: str, runs: Points, x: str, style: LineStyle) -> Line:
    return Line(
        name=name, x=np.log10(getattr(runs, x)).tolist(), y=runs.loss.tolist(), style=style, dots=True
    )


def _table(title: str, heads: str, rows: list[list[str]], note: str = "") -> Table:
    columns = [Column(name=name, number=i > 0 and name != "Why") for i, name in enumerate(heads.split(","))]
    return Table(section="Law", title=title, note=note, columns=columns, rows=[[*row] for row in rows])
