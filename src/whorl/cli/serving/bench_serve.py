"""`whorl bench-serve`: how fast a server answers, and how many."""

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
    rate: Annotated[float | None, typer.Option(help="Requests that arrive a second, whoever waits.")] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="One load after another: a curve.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="8", help="Callers who each wait for their answer; or several: 1,8,32."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="In each load.")] = 100,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma between arrivals; 1 is Poisson.")
    ] = 1.0,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts: one a line, or JSON lines (GSM8K, ShareGPT).")
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="Text that prompts are cut from.")] = None,
    length_pairs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Pairs of prompt and output lengths, one a line.")
    ] = None,
    input_length: Annotated[
        str, typer.Option(metavar="LENGTHS", help="128, uniform:16,512 or lognormal:128,0.6,2048.")
    ] = "lognormal:128,0.6,2048",
    output_length: Annotated[
        str, typer.Option(metavar="LENGTHS", help="As --input-length: tokens to be written.")
    ] = "lognormal:64,0.6,1024",
    prefix: Annotated[
        str | None,
        typer.Option(metavar="512:4", help="Tokens that prompts begin with in common: of 4 kinds."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    model: Annotated[str | None, typer.Option(help="By default the first that the server names.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer as long as it may be.")
    ] = False,
    extra: Annotated[
        str | None, typer.Option(metavar="JSON", help="More fields: '{\"temperature\": 0}'.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="WHORL_API_KEY", help="API key.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="The same prompts in every load.")
    ] = False,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, that do not count.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    slo_ttft: Annotated[float | None, typer.Option(help="Promised seconds to the first token.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Promised seconds a token after it.")] = None,
    cost_per_hour: Annotated[float | None, typer.Option(min=0, help="Of the machine.")] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Every request as a JSON line.")] = None,
    page: Annotated[
        str | None, typer.Option(metavar="FILE", help="Figures and pictures as one HTML file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The figures as JSON lines, instead of tables.")
    ] = False,
) -> None:
    """Load a server as its users would, and measure what they would see.

    Any server with OpenAI's API. Requests arrive at random times, whether or not those before were answered, and latencies
    count from the time at which a request was due.

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
            expected="prompts of their own, or synthetic ones",
        )
    more = _parse_extra(extra) | ({"ignore_eos": True} if ignore_eos else {})
    promised = LatencySLO(slo_ttft, slo_tpot) if slo_ttft is not None or slo_tpot is not None else None
    loads = _build_loads(
        rate, rates, concurrency, requests=requests, burstiness=burstiness, seed=seed,
        lengths=length_pairs, input_=input_length, output=output_length, prefix=prefix,
    )  # fmt: skip
    test = LoadTest(
        _base_url(url), _prompt_source(prompts, text), loads, model=model, endpoint="chat" if chat else "completions",
        extra_fields=tuple(more.items()), timeout_seconds=timeout, api_key=key, warmup_requests=warm_up, new_prompts_per_load=not same_prompts, slo=promised,
        cost_per_hour=cost_per_hour,
    )  # fmt: skip
    with Progress(sys.stderr).task("Asking", len(loads) * requests, "requests") as task:
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
            f"no request was answered: {dict(found[0].summary.errors)}",
            expected="answers",
            do=f"the server said: {next((r.error_message for r in found[0].records if r.error_message), 'nothing')}",
        )


def _build_loads(
    rate: float | None, rates: str | None, concurrency: str | None, *, requests: int, burstiness: float, seed: int,
    lengths: str | None, input_: str, output: str, prefix: str | None,
) -> list[LoadConfig]:  # fmt: skip
    """A load for each rate or concurrency."""
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
    """The server's address without /v1."""
    from whorl.errors import ConfigError

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the address is {url!r}", expected="one with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _prompt_source(prompts: str | None, text: str | None) -> str | Sequence[tuple[Prompt, int | None]]:
    """Prompts, or a text that they are cut from: the one given, else that of Python's own help."""
    from pathlib import Path

    from whorl.errors import DataError
    from whorl.loadtest.workload import read_prompts

    if prompts is not None:
        return read_prompts(Path(prompts))
    if text is None:
        from pydoc_data.topics import topics

        return "\n".join(said for _, said in sorted(topics.items()))
    try:
        found = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{text} cannot be read: {error}", expected="a file of text in UTF-8") from error
    if not found:
        raise DataError(f"{text} is empty", expected="text that prompts can be cut from")
    return found


def _parse_extra(extra: str | None) -> dict[str, Any]:
    """The fields of --extra."""
    import json

    from whorl.errors import ConfigError

    try:
        found = json.loads(extra or "{}")
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--extra is {extra!r}", expected='a JSON object, as {"temperature": 0}') from None
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
    """Tables in the terminal: one of latencies for each load, and one of all loads."""
    from rich.console import Console

    from whorl.loadtest.summary import client_lagging

    console = Console()
    if not console.is_terminal:
        console.width = 120
    for load in loads:
        console.print(latency_table(load.name, load.summary))
        if load.summary.errors:
            said = next((r.error_message for r in load.records if r.error is not None), "")
            console.print(f"errors: {load.summary.errors}  {said}", style="red", markup=False)
        if client_lagging(load.summary):
            console.print(
                "this client was late itself (see lag): its machine is busy, or it is too slow for this load",
                style="yellow",
            )
    console.print(rate_table([load.summary for load in loads], [load.name for load in loads]))


def latency_table(name: str, summary: LoadSummary) -> Table:
    """A load's latencies in milliseconds."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"{name}: milliseconds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("mean", "50 %", "90 %", "95 %", "99 %", "most"):
        table.add_column(column, justify="right")
    for words, found in (
        ("time to first token", summary.ttft), ("time a token after it", summary.tpot), ("between pieces", summary.itl),
        ("whole answer", summary.e2e), ("lag of this client", summary.lag),
    ):  # fmt: skip
        if found is not None:
            values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.maximum)
            table.add_row(words, *(f"{1e3 * value:,.1f}" for value in values))
    return table


def rate_table(summaries: Sequence[LoadSummary], names: Sequence[str]) -> Table:
    """All loads, one a row."""
    from rich import box
    from rich.table import Table

    table = Table(
        title="requests and tokens a second", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    for column in ("load", "ended", "failed", "seconds", "ends/s", "in/s", "out/s"):
        table.add_column(column, justify="left" if column == "load" else "right", no_wrap=True)
    good, cost = (
        any(getattr(s, name) is not None for s in summaries) for name in ("slo_attainment", "output_cost")
    )
    for wanted, columns in ((good, ("good/s", "kept")), (cost, ("cost/M", "of all"))):
        for column in columns if wanted else ():
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
        if good:
            row += [f"{s.goodput or 0:.2f}", f"{s.slo_attainment or 0:.0%}"]
        if cost:
            row += ["-" if value is None else f"{value:,.4g}" for value in (s.output_cost, s.total_cost)]
        table.add_row(*row)
    return table
