"""Goodput of `whorl serve`, vLLM's server and llama.cpp's server with the same model under the same load.

    python bench/serve/servers.py --peer vllm=/PATH/bin/python --peer llama=/PATH/bin/python
        [--rates 1,2,4,8,16,32,64] [--seconds 10] [--only whorl,vllm] [--results FILE] [--draw FILE.png] [--quick]

The model: Llama's architecture, 16.9 M parameters, random weights in bf16, 1,024 positions. Requests arrive in bursts (gamma
gaps of shape 0.5) for `--seconds` at each rate. Each is a text: one of four prefixes of 128 tokens, then a log-normal part
(median 96 tokens). Outputs are log-normal (median 64), greedy, streamed. The rates ascend until a server meets the SLO for
less than half of the requests at two rates. SLO: 500 ms to the first token, 50 ms per token after it.

Every server has two threads and otherwise its defaults. It shares the two cores with the load generator, as all do. "client"
is the CPU time of the load generator as a share of one core. llama.cpp's Python server runs one request at a time, so
`interrupt_requests` is off. OpenVINO's model server has no package on PyPI or in Debian, and the GenAI pipeline has no
server; it is left out.

--peer NAME=PYTHON is an interpreter, as in bench/engine/throughput.py. vLLM needs package metadata under the name vllm
(docs/serve.md). --results FILE keeps each server's figures, and has those of servers that this command does not run. So
servers can be measured by separate commands. --draw FILE plots goodput against rate. --quick: rates 4 and 16, 5 seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._peers import TITLES, environment, interpreters
from bench._run import claim, parse, sized, smoke

from whorl.loadtest.runs import LoadTest, run_load_test_sync
from whorl.loadtest.summary import LatencySLO, LoadSummary
from whorl.loadtest.workload import LoadConfig, PromptPool, arrival_times, parse_lengths, schedule_requests

THREADS, START_SECONDS, LENGTH = 2, 180, 1024
SLO = LatencySLO(ttft=0.5, tpot=0.05)
RATES = "1,2,4,8,16,32,64"
NAMES = {"whorl": "Whorl"} | {name: TITLES[name] for name in ("vllm", "llama")}
COLOURS = {"whorl": "#0f6a73", "vllm": "#e0792b", "llama": "#8a8f98"}


@dataclass(frozen=True)
class Point:
    """One rate of one server; times are medians and 99th percentiles in ms. client: share of one core."""

    rate: float
    goodput: float
    attainment: float
    finished: int
    requests: int
    output_rate: float
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    lag: float
    client: float


def write_model(folder: Path) -> None:
    """Write the model with a tokenizer, and as a GGUF file."""
    from whorl.models.exchange.convert import export_model
    from whorl.models.exchange.gguf_file import export_gguf
    from whorl.models.transformer import Transformer
    from whorl.models.transformer_config import AttentionConfig, TransformerConfig
    from whorl.tokens.tokenizer import Tokenizer

    d_model, n_layers, hidden, vocab = sized((384, 6, 1024, 8192), (64, 2, 128, 512))
    tokenizer = Tokenizer.train(topics.values(), vocab, pattern="gpt2")  # which llama.cpp has, too
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    heads = AttentionConfig(n_heads=d_model // 64, n_kv_heads=d_model // 64, head_dim=64)
    config = TransformerConfig(
        vocab_size=vocab, d_model=d_model, n_layers=n_layers, max_length=LENGTH, mixers={"full": heads},
        mlp_hidden=hidden, tie_embeddings=False,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    model = Transformer(config, draw).eval().requires_grad_(False)
    for parameter in model.parameters():
        if not parameter.any():  # else layers would add nothing
            parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5, generator=draw)
    export_model(model, folder / "hf", "llama", dtype=torch.bfloat16, source=folder / "tokenizer")
    export_gguf(model, folder / "model.gguf", kind="bf16", source=folder / "tokenizer")


@contextmanager
def server(name: str, python: str, folder: Path, port: int) -> Iterator[str]:
    """Run a server until the end of the block; its address.

    Raises:
        RuntimeError: it did not start; with the last line of its log.
    """
    from whorl.router.replica_processes import free_port

    port, variables, model = port or free_port(), environment(python, THREADS), str(folder / "hf")
    if name == "whorl":
        words = ["whorl.cli", "serve", model, "--dtype", "bfloat16", "--threads", str(THREADS)]
        words += ["--max-model-len", str(LENGTH), "--name", "bench"]
    elif name == "vllm":
        words = ["vllm.entrypoints.cli.main", "serve", model, "--dtype", "bfloat16"]
        words += ["--max-model-len", str(LENGTH), "--served-model-name", "bench"]
        cores = ",".join(map(str, range(THREADS)))
        variables |= {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }
    else:
        words = ["llama_cpp.server", "--model", str(folder / "model.gguf"), "--n_ctx", str(LENGTH)]
        words += ["--n_threads", str(THREADS), "--n_threads_batch", str(THREADS)]
        words += ["--model_alias", "bench", "--interrupt_requests", "false"]
    command = [python, "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    log, url = folder / f"{name}.log", f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # its workers too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when the server lists its models. Raises RuntimeError: it ended, or is not ready in time."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing logged"]
    why = (
        f"exit code {process.returncode}"
        if process.returncode is not None
        else f"not ready in {START_SECONDS} s"
    )
    raise RuntimeError(f"{why}: {lines[-1][:300]}")


def load(url: str, rate: float, seconds: float, seed: int) -> Point:
    """Send the load of one rate."""
    prefix = sized(128, 16)
    config = LoadConfig(
        requests=max(sized(10, 3), round(rate * seconds)), rate=rate, burstiness=0.5, seed=seed, prefix_tokens=prefix,
        n_prefixes=4, prompt_lengths=parse_lengths(sized("lognormal:96,0.6,384", "lognormal:16,0.6,32")),
        output_lengths=parse_lengths(sized("lognormal:64,0.6,256", "8")),
    )  # fmt: skip
    # Few gaps deviate from their mean, so they are scaled: the last request arrives after requests / rate seconds.
    unscaled = arrival_times(config.model_copy(update={"rate": 1.0}))[-1]
    config = config.model_copy(update={"rate": rate * unscaled / config.requests})
    text = "\n".join(topics[name] for name in sorted(topics))
    # Cut here, so that every server gets the same text. The list is shuffled, and so is the same for all, too.
    prompts = [(one.prompt, one.max_tokens) for one in schedule_requests(config, PromptPool(text))]
    options = (("temperature", 0), ("ignore_eos", True))
    test = LoadTest(
        url, prompts, [config], model="bench", extra_fields=options, timeout_seconds=120.0, slo=SLO
    )
    began, busy = time.perf_counter(), time.process_time()
    (found,) = run_load_test_sync(test)
    share = (time.process_time() - busy) / (time.perf_counter() - began)
    if found.summary.errors:
        message = next(r.error_message for r in found.records if r.error is not None)
        print(f"errors: {found.summary.errors} {message}")
    return point(rate, found.summary, share)


def point(rate: float, summary: LoadSummary, share: float) -> Point:
    """The figures of a load."""

    def ms(name: str) -> tuple[float, float]:
        stats = getattr(summary, name)
        return (round(1e3 * stats.p50, 1), round(1e3 * stats.p99, 1)) if stats else (0.0, 0.0)

    return Point(
        rate, round(summary.goodput or 0.0, 3), round(summary.slo_attainment or 0.0, 3), summary.finished,
        summary.requests, round(summary.output_rate, 1), ms("ttft"), ms("tpot"), ms("lag")[1], round(share, 3),
    )  # fmt: skip


def measure(name: str, python: str, folder: Path, rates: Sequence[float], seconds: float) -> list[Point]:
    """Run one server through the rates; [] and a line if a peer does not start. Raises RuntimeError if Whorl does not."""
    points: list[Point] = []
    try:
        with server(name, python, folder, 0) as url:
            load(url, 4.0, 2.0, seed=-1)  # connections, compilation
            for rate in rates:
                points.append(load(url, rate, seconds, seed=round(100 * rate)))
                show(name, points[-1])
                if len(points) > 1 and max(p.attainment for p in points[-2:]) < 0.5:
                    break
    except RuntimeError as error:
        if name == "whorl":
            raise
        print(f"left out: {NAMES[name]}: {error}")
    return points


def show(name: str, p: Point) -> None:
    """Print the line of a rate: medians, 99th percentiles in brackets."""
    ttft, tpot = (f"{a:8,.1f} ({b:9,.1f}) ms" for a, b in (p.ttft, p.tpot))
    met = f"goodput {p.goodput:6.2f}/s  SLO met {p.attainment:4.0%}  {p.finished:4}/{p.requests:<4}"
    rest = f"{p.output_rate:7,.0f} tokens/s  TTFT {ttft}  TPOT {tpot}  lag {p.lag:5.1f} ms  client {p.client:4.0%}"
    print(f"{NAMES[name]:10} {p.rate:5g}/s  {met} {rest}", flush=True)


def draw(found: dict[str, list[Point]], file: Path) -> None:
    """Plot goodput and the median TTFT against the offered rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in found.items():
        style = {"color": COLOURS[name], "marker": "o", "linewidth": 2, "markersize": 5, "label": NAMES[name]}
        rates = [p.rate for p in points]
        left.plot(rates, [p.goodput for p in points], **style)
        right.plot(rates, [p.ttft[0] for p in points], **style)
    top = max(p.rate for points in found.values() for p in points)
    left.plot([0, top], [0, top], color="#c8ccd2", linestyle=":", linewidth=1)
    left.set_ylim(0, 1.2 * max(p.goodput for points in found.values() for p in points) + 0.1)
    left.set_ylabel("requests/s within 500 ms and 50 ms a token")
    right.set_ylabel("median time to first token, ms")
    right.set_yscale("log")
    right.axhline(1e3 * (SLO.ttft or 0), color="#c8ccd2", linestyle=":", linewidth=1)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("requests per second")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(file, dpi=140)


