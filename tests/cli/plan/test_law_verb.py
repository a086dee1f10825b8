"""`whorl plan law`: text, JSON and page from a file of runs; a budget far beyond them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cli import refuse, succeed
from tests.support.surface_runs import TRUE, grid, write


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write(tmp_path / "runs.csv", grid(noise=0.003))


def test_law_verb_prints_constants_backtest_and_advice(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "law.html"
    text = succeed(runs.parent, "plan", "law", runs, "--flops", "2e18", "-o", page).stdout
    assert "Backtest: the law of the" in text and "alpha" in text and "Kaplan's form" in text
    assert "For 2e+18 FLOPs, 11.1 times the runs, train " in text and "warning" not in text
    html = page.read_text()
    assert (
        html.count('<div class="chart"') == 2 and "For 2e+18 FLOPs" in html
    )  # no groups of equal FLOPs here


def test_law_verb_gives_law_as_json(runs: Path) -> None:
    found = json.loads(succeed(runs.parent, "plan", "law", runs, "--json").stdout)
    assert found["law"]["size_exponent"] == pytest.approx(TRUE.size_exponent, rel=0.1)
    assert found["optimum"]["loss"] == pytest.approx(TRUE.optimum(found["flops"]).loss, rel=0.02)


def test_law_verb_warns_first_a_thousand_times_beyond_the_runs(runs: Path) -> None:
    first, second, *_ = succeed(runs.parent, "plan", "law", runs, "--flops", "1e24").stdout.splitlines()
    assert first.startswith("warning: 1e+24 FLOPs are 5,") and second.startswith("For 1e+24 FLOPs")


def test_law_verb_refuses_too_few_runs(tmp_path: Path) -> None:
    assert "add runs such as" in refuse(
        tmp_path, "plan", "law", write(tmp_path / "few.csv", grid(2, 2)), code=1
    )
