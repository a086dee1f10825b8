"""The page of a law: its blocks, and in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.serve.browser_pages import expect_fits
from tests.support.surface_runs import TRUE

from whorl.plan.laws.fits import LawFit, fit_law
from whorl.plan.laws.points import Points
from whorl.recipes.steps.pretrain.law_page import law_report
from whorl.report import ReportData, render
from whorl.report.blocks import Curve, Table


def isoflop_fit() -> LawFit:
    """Six sizes at each of four FLOPs."""
    flops, size = map(np.ravel, np.meshgrid(np.geomspace(1e15, 1e18, 4), np.linspace(-1, 1, 6)))
    n = np.array([TRUE.optimum(c).parameters for c in flops]) * np.exp(size)
    loss = TRUE.loss(n, flops / (6 * n)) * np.exp(0.002 * np.random.default_rng(0).standard_normal(len(n)))
    loss[5] = np.nan
    return fit_law(
        Points(n, flops / (6 * n), flops, loss, tuple(f"<run {i}>" for i in range(len(n)))), samples=40
    )


def test_law_page_has_all_curves_and_tables() -> None:
    fit = isoflop_fit()
    assert fit.exponents["IsoFLOP"] == pytest.approx(TRUE.exponent, abs=0.03)
    assert fit.exponents["envelope"] == pytest.approx(TRUE.exponent, abs=0.15)
    assert fit.spread["surface"] < 0.003 < fit.spread["Kaplan's form"] < 0.05
    report = law_report(fit)
    curves = [b.title for b in report.blocks if isinstance(b, Curve)]
    assert curves == ["Loss against compute", "IsoFLOP curves", "Residuals"]
    tables = {b.title: b.rows for b in report.blocks if isinstance(b, Table)}
    assert [row[0] for row in tables["Constants"]] == ["E", "A", "alpha", "B", "beta"]
    assert [row[0] for row in tables["Approaches"]][-1] == "surface, by Kaplan's count"
    assert len(tables["Backtest"]) == len(fit.backtest.errors) > 0 if fit.backtest else False
    assert tables["Runs that are not fitted"] == [["<run 5>", "1e+16", "–", "diverged"]]
    assert report.summary.startswith("For 1e+19 FLOPs, 10 times the runs, train ")


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_law_page_fits_and_logs_nothing(browser: Any, tmp_path: Path, width: int) -> None:
    path = render(
        ReportData(title="law", reports=[("law", law_report(isoflop_fit()))]), tmp_path / "law.html"
    )
    page = browser.new_context(viewport={"width": width, "height": 800}).new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(path.as_uri())
    assert page.locator(".chart").count() == 3 and page.locator("text=diverged").count() == 1
    expect_fits(page, width)
    assert messages == []
    page.context.close()
