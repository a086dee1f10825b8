"""Static, dynamic and continuous batching of the same requests over the same model: throughput, and who waits how long.

.venv/bin/python bench/engine/batching.py [--quick] [--draw docs/engine_batching.png]

Requests of mixed lengths (log-normal: most short, some long) arrive at random times at several rates; one of them lets all
arrive at once. The schemes are `bench/engine/support/static_batching.py` and the engine; a batch and the engine hold the same number of
sequences, the model is that of 4.3 M parameters (`_engine_models.py`) in the type that is faster here, greedy. The clock
jumps over times in which nobody computes (`_engine_drive.py`).

The bar: with all requests there at once, continuous batching finishes them at 2 x the throughput of static batching at
least; and it has the lower 95th percentile of latency, there and at every rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.engine.support import models
from bench.engine.support.load_driver import Clock, drive, poisson
from bench.engine.support.ours import made
from bench.engine.support.static_batching import Batches

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.machine.device_probe import probe
from whorl.models.transformer import Transformer
from whorl.tracking.seeds import numpy_rng

SIZE, MODEL, PATIENCE = 16, "4M", 0.25
SCHEMES = ("static", "dynamic", "continuous")
COLOURS = {"static": "#8a8f98", "dynamic": "#e0792b", "continuous": "#0f6a73"}


def requests(n: int) -> list[Request]:
    """Of mixed lengths: prompts of about 64 tokens, answers of about 64, the longest of each many times that."""
    rng, vocab = numpy_rng(0, "bench", "batching"), models.config(MODEL).vocab_size
    ins = np.clip(64 * np.exp(0.8 * rng.standard_normal(n)), 4, 512).astype(int).tolist()
    outs = np.clip(64 * np.exp(1.0 * rng.standard_normal(n)), 4, 512).astype(int).tolist()
    return [
        Request(
            id=str(k), ids=tuple(rng.integers(0, vocab, a).tolist()), max_tokens=b, sampling=SamplingParams(temperature=0)
        )
        for k, (a, b) in enumerate(zip(ins, outs, strict=True))
    ]  # fmt: skip


def measured(name: str, network: Transformer, asked: list[Request], rate: float) -> dict[str, float]:
    """Tokens a second and latencies of one scheme at one rate."""
    clock = Clock()
    scheme: Engine | Batches
    if name == "continuous":
        config = EngineConfig(max_num_seqs=SIZE, max_model_len=1024, kv_cache_tokens=SIZE * 1024)
        scheme = made(network, "torch float32", config, torch.get_num_threads(), clock=clock)
    else:
        scheme = Batches(
            network, SIZE, max_wait_seconds=PATIENCE if name == "dynamic" else float("inf"), clock=clock
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
    if isinstance(scheme, Batches):
        found["useful"] = scheme.useful_positions / scheme.computed_positions
    return found


def draw(table: dict[str, dict[float, dict[str, float]]], file: Path, title: str) -> None:
    """Two panels: throughput, and the 95th percentile of latency, over the rate of arrivals."""
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
    left.set_ylabel("output tokens a second (dotted: all at once)")
    right.set_ylabel("95th percentile of latency, seconds")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("requests that arrive a second")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a second one gains little here, and nothing where others want it
    n, rounds = (24, 1) if given.quick else (64, 1)
    network, asked = models.model(MODEL), requests(n)
    measured("continuous", network, asked[:4], float("inf"))
    at_once: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEMES}
    for number in range(rounds):
        for name in SCHEMES if number % 2 == 0 else reversed(SCHEMES):
            at_once[name].append(measured(name, network, asked, float("inf")))
    table: dict[str, dict[float, dict[str, float]]] = {}
    for name, found in at_once.items():
        middle = sorted(found, key=lambda one: one["tokens_per_second"])[len(found) // 2]
        table[name] = {float("inf"): middle}
    # Rates by what the engine can do: from half idle to more than anybody can.
    most = table["continuous"][float("inf")]["tokens_per_second"] / statistics.fmean(
        r.max_tokens for r in asked
    )
    for share in (0.5,) if given.quick else (0.3, 0.6, 0.9):
        for name in SCHEMES:
            table[name][round(share * most, 2)] = measured(name, network, asked, share * most)
    print(f"{n} requests, {SIZE} at once, {probe().cpu}")
    for rate in table["static"]:
        for name in SCHEMES:
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
    later = [
        rate for rate in table["static"] if table["continuous"][rate]["p95"] >= table["static"][rate]["p95"]
    ]
    ratio = ours["tokens_per_second"] / static["tokens_per_second"]
    claim(
        "continuous against static batching on mixed lengths, at a lower 95th percentile of latency",
        ours=round(ours["tokens_per_second"], 1), peer=round(static["tokens_per_second"], 1), unit="tokens/s",
        ratio=ratio, bar=2.0, ok=ratio >= 2.0 and not later,
        samples=[{"rate": str(rate), **{name: table[name][rate] for name in SCHEMES}} for rate in table["static"]],
        quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
