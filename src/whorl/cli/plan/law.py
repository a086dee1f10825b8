"""`whorl plan law`: a scaling law from anyone's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def law(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="Runs: parameters, tokens (or training_flops), loss.")
    ],
    flops: Annotated[
        float | None, typer.Option(min=1, help="Budget to answer for; default: ten times the largest run.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Path of a page with charts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print constants, samples and optimum.")] = False,
) -> None:
    """Fit a scaling law to losses: three approaches, 90 % intervals, a backtest, and the best model for a budget.

    Examples:

        whorl plan law runs.csv --flops 1e24 -o law.html
    """
    import json
    from dataclasses import asdict

    from whorl.cli.text_table import print_blocks
    from whorl.plan.laws.fits import fit_law
    from whorl.plan.laws.law import MORE
    from whorl.plan.laws.points import read_csv
    from whorl.recipes.steps.pretrain.law_page import law_report
    from whorl.report import ReportData, render

    fit = fit_law(read_csv(file))
    flops = flops or MORE * fit.law.flops[1]
    report = law_report(fit, flops)
    if out is not None:
        render(ReportData(title=file.name, about="A scaling law", reports=[("law", report)]), out)
    if as_json:
        found = {"law": fit.law.to_json(), "exponents": fit.exponents, "flops": flops}
        found |= {"optimum": asdict(fit.law.optimum(flops)), "warning": fit.law.warning(flops)}
        print(json.dumps(found | {"backtest": fit.backtest and fit.backtest._asdict()}))
    else:
        print_blocks(report.blocks)
