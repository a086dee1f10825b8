"""The page of a load test: figures, latency distributions, and curves over the load.

Input is the JSON lines that `whorl bench-serve` writes. A distribution is drawn as the share of requests served within a
time: the curve crosses 0.99 at the 99th percentile. With several rates, the curves over the load show the limit of the
server: throughput stops rising and the time to first token rises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from whorl.report.charts import Series, line_chart
from whorl.report.format import format_number

Entry = Mapping[str, Any]
_POINTS = 200
LATENCIES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token"),
    ("itl", "Inter-token latency"),
    ("e2e", "End to end"),
    ("lag", "Delay of the client"),
)


def load_test_page(entries: Sequence[Entry], title: str, about: str = "", stamp: str = "") -> str:
    """Return the HTML of a test.

    Args:
        entries: lines of kind "request" and "load", in order.
        title, about, stamp: heading of the page.
    """
    loads: list[dict[str, Any]] = []
    requests: list[Entry] = []
    for entry in entries:
        if entry["kind"] == "request":
            requests.append(entry)
            continue
        times = {"ttft": _ttft(requests), "tpot": _tpot(requests)}
        loads.append({"entry": entry, "times": times, "rows": _latency_rows(entry)})
        requests = []
    import jinja2
    from markupsafe import Markup

    here = files("whorl.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((here / "load_test.html").read_text("utf-8")).render(
        title=title,
        about=about,
        stamp=stamp,
        style=Markup((here / "style.css").read_text("utf-8")),
        script=Markup((here / "page.js").read_text("utf-8")),
        loads=loads,
        table=[_summary_row(load["entry"]) for load in loads],
        slo=any(load["entry"]["slo_attainment"] is not None for load in loads),
        cost=any(load["entry"]["output_cost"] is not None for load in loads),
        charts=[(name, note, Markup(chart)) for name, note, chart in _charts(loads)],
    )


def _charts(loads: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield (title, note, markup) of each chart."""
    if (
        len(
            curve := [
                load["entry"] for load in loads if load["entry"]["offered_rate"] and load["entry"]["ttft"]
            ]
        )
        > 1
    ):
        curve.sort(key=lambda entry: float(entry["offered_rate"]))
        yield from _rate_charts(curve)
    for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token")):
        shown = [
            (load["entry"]["load"], sorted(load["times"][name])) for load in loads if load["times"][name]
        ]
        for which, values in shown:
            series = _cumulative(which, values)
            yield (
                title if len(shown) == 1 else f"{title}, {which}",
                f"Share of {len(values):,} requests served within a time in milliseconds.",
                line_chart(
                    [series],
                    label=f"{title}: median {series.x[len(series.x) // 2]:.0f} ms",
                    x_label="milliseconds",
                    height=190,
                    x_range=(0.0, series.x[-1]),
                    y_range=(0.0, 1.0),
                ),
            )


def _rate_charts(entries: Sequence[Entry]) -> Iterator[tuple[str, str, str]]:
    rates = [float(entry["offered_rate"]) for entry in entries]

    def of(name: str, which: str) -> list[float]:
        return [1e3 * entry[name][which] if entry[name] else 0.0 for entry in entries]

    for name, title in (("ttft", "Time to first token by load"), ("tpot", "Time per output token by load")):
        yield (
            title,
            "Milliseconds over the request rate: the median (bold) and the 99th percentile.",
            line_chart(
                [
                    Series("median", rates, of(name, "p50"), "main", dots=True),
                    Series("99th percentile", rates, of(name, "p99"), "faint", dots=True),
                ],
                label=f"{title}, in milliseconds",
                x_label="request rate, requests/s",
                y_range=(0.0, max(of(name, "p99"))),
            ),
        )
    output_rates = [float(entry["output_rate"]) for entry in entries]
    yield (
        "Throughput by load",
        "Output tokens per second over the request rate: flat where the server is saturated.",
        line_chart(
            [Series("tokens/s", rates, output_rates, "main", dots=True)],
            label=f"Output tokens per second by load, at most {max(output_rates):.0f}",
            x_label="request rate, requests/s",
            height=190,
            y_range=(0.0, max(output_rates)),
        ),
    )
    if all(entry["goodput"] is not None for entry in entries):
        goodputs = [float(entry["goodput"]) for entry in entries]
        yield (
            "Goodput by load",
            "Requests per second that met the latency targets.",
            line_chart(
                [Series("requests/s", rates, goodputs, "main", dots=True)],
                label=f"Requests per second that met the latency targets, at most {max(goodputs):.2f}",
                x_label="request rate, requests/s",
                height=190,
                y_range=(0.0, max(*goodputs, 1e-9)),
            ),
        )


def _cumulative(name: str, values: Sequence[float]) -> Series:
    """Return the share of values below each time in milliseconds; `values` are seconds, ascending."""
    n = len(values)
    at = (
        sorted({round(i * (n - 1) / (_POINTS - 1)) for i in range(_POINTS)})
        if n > _POINTS
        else list(range(n))
    )
    return Series(name, [0.0, *(1e3 * values[i] for i in at)], [0.0, *((i + 1) / n for i in at)])


def _ttft(requests: Sequence[Entry]) -> list[float]:
    return [r["arrivals"][0] - r["scheduled"] for r in requests if r["error"] is None and r["arrivals"]]


def _tpot(requests: Sequence[Entry]) -> list[float]:
    return [
        (r["arrivals"][-1] - r["arrivals"][0]) / (r["output_tokens"] - 1)
        for r in requests
        if r["error"] is None and r["arrivals"] and r["output_tokens"] > 1
    ]


def _latency_rows(entry: Entry) -> list[list[str]]:
    """Return rows of name, mean, percentiles and maximum, in milliseconds."""
    found = []
    for name, title in LATENCIES:
        if (spread := entry[name]) is not None:
            columns = ("mean", "p50", "p90", "p95", "p99", "maximum")
            found.append([title, *(format_number(1e3 * spread[column]) for column in columns)])
    return found


def _summary_row(entry: Entry) -> dict[str, str]:
    """Return one load as a row of the table of all loads."""
    share, cost, ttft, tpot = entry["slo_attainment"], entry["output_cost"], entry["ttft"], entry["tpot"]
    errors = ", ".join(f"{n} {kind}" for kind, n in entry["errors"].items())
    return {
        "load": entry["load"],
        "requests": f"{entry['finished']:,} of {entry['requests']:,}",
        "errors": errors or "none",
        "rate": format_number(entry["request_rate"]),
        "tokens": f"{entry['output_rate']:,.0f}",
        "ttft": "–"
        if ttft is None
        else f"{format_number(1e3 * ttft['p50'])} / {format_number(1e3 * ttft['p99'])}",
        "tpot": "–"
        if tpot is None
        else f"{format_number(1e3 * tpot['p50'])} / {format_number(1e3 * tpot['p99'])}",
        "slo": "–" if share is None else f"{100 * share:.0f} %, {format_number(entry['goodput'])}/s",
        "cost": "–" if cost is None else format_number(cost),
    }
