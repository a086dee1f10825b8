"""How near decoding comes to what the memory allows, and what the engine adds to the model's own step.

.venv/bin/python bench/engine/decode_bandwidth.py [--quick] [--kind bfloat16]

At one sequence a step of the 109.5 M model reads every weight once, and hardly anything else counts: tokens a second times
the bytes of the weights is bandwidth used, held against what this machine's memory gives to two threads that only read (the
best of a sum and of a product with a vector over 512 MB, no part of which a cache could hold). Bar: at least 60 %.

At 32 sequences: the share of a decoding step that is not the model's (scheduling, building the batch, taking tokens in; the
sampler is told apart), by the engine's own clock. Bar: under 10 % of the step, without the sampler's products with logits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.engine.support import models
from bench.engine.support.ours import ask, best_kind, bytes_per_weight, made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine

THREADS = 2


def read_bandwidth(n_bytes: int = 1 << 29, rounds: int = 5) -> float:
    """Bytes a second that two threads can read."""
    torch.set_num_threads(THREADS)
    matrix = torch.ones(n_bytes // 4 // 4096, 4096)
    vector = torch.ones(4096)
    best = 0.0
    for work in (matrix.sum, lambda: matrix @ vector):
        work()
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            best = max(best, n_bytes / (time.perf_counter() - began))
    return best


def decoding(name: str, kind: str, rows: int, steps: int) -> Engine:
    """An engine after so many decoding steps of `rows` sequences; its newest `stats.recent` are of those."""
    config = EngineConfig(
        max_num_seqs=rows, max_model_len=1024, kv_cache_tokens=rows * 1024, enable_prefix_caching=False
    )
    engine = made(name, kind, config, THREADS)
    for n, ids in enumerate(models.prompts(name, rows, 16)):
        engine.add(ask(n, ids, 1000))
    while engine.stats.output_tokens < rows:
        engine.step()
    for _ in range(10 + steps):
        engine.step()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", default=best_kind())
    given = parser.parse_args()
    steps = 20 if given.quick else 100
    memory = [read_bandwidth()]
    engine = decoding("109M", given.kind, 1, steps)
    seconds = statistics.median(s.seconds for s in list(engine.stats.recent_steps)[-steps:])
    memory.append(read_bandwidth())
    weights = sum(p.numel() for p in engine.model.parameters()) * bytes_per_weight(given.kind)
    used, best = weights / seconds, max(memory)
    print(f"{1 / seconds:.1f} tokens/s, {weights / 1e6:.0f} MB a token, memory {best / 1e9:.1f} GB/s")
    claim(
        f"memory bandwidth used in decoding one sequence (109.5 M, {given.kind})", ours=used / 1e9, peer=best / 1e9,
        unit="GB/s", ratio=used / best, bar=0.6, ok=used >= 0.6 * best,
        samples=[{"tokens/s": 1 / seconds, "memory": memory}], quick=given.quick,
    )  # fmt: skip
    for name in ("14M", "109M"):
        n = steps if name == "14M" else max(10, steps // 4)
        found = list(decoding(name, given.kind, 32, n).stats.recent_steps)[-n:]
        model = statistics.median(s.model_seconds for s in found)
        sample = statistics.median(s.sample_seconds for s in found)
        other = statistics.median(s.seconds - s.model_seconds - s.sample_seconds for s in found)
        whole = model + sample + other
        print(
            f"{name}: model {1e3 * model:.2f} ms, sampler {1e3 * sample:.2f} ms, engine {1e3 * other:.2f} ms a step"
        )
        claim(
            f"engine's share of a decoding step of 32 sequences ({name}, {given.kind})", ours=1e3 * other, peer=1e3 * whole,
            unit="ms", ratio=other / whole, bar=0.1, ok=other < 0.1 * whole,
            samples=[{"model": 1e3 * model, "sampler": 1e3 * sample, "engine": 1e3 * other}], quick=given.quick,
        )  # fmt: skip


if __name__ == "__main__":
    main()