def claims(found: dict[str, list[Point]], quick: bool) -> None:
    """Print the claim: the highest goodput of each server."""
    amx = bool(torch.cpu._is_amx_tile_supported())  # type: ignore[attr-defined]
    bar, best = 1.2 if amx else 1.3, {name: max(p.goodput for p in points) for name, points in found.items()}
    peer = max((name for name in best if name != "whorl"), key=lambda name: best[name], default=None)
    other = best[peer] if peer else 0.0
    ratio = best["whorl"] / other if other else 0.0
    claim(
        "goodput under load, 16.9 M Llama in bf16: 500 ms to the first token, 50 ms per token",
        ours=best["whorl"], peer=other, unit="requests/s", ratio=ratio, bar=bar, quick=quick,
        ok=best["whorl"] >= bar * other, peer_name=NAMES[peer] if peer else "none",
        samples=[{name: list(map(asdict, p)) for name, p in found.items()}],
    )  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="", help="servers to run")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--quick", action="store_true")


def main() -> None:
    given = parse(__doc__, arguments, smoke={"quick": True, "rates": "8", "seconds": 0.5})
    if given.quick and not given.smoke:
        given.rates, given.seconds = "4,16", 5.0
    if given.draw:
        import matplotlib  # noqa: F401  (fails before the measurement, if it is not installed)
    pythons = interpreters(given.peer, [name for name in NAMES if name in TITLES], THREADS)
    found: dict[str, list[Point]] = {}
    if given.results and given.results.exists():
        kept = json.loads(given.results.read_text())
        found = {name: [Point(**p) for p in points] for name, points in kept.items()}
    folder = Path(tempfile.mkdtemp())
    try:
        if pythons or smoke():
            write_model(folder)
        for name, python in (pythons | {"whorl": sys.executable}).items():
            if name == "whorl" and not (found or given.only or given.results or smoke()):
                break  # no other server
            if not given.only or name in given.only.split(","):
                rates = list(map(float, given.rates.split(",")))
                if points := measure(name, python, folder, rates, given.seconds):
                    found[name] = points
        if given.results:
            given.results.write_text(json.dumps({name: list(map(asdict, p)) for name, p in found.items()}))
    finally:
        shutil.rmtree(folder)
    if given.draw:
        draw(found, given.draw)
    if "whorl" in found and (len(found) > 1 or smoke()):
        claims(found, given.quick)
    else:
        print("skipped: no claim without Whorl and another server (--peer NAME=PYTHON)")
        sys.exit(77)


if __name__ == "__main__":
    main()
