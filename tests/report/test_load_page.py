"""The page of a load test."""

from __future__ import annotations

import re
from typing import Any

import pytest

from whorl.report.load_test import load_test_page


def entries(rates: list[float], n: int = 40, broken: bool = False) -> list[dict[str, Any]]:
    """Lines of `n` requests and their summary for each rate; with `broken`, every request fails."""
    found: list[dict[str, Any]] = []
    for rate in rates:
        for i in range(n):
            at, first = i / rate, 0.01 * rate * (1 + i / n)
            arrivals = [] if broken else [at + first, at + first + 0.02, at + first + 0.05]
            request = {"kind": "request", "load": f"{rate:g}/s", "number": i, "scheduled": at, "sent": at}
            error, tokens = "connect" if broken else None, {"prompt_tokens": 5, "output_tokens": 3}
            found.append({**request, **tokens, "arrivals": arrivals, "finished": at + 1, "error": error})
        latency = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "maximum"), 0.01 * rate)
        summary = {
            "kind": "load", "load": f"{rate:g}/s", "requests": n, "finished": 0 if broken else n, "offered_rate": rate,
            "errors": {"connect": n} if broken else {}, "request_rate": rate, "output_rate": 3 * rate,
            "goodput": None, "slo_attainment": None, "output_cost": None, "lag": latency,
        }  # fmt: skip
        found.append(summary | dict.fromkeys(("ttft", "tpot", "itl", "e2e"), None if broken else latency))
    return found


def test_load_page_draws_curve_and_distributions() -> None:
    html = load_test_page(entries([0.5, 1, 2]), "Load test", "about <us>")
    assert "about &lt;us&gt;" in html
    n_charts = len(re.findall('<div class="chart"', html))
    assert n_charts == 3 + 2 * 3  # curves over the load, two charts per load
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert ">0.5<" in html and ">1.5<" in html  # fractional ticks between whole rates
    assert re.search(r"&quot;Time to first token, 1/s|Time to first token: median (\d+) ms", html)


@pytest.mark.parametrize("broken", [False, True])
def test_load_page_single_load_has_no_curve(broken: bool) -> None:
    html = load_test_page(entries([2], broken=broken), "t")
    assert len(re.findall('<div class="chart"', html)) == (0 if broken else 2)
    assert ("40 connect" in html) is broken


def test_load_page_shows_goodput_and_cost_if_given() -> None:
    lines = entries([1, 2])
    plain = load_test_page(lines, "t")
    for entry in lines:
        if entry["kind"] == "load":
            entry |= {"goodput": 1.0, "slo_attainment": 0.5, "output_cost": 2.5}
    full = load_test_page(lines, "t")
    assert "met targets" not in plain and "met targets" in full and "Goodput by load" in full
    assert "cost of 1 M tokens" not in plain and "50 %" in full
