"""Disaggregated prefill and decode against one engine on the same two cores: time between tokens while prompts enter.

    python bench/engine/disaggregation.py [--quick]

Eight requests decode; a prompt of 1,536 tokens arrives now and then. The same requests, at the same moments, go to

    mixed           one engine on both cores, with chunked prefill
    unpaced         the same, with chunks as large as the step's token budget allows
    disaggregated   one prefill process and one decode process with a core each; KV pages are transferred

Bar: the 99th percentile of the mixed engine's time between two tokens of one request. Printed with it: the median, the
long prompts' time to first token, and the decoded tokens/s.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse_quick, sized

from whorl.engine.engine import Engine, EngineConfig
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.models import Transformer
from whorl.plan.accounting.model_cost import decoder_config
from whorl.serve.worker.disaggregated import DisaggregatedEngine
from whorl.tracking.seeds import generator

WRITERS, LONG, BUDGET = 8, sized(1536, 128), 256


def make(role: str, slowdown: float = 1.6) -> Engine:
    """An engine of a model of about 10 M parameters. A prefill process takes large chunks: it runs no decode steps."""
    model = Transformer(decoder_config(*sized((320, 6, 4096), (64, 2, 4096))), generator(0, "bench")).eval()
    sizes = EngineConfig(
        max_num_seqs=16, max_model_len=2560, kv_cache_tokens=40960,
        max_num_batched_tokens=512 if role == "prefill" else BUDGET, max_decode_slowdown=slowdown,
    )  # fmt: skip
    return Engine(model, sizes)


def requests(tokens: int, prompts: int, turn: int) -> tuple[list[Request], list[Request]]:
    """(requests that decode, requests with a long prompt). Ids differ between turns, so no prompt is cached."""
    draw = torch.Generator().manual_seed(turn)
    ids = lambda n: tuple(torch.randint(0, 4000, (n,), generator=draw).tolist())  # noqa: E731
    writers = [
        Request(id=f"{turn} w{i}", ids=ids(48), max_tokens=tokens, sampling=SamplingParams(temperature=0))
        for i in range(WRITERS)
    ]
    long = [
        Request(id=f"{turn} l{i}", ids=ids(LONG), max_tokens=4, sampling=SamplingParams(temperature=0))
        for i in range(prompts)
    ]
    return writers, long


def play(engine: Any, tokens: int, prompts: int, turn: int) -> dict[str, float]:
    """One run: a long prompt is added each time the decoding requests finish another share of their tokens."""
    writers, waiting = requests(tokens, prompts, turn)
    for r in writers:
        engine.add(r)
    began = time.perf_counter()
    last: dict[str, float] = {}
    gaps, first, asked, written = list[float](), list[float](), dict[str, float](), 0
    every = WRITERS * tokens / (prompts + 1)
    while engine.busy:
        for delta in engine.step():
            now = time.perf_counter()
            name = delta.request_id
            if " w" in name:
                written += len(delta.tokens)
                if name in last and delta.tokens:
                    gaps.append((now - last[name]) / len(delta.tokens))
                last[name] = now
            elif delta.tokens and name in asked:
                first.append(now - asked.pop(name))
        if waiting and written >= every * (prompts - len(waiting) + 1):
            asked[waiting[0].id] = time.perf_counter()
            engine.add(waiting.pop(0))
    gaps.sort()
    return {
        "p50": 1e3 * gaps[len(gaps) // 2],
        "p99": 1e3 * gaps[int(0.99 * len(gaps))],
        "worst": 1e3 * gaps[-1],
        "ttft": 1e3 * sorted(first)[len(first) // 2],
        "tokens/s": written / (max(last.values()) - began),
    }


def main() -> None:
    quick = parse_quick(__doc__)
    tokens, prompts, rounds = sized((120, 3, 1) if quick else (240, 6, 3), (16, 2, 1))
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    mixed, unpaced = make("both"), make("both", slowdown=1e9)
    found: dict[str, list[dict[str, float]]] = {"mixed": [], "unpaced": [], "disaggregated": []}
    # By module name: the worker processes cannot import this script's `__main__`.
    from bench.engine.disaggregation import make as make_engine

    with DisaggregatedEngine(make_engine) as disaggregated:
        disaggregated.wait_until_ready()
        contenders: dict[str, Callable[[int], dict[str, float]]] = {
            "mixed": lambda turn: play(mixed, tokens, prompts, turn),
            "unpaced": lambda turn: play(unpaced, tokens, prompts, turn),
            "disaggregated": lambda turn: play(disaggregated, tokens, prompts, turn),
        }
        for turn in range(rounds + 1):
            for name, run in contenders.items():
                got = run(turn)
                if turn:  # turn 0 warms up
                    found[name].append(got)
                    print(turn, name, {key: round(value, 1) for key, value in got.items()}, flush=True)
    print(f"{'':13}" + "".join(f"{key:>10}" for key in found["disaggregated"][0]))
    middle = {
        name: {key: sorted(run[key] for run in runs)[len(runs) // 2] for key in runs[0]}
        for name, runs in found.items()
    }
    for name, run in middle.items():
        print(f"{name:13}" + "".join(f"{value:10.1f}" for value in run.values()))
    ours, peer = middle["disaggregated"]["p99"], middle["mixed"]["p99"]
    claim(
        "99th percentile between tokens while long prompts are prefilled: disaggregated against one engine",
        ours=ours, peer=peer, unit="ms", ratio=ours / peer, bar=1.0, ok=ours < peer, quick=quick, samples=[found],
        peer_name="one engine",
    )  # fmt: skip


if __name__ == "__main__":
    main()
