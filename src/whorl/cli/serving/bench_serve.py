"""`whorl bench-serve`: latency and throughput of a server under load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.config_options import Configs, config_options
from whorl.cli.options import serve_extra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from whorl.loadtest.config import LoadOptions, OutputOptions, RequestOptions
    from whorl.loadtest.runs import LoadResult
    from whorl.loadtest.summary import LoadSummary
    from whorl.loadtest.workload import LoadConfig, Prompt


def _configs() -> Configs:
    from whorl.loadtest.config import LoadOptions, OutputOptions, RequestOptions

    return {"load": (LoadOptions, ()), "request": (RequestOptions, ()), "output": (OutputOptions, ())}


@config_options(_configs)
def bench_serve(
    url: Annotated[str, typer.Argument(help="The server's address, without /v1.")] = "http://127.0.0.1:8000",
    *,
    load: LoadOptions,
    request: RequestOptions,
    output: OutputOptions,
) -> None:
    """Send load to a server and measure latency and throughput.

    Works with any server that has OpenAI's API. Requests arrive at random times, independent of earlier responses. Latencies
    are measured from the scheduled arrival.

    Examples:

        whorl bench-serve http://127.0.0.1:8000 --rate 4 --slo-ttft 0.5 --slo-tpot 0.05

        whorl bench-serve --rates 1,2,4,8,16 -n 200 --page load.html

        whorl bench-serve --rate 2 --burstiness 0.25 --prompts questions.jsonl --chat

        whorl bench-serve --concurrency 32 --input-length 128 --output-length 128 --ignore-eos --prefix 1024:1
    """
    import json
    import sys

    from whorl.errors import ConfigError

    with serve_extra("client"):
        from whorl.loadtest.runs import LoadTest, run_load_test_sync, to_jsonl
        from whorl.loadtest.runs import save_jsonl as save_lines
    from whorl.loadtest.summary import LatencySLO
    from whorl.tracking.progress import Progress

    has_slo = output.slo_ttft is not None or output.slo_tpot is not None
    loads = _build_loads(load)
    test = LoadTest(
        _base_url(url), _prompt_source(load), loads, model=request.model,
        endpoint="chat" if request.chat else "completions", extra_fields=tuple(request.extra_fields.items()),
        timeout_seconds=request.timeout, api_key=request.key, warmup_requests=request.warm_up,
        new_prompts_per_load=not load.same_prompts, cost_per_hour=output.cost_per_hour,
        slo=LatencySLO(output.slo_ttft, output.slo_tpot) if has_slo else None,
    )  # fmt: skip
    with Progress(sys.stderr).task("Requests", len(loads) * load.requests, "requests") as task:
        found = run_load_test_sync(test, on_done=lambda record: task.advance())
    if output.save is not None:
        save_lines(found, output.save)
    if output.page is not None:
        _write_page(found, output.page, url)
    if output.as_json:
        for line in to_jsonl(found):
            if json.loads(line)["kind"] == "load":
                print(line)
    else:
        _print_tables(found)
    if all(one.summary.finished == 0 for one in found):
        raise ConfigError(
            f"no request succeeded: {dict(found[0].summary.errors)}",
            expected="responses",
            do=f"first error: {next((r.error_message for r in found[0].records if r.error_message), 'nothing')}",
        )


def _build_loads(options: LoadOptions) -> list[LoadConfig]:
    """Return one load for each rate or concurrency."""
    from pydantic import ValidationError

    from whorl.errors import ConfigError
    from whorl.loadtest.workload import LoadConfig, parse_lengths, read_length_pairs

    tokens, _, kinds = (options.prefix or "0").partition(":")
    points: list[dict[str, Any]]
    try:
        if options.concurrency is not None:
            points = [{"concurrency": int(part)} for part in options.concurrency.split(",")]
        else:
            rates = options.rates or str(1 if options.rate is None else options.rate)
            points = [{"rate": float(part)} for part in rates.split(",")]
        shared = {"prefix_tokens": int(tokens), "n_prefixes": int(kinds or 1)}
        pairs = read_length_pairs(options.length_pairs) if options.length_pairs is not None else ()
        ins = parse_lengths(options.input_length, "--input-length")
        outs = parse_lengths(options.output_length, "--output-length")
        return [
            LoadConfig(
                requests=options.requests, burstiness=options.burstiness, seed=options.seed, length_pairs=pairs,
                prompt_lengths=ins, output_lengths=outs, **shared, **point,
            )
            for point in points
        ]  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f" --{part}" for part in first["loc"])
        raise ConfigError(f"the load{where} is {first.get('input')!r}", expected=first["msg"]) from error
    except ValueError as error:
        raise ConfigError(
            f"the load: {error}", expected="numbers, as in --rates 1,2,4 or --prefix 512:4"
        ) from error


def _base_url(url: str) -> str:
    """Return the address of the server without /v1."""
    from whorl.errors import ConfigError

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the address is {url!r}", expected="http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _prompt_source(load: LoadOptions) -> str | Sequence[tuple[Prompt, int | None]]:
    """Return prompts, or a text to cut them from: the given file, else the help topics of Python."""
    from whorl.errors import DataError
    from whorl.loadtest.workload import read_prompts

    if load.prompts is not None:
        return read_prompts(load.prompts)
    if load.text is None:
        from pydoc_data.topics import topics

        return "\n".join(text for _, text in sorted(topics.items()))
    try:
        found = load.text.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{load.text} cannot be read: {error}", expected="a UTF-8 text file") from error
    if not found:
        raise DataError(f"{load.text} is empty", expected="text to cut prompts from")
    return found


def _write_page(loads: Sequence[LoadResult], file: Path, url: str) -> None:
    import json
    import time

    from whorl.errors import without_credentials
    from whorl.loadtest.runs import to_jsonl
    from whorl.report.load_test import load_test_page

    entries = [json.loads(line) for line in to_jsonl(loads)]
    total = sum(load.summary.requests for load in loads)
    html = load_test_page(
        entries,
        "Load test",
        f"{total:,} requests to {without_credentials(url)}, in {len(loads)} loads.",
        time.strftime("%Y-%m-%d %H:%M"),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(html, encoding="utf-8")


def _print_tables(loads: Sequence[LoadResult]) -> None:
    """Print a table of latencies for each load, and one table of all loads."""
    from rich.console import Console

    from whorl.loadtest.summary import client_lagging

    console = Console()
    if not console.is_terminal:
        console.width = 120
    for load in loads:
        console.print(latency_table(load.name, load.summary))
        if load.summary.errors:
            message = next((r.error_message for r in load.records if r.error is not None), "")
            console.print(f"errors: {load.summary.errors}  {message}", style="red", markup=False)
        if client_lagging(load.summary):
            console.print(
                "this client was late (see delay): its machine is busy, or too slow for this load",
                style="yellow",
            )
    console.print(rate_table([load.summary for load in loads], [load.name for load in loads]))


def latency_table(name: str, summary: LoadSummary) -> Table:
    """Return the latencies of a load in milliseconds."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"{name}: milliseconds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("mean", "50 %", "90 %", "95 %", "99 %", "maximum"):
        table.add_column(column, justify="right")
    for title, found in (
        ("time to first token", summary.ttft), ("time per output token", summary.tpot), ("inter-token latency", summary.itl),
        ("end to end", summary.e2e), ("delay of this client", summary.lag),
    ):  # fmt: skip
        if found is not None:
            values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.maximum)
            table.add_row(title, *(f"{1e3 * value:,.1f}" for value in values))
    return table


