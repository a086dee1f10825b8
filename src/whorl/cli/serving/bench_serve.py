"""`whorl bench-serve`: latency and throughput of a server under load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from whorl.loadtest.runs import LoadResult
    from whorl.loadtest.summary import LoadSummary
    from whorl.loadtest.workload import LoadConfig, Prompt


def bench_serve(
    url: Annotated[str, typer.Argument(help="The server's address, without /v1.")] = "http://127.0.0.1:8000",
    rate: Annotated[float | None, typer.Option(help="Requests per second (open loop).")] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Several request rates, one after another.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="8", help="Concurrent clients (closed loop); or several: 1,8,32."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests per load.")] = 100,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of arrival gaps; 1 is Poisson.")
    ] = 1.0,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts: one per line, or JSON lines (GSM8K, ShareGPT)."),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="Text to cut prompts from.")] = None,
    length_pairs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Pairs of prompt and output lengths, one per line.")
    ] = None,
    input_length: Annotated[
        str, typer.Option(metavar="LENGTHS", help="128, uniform:16,512 or lognormal:128,0.6,2048.")
    ] = "lognormal:128,0.6,2048",
    output_length: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Output tokens, in the format of --input-length.")
    ] = "lognormal:64,0.6,1024",
    prefix: Annotated[
        str | None,
        typer.Option(metavar="512:4", help="Shared prefixes: 512 tokens, 4 different ones."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    model: Annotated[str | None, typer.Option(help="Default: the first model of the server.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate up to the length limit.")
    ] = False,
    extra: Annotated[
        str | None, typer.Option(metavar="JSON", help="Additional request fields: '{\"temperature\": 0}'.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="WHORL_API_KEY", help="API key.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and prompts.")] = 0,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="The same prompts in every load.")
    ] = False,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before the measurement.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.001, help="Timeout of a request in seconds.")] = 600.0,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Target of the time to first token, in seconds.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Target of the time per output token, in seconds.")
    ] = None,
    cost_per_hour: Annotated[float | None, typer.Option(min=0, help="Cost of the machine per hour.")] = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write every request as a JSON line.")
    ] = None,
    page: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write figures and charts as one HTML file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")] = False,
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
    from pathlib import Path

    from whorl.errors import ConfigError
    from whorl.loadtest.runs import LoadTest, run_load_test_sync, to_jsonl
    from whorl.loadtest.runs import save_jsonl as save_lines
    from whorl.loadtest.summary import LatencySLO
    from whorl.tracking.progress import Progress

    if prompts is not None and (text or length_pairs or prefix):
        raise ConfigError(
            "--prompts was given with --text, --length-pairs or --prefix",
            expected="prompts from a file, or synthetic ones",
        )
    extra_fields = _parse_extra(extra) | ({"ignore_eos": True} if ignore_eos else {})
    slo = LatencySLO(slo_ttft, slo_tpot) if slo_ttft is not None or slo_tpot is not None else None
    loads = _build_loads(
        rate, rates, concurrency, requests=requests, burstiness=burstiness, seed=seed,
        lengths=length_pairs, input_=input_length, output=output_length, prefix=prefix,
    )  # fmt: skip
    test = LoadTest(
        _base_url(url), _prompt_source(prompts, text), loads, model=model, endpoint="chat" if chat else "completions",
        extra_fields=tuple(extra_fields.items()), timeout_seconds=timeout, api_key=key, warmup_requests=warm_up,
        new_prompts_per_load=not same_prompts, slo=slo, cost_per_hour=cost_per_hour,
    )  # fmt: skip
    with Progress(sys.stderr).task("Requests", len(loads) * requests, "requests") as task:
        found = run_load_test_sync(test, on_done=lambda record: task.advance())
    if save is not None:
        save_lines(found, Path(save))
    if page is not None:
        _write_page(found, Path(page), url)
    if as_json:
        for line in to_jsonl(found):
            if json.loads(line)["kind"] == "load":
                print(line)
    else:
        _print_tables(found)
    if all(load.summary.finished == 0 for load in found):
        raise ConfigError(
            f"no request succeeded: {dict(found[0].summary.errors)}",
            expected="responses",
            do=f"first error: {next((r.error_message for r in found[0].records if r.error_message), 'nothing')}",
        )


def _build_loads(
    rate: float | None, rates: str | None, concurrency: str | None, *, requests: int, burstiness: float, seed: int,
    lengths: str | None, input_: str, output: str, prefix: str | None,
) -> list[LoadConfig]:  # fmt: skip
    """Return one load for each rate or concurrency."""
    from pathlib import Path

    from pydantic import ValidationError

    from whorl.errors import ConfigError
    from whorl.loadtest.workload import LoadConfig, parse_lengths, read_length_pairs

    if sum(x is not None for x in (rate, rates, concurrency)) > 1:
        raise ConfigError("several of --rate, --rates and --concurrency", expected="one of them")
    tokens, _, kinds = (prefix or "0").partition(":")
    points: list[dict[str, Any]]
    try:
        if concurrency is not None:
            points = [{"concurrency": int(part)} for part in concurrency.split(",")]
        else:
            points = [
                {"rate": float(part)} for part in (rates or str(rate if rate is not None else 1)).split(",")
            ]
        shared = {"prefix_tokens": int(tokens), "n_prefixes": int(kinds or 1)}
        pairs = read_length_pairs(Path(lengths)) if lengths is not None else ()
        ins, outs = parse_lengths(input_, "--input-length"), parse_lengths(output, "--output-length")
        return [
            LoadConfig(
                requests=requests, burstiness=burstiness, seed=seed, length_pairs=pairs, prompt_lengths=ins,
                output_lengths=outs, **shared, **point,
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


def _prompt_source(prompts: str | None, text: str | None) -> str | Sequence[tuple[Prompt, int | None]]:
    """Return prompts, or a text to cut them from: the given file, else the help topics of Python."""
    from pathlib import Path

    from whorl.errors import DataError
    from whorl.loadtest.workload import read_prompts

    if prompts is not None:
        return read_prompts(Path(prompts))
    if text is None:
        from pydoc_data.topics import topics

        return "\n".join(text for _, text in sorted(topics.items()))
    try:
        found = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{text} cannot be read: {error}", expected="a UTF-8 text file") from error
    if not found:
        raise DataError(f"{text} is empty", expected="text to cut prompts from")
    return found


def _parse_extra(extra: str | None) -> dict[str, Any]:
    """Parse the fields of --extra."""
    import json

    from whorl.errors import ConfigError

    try:
        found = json.loads(extra or "{}")
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--extra is {extra!r}", expected='a JSON object, e.g. {"temperature": 0}'
        ) from None
    return found


def _write_page(loads: Sequence[LoadResult], file: Path, url: str) -> None:
    import json
    import time

    from whorl.loadtest.runs import to_jsonl
    from whorl.report.load_test import load_test_page

    entries = [json.loads(line) for line in to_jsonl(loads)]
    total = sum(load.summary.requests for load in loads)
    html = load_test_page(
        entries,
        "Load test",
        f"{total:,} requests to {url}, in {len(loads)} loads.",
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
