"""Static, dynamic and continuous batching of the same requests over one model: throughput and latency.

    python bench/engine/batching.py [--draw docs/engine_batching.png]
    python bench/engine/batching.py --quick     # 24 requests of half the length, without dynamic batching

Requests of mixed lengths (log-normal) arrive at random times at several rates; in one run all arrive at once. The peers
are the schemes of `bench/engine/support/static_batching.py`. All schemes hold the same number of sequences and decode
greedily with a model of 4.3 M parameters in float32. The clock skips idle time (`bench/engine/support/load_driver.py`).

Bar: with all requests present at the start, continuous batching has at least 2 x the throughput of static batching. Its
95th percentile of latency is lower there and at every rate.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke
from bench.engine.support import models
from bench.engine.support.load_driver import Clock, drive, poisson
from bench.engine.support.ours import made
from bench.engine.support.static_batching import StaticBatchEngine

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.machine.device_probe import probe
from whorl.models.transformer import Transformer
from whorl.tracking.seeds import numpy_rng

SIZE, MODEL, MAX_WAIT = sized(16, 4), "4M", 0.25
SCHEMES = ("static", "dynamic", "continuous")
COLOURS = {"static": "#8a8f98", "dynamic": "#e0792b", "continuous": "#0f6a73"}


def requests(n: int, median: int, longest: int) -> list[Request]:
    """Requests of log-normal lengths: prompts and outputs with a median of `median` tokens and at most `longest`."""
    rng, vocab = numpy_rng(0, "bench", "batching"), models.config(MODEL).vocab_size
    ins = np.clip(median * np.exp(0.8 * rng.standard_normal(n)), 4, longest).astype(int).tolist()
    outs = np.clip(median * np.exp(1.0 * rng.standard_normal(n)), 4, longest).astype(int).tolist()
    return [
        Request(
            id=str(k), ids=tuple(rng.integers(0, vocab, a).tolist()), max_tokens=b, sampling=SamplingParams(temperature=0)
        )
        for k, (a, b) in enumerate(zip(ins, outs, strict=True))
    ]  # fmt: skip


def measured(name: str, network: Transformer, asked: list[Request], rate: float) -> dict[str, float]:
    """Tokens/s and latency percentiles of one scheme at one arrival rate."""
    clock = Clock()
    scheme: Engine | StaticBatchEngine
    if name == "continuous":
        config = EngineConfig(max_num_seqs=SIZE, max_model_len=1024, kv_cache_tokens=SIZE * 1024)
        scheme = made(network, "torch float32", config, torch.get_num_threads(), clock=clock)
    else:
        scheme = StaticBatchEngine(
            network, SIZE, max_wait_seconds=MAX_WAIT if name == "dynamic" else float("inf"), clock=clock
        )
    began = clock()
    due = [began] * len(asked) if rate == float("inf") else [began + t for t in poisson(len(asked), rate)]
    answers = drive(scheme, asked, due, clock)
    assert all(len(answers[r.id].ids) == r.max_tokens for r in asked), name
    end = max(one.at[-1] for one in answers.values())
    latencies = [one.latency for one in answers.values()]
    found = {
        "tokens_per_second": sum(r.max_tokens for r in asked) / (end - began),
        "p50": float(np.percentile(latencies, 50)),
        "p95": float(np.percentile(latencies, 95)),
    }
    if isinstance(scheme, StaticBatchEngine):
        found["useful"] = scheme.useful_positions / scheme.computed_positions
    return found


def draw(table: dict[str, dict[float, dict[str, float]]], file: Path, title: str) -> None:
    """Plot throughput and the 95th percentile of latency against the arrival rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in SCHEMES:
        rates = sorted(rate for rate in table[name] if rate != float("inf"))
        style = {"color": COLOURS[name], "marker": "o", "linewidth": 2, "markersize": 5}
        left.plot(rates, [table[name][r]["tokens_per_second"] for r in rates], label=name, **style)
        right.plot(rates, [table[name][r]["p95"] for r in rates], label=name, **style)
        at_once = table[name][float("inf")]["tokens_per_second"]
        left.axhline(at_once, color=COLOURS[name], linestyle=":", linewidth=1)
    left.set_ylabel("output tokens/s (dotted: all at once)")
    right.set_ylabel("95th percentile of latency, seconds")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("arrivals per second")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=140)


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (p.add_argument("--quick", action="store_true"), p.add_argument("--draw", type=Path)),
        smoke={"quick": True},
    )
    torch.set_num_threads(1)  # a second thread gains little at these sizes
    n, rounds = sized((24, 1) if given.quick else (64, 1), (6, 1))
    schemes = [name for name in SCHEMES if smoke() or not given.quick or name != "dynamic"]
    median, longest = sized((32, 256) if given.quick else (64, 512), (8, 32))
    network, asked = models.model(MODEL), requests(n, median, longest)
    measured("continuous", network, asked[:4], float("inf"))
    at_once: dict[str, list[dict[str, float]]] = {name: [] for name in schemes}
    for number in range(rounds):
        for name in schemes if number % 2 == 0 else reversed(schemes):
            at_once[name].append(measured(name, network, asked, float("inf")))
    table: dict[str, dict[float, dict[str, float]]] = {}
    for name, found in at_once.items():
        middle = sorted(found, key=lambda one: one["tokens_per_second"])[len(found) // 2]
        table[name] = {float("inf"): middle}
    # Arrival rates as shares of the engine's throughput, from idle to near saturation.
    most = table["continuous"][float("inf")]["tokens_per_second"] / statistics.fmean(
        r.max_tokens for r in asked
    )
    for share in (0.5,) if given.quick else (0.3, 0.6, 0.9):
        for name in schemes:
            table[name][round(share * most, 2)] = measured(name, network, asked, share * most)
    print(f"{n} requests, {SIZE} at once, {probe().cpu}")
    for rate in table["static"]:
        for name in schemes:
            one = table[name][rate]
            print(
                f"{rate:8.2f}/s  {name:11} " + "  ".join(f"{key} {value:9.3f}" for key, value in one.items())
            )
    if given.draw:
        draw(
            table,
            given.draw,
            f"{n} requests of mixed lengths, {SIZE} sequences at once, 4.3 M parameters, one core",
        )
    static, ours = table["static"][float("inf")], table["continuous"][float("inf")]
    slower = [
        rate for rate in table["static"] if table["continuous"][rate]["p95"] >= table["static"][rate]["p95"]
    ]
    ratio = ours["tokens_per_second"] / static["tokens_per_second"]
    claim(
        "continuous against static batching on mixed lengths, at a lower 95th percentile of latency",
        ours=round(ours["tokens_per_second"], 1), peer=round(static["tokens_per_second"], 1), unit="tokens/s",
        ratio=ratio, bar=2.0, ok=ratio >= 2.0 and not slower,
        samples=[{"rate": str(rate), **{name: table[name][rate] for name in schemes}} for rate in table["static"]],
        quick=given.quick, peer_name="static batching",
    )  # fmt: skip


if __name__ == "__main__":
    main()