def rate_table(summaries: Sequence[LoadSummary], names: Sequence[str]) -> Table:
    """Return a table with one row per load."""
    from rich import box
    from rich.table import Table

    table = Table(
        title="requests and tokens per second",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for column in ("load", "finished", "failed", "seconds", "req/s", "in/s", "out/s"):
        table.add_column(column, justify="left" if column == "load" else "right", no_wrap=True)
    has_slo, has_cost = (
        any(getattr(s, name) is not None for s in summaries) for name in ("slo_attainment", "output_cost")
    )
    for shown, columns in ((has_slo, ("goodput", "SLO met")), (has_cost, ("cost/M out", "cost/M all"))):
        for column in columns if shown else ():
            table.add_column(column, justify="right", no_wrap=True)
    for name, s in zip(names, summaries, strict=True):
        row = [
            name,
            str(s.finished),
            str(s.requests - s.finished),
            f"{s.seconds:.1f}",
            f"{s.request_rate:.2f}",
        ]
        row += [f"{s.input_rate:,.0f}", f"{s.output_rate:,.0f}"]
        if has_slo:
            row += [f"{s.goodput or 0:.2f}", f"{s.slo_attainment or 0:.0%}"]
        if has_cost:
            row += ["-" if value is None else f"{value:,.4g}" for value in (s.output_cost, s.total_cost)]
        table.add_row(*row)
    return table
