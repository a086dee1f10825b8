"""The page of a load test."""

from __future__ import annotations

import re
from typing import Any

import pytest

from whorl.report.load_test import load_test_page


def entries(rates: list[float], n: int = 40, broken: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rate in rates:
        for i in range(n):
            at, first = i / rate, 0.01 * rate * (1 + i / n)
            arrivals = [] if broken else [at + first, at + first + 0.02, at + first + 0.05]
            found.append(
                {
                    "kind": "request",
                    "load": f"{rate:g}/s",
                    "number": i,
                    "scheduled": at,
                    "sent": at,
                    "arrivals": arrivals,
                    "finished": at + 1,
                    "prompt_tokens": 5,
                    "output_tokens": 3,
                    "error": "connect" if broken else None,
                }
            )
        spread = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "most"), 0.01 * rate)
        found.append(
            {
                "kind": "load",
                "load": f"{rate:g}/s",
                "requests": n,
                "finished": 0 if broken else n,
                "offered": rate,
                "errors": {"connect": n} if broken else {},
                "request_rate": rate,
                "output_rate": 3 * rate,
                "goodput": None,
                "good": None,
                "output_cost": None,
                "lag": spread,
            }
            | dict.fromkeys(("ttft", "tpot", "itl", "e2e"), None if broken else spread)
        )
    return found


def test_a_curve_and_the_distributions_of_each_load_stand_on_one_page() -> None:
    html = load_test_page(entries([0.5, 1, 2]), "Load test", "about <us>")
    assert "about &lt;us&gt;" in html
    assert len(re.findall('<div class="chart"', html)) == 3 + 2 * 3  # the curve's, and two of each load
    assert not re.findall(r'(?:src|href)="(?!data:)', html)  # nothing from outside
    assert ">0.5<" in html and ">1.5<" in html  # rates between whole numbers have ticks of their own
    # 40 times to the first token, of which the median is 15 ms at 1/s: half of the requests are below it.
    line = re.search(r"&quot;Time to first token, 1/s|Time to first token: half within (\d+) ms", html)
    assert line is not None


@pytest.mark.parametrize("broken", [False, True])
def test_one_load_has_no_curve_and_a_dead_server_no_pictures(broken: bool) -> None:
    html = load_test_page(entries([2], broken=broken), "t")
    assert len(re.findall('<div class="chart"', html)) == (0 if broken else 2)
    assert ("40 connect" in html) is broken


def test_goodput_and_cost_have_columns_only_when_asked_for() -> None:
    given = entries([1, 2])
    plain = load_test_page(given, "t")
    for entry in given:
        if entry["kind"] == "load":
            entry |= {"goodput": 1.0, "good": 0.5, "output_cost": 2.5}
    told = load_test_page(given, "t")
    assert "as promised" not in plain and "as promised" in told and "Goodput by load" in told
    assert "cost of 1 M tokens" not in plain and "50 %" in told
