"""Memory bandwidth of decoding as a share of the machine's, and the engine's overhead per step.

    python bench/engine/decode_bandwidth.py [--quick] [--kind bfloat16]

With one sequence, a step of the 109.5 M model is dominated by reading every weight once. Tokens/s times the bytes of
the weights is the bandwidth used. The peer is the read bandwidth of two threads: the best of a sum and of a
matrix-vector product over 512 MB, which no cache holds. Bar: at least 60 %.

With 32 sequences, the overhead is the share of a decoding step outside the model and the sampler (scheduling, building
the batch, storing tokens), by the engine's own timers. Bar: under 10 % of the step.

Batches of completions (`EngineConfig.for_batch`, as evaluation and rollouts use it) draw several tokens of a row in one
native call. The last claims compare this with single steps: the quickstart's shape, prompts of 32 ids and up to 64 sampled
tokens. On a GPU only this part runs. Bar: 1.3.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.engine.support import models
from bench.engine.support.ours import ask, best_kind, bytes_per_weight, made

from whorl.engine.config import BATCH_BURST, EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.models import make_model
from whorl.plan.accounting.model_cost import decoder_config
from whorl.tracking.seeds import numpy_rng

THREADS = 2


def read_bandwidth(n_bytes: int = sized(1 << 29, 1 << 24), rounds: int = sized(5, 1)) -> float:
    """Bytes per second that two threads read."""
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
    """An engine after `steps` decoding steps of `rows` sequences, the newest entries of `stats.recent_steps`."""
    config = EngineConfig(
        max_num_seqs=rows, max_model_len=1024, kv_cache_tokens=rows * 1024, enable_prefix_caching=False
    )
    engine = made(name, kind, config, THREADS)
    for n, ids in enumerate(models.prompts(name, rows, 16)):
        engine.add(ask(n, ids, 1000))
    while engine.stats.output_tokens < rows:
        engine.step()
    for _ in range(sized(10, 1) + steps):
        engine.step()
    return engine


def batch_tokens_per_second(rows: int, prompts: int, burst: int, rounds: int) -> list[float]:
    """Tokens/s of each round of completions, `rows` at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = make_model(decoder_config(192, 3, 1024), torch.Generator(), torch.bfloat16)
    network.requires_grad_(False).eval().to(device)
    engine = Engine(network, EngineConfig.for_batch(rows, 128, decode_burst=burst))
    rng, found = numpy_rng(0, "bench", "burst"), []
    for seed in range(rounds + 1):  # the first one warms up
        ids = rng.integers(0, 1024, (prompts, 32)).tolist()
        began = time.perf_counter()
        made_now = engine.generate(
            ids, SamplingParams(temperature=1, top_p=1, seed=seed), max_tokens=sized(64, 4), stop_ids=range(8)
        )
        found.append(sum(len(one.tokens) for one in made_now) / (time.perf_counter() - began))
    return found[1:]


def burst_claims(rounds: int, quick: bool) -> None:
    """Several tokens in one call against one, in turn."""
    torch.set_num_threads(THREADS)
    for rows, prompts in sized(((32, 32), (32, 128), (128, 128)), ((2, 4),)):
        several, single = (
            batch_tokens_per_second(rows, prompts, burst, rounds) for burst in (BATCH_BURST, 1)
        )
        a, b = statistics.median(several), statistics.median(single)
        print(f"{prompts} completions, {rows} at a time: {a:,.0f} tokens/s, with single steps {b:,.0f}")
        claim(
            f"{prompts} completions, {rows} at a time, of a 3 x 192 model", ours=a, peer=b, unit="tokens/s", ratio=a / b,
            bar=1.3, ok=a >= 1.3 * b, samples=[{"several": several, "single": single}], quick=quick,
            peer_name="single steps", variant=f"burst-{rows}-{prompts}",
        )  # fmt: skip


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--kind", default=best_kind()),
        ),
    )
    burst_claims(sized(3 if given.quick else 9, 1), given.quick)
    if torch.cuda.is_available():
        return
    steps = sized(20 if given.quick else 100, 3)
    memory = [read_bandwidth()]
    engine = decoding("109M", given.kind, 1, steps)
    seconds = statistics.median(s.seconds for s in list(engine.stats.recent_steps)[-steps:])
    memory.append(read_bandwidth())
    weights = sum(p.numel() for p in engine.model.parameters()) * bytes_per_weight(given.kind)
    used, best = weights / seconds, max(memory)
    print(f"{1 / seconds:.1f} tokens/s, {weights / 1e6:.0f} MB per token, memory {best / 1e9:.1f} GB/s")
    claim(
        f"memory bandwidth used in decoding one sequence (109.5 M, {given.kind})", ours=used / 1e9, peer=best / 1e9,
        unit="GB/s", ratio=used / best, bar=0.6, ok=used >= 0.6 * best,
        samples=[{"tokens/s": 1 / seconds, "memory": memory}], quick=given.quick,
        peer_name="read bandwidth",
    )  # fmt: skip
    for name in ("14M", "109M"):
        n = steps if name == "14M" else sized(max(10, steps // 4), 3)
        found = list(decoding(name, given.kind, 32, n).stats.recent_steps)[-n:]
        model = statistics.median(s.model_seconds for s in found)
        sample = statistics.median(s.sample_seconds for s in found)
        other = statistics.median(s.seconds - s.model_seconds - s.sample_seconds for s in found)
        whole = model + sample + other
        print(
            f"{name}: model {1e3 * model:.2f} ms, sampler {1e3 * sample:.2f} ms, engine {1e3 * other:.2f} ms per step"
        )
        claim(
            f"engine's share of a decoding step of 32 sequences ({name}, {given.kind})", ours=1e3 * other, peer=1e3 * whole,
            unit="ms", ratio=other / whole, bar=0.1, ok=other < 0.1 * whole,
            samples=[{"model": 1e3 * model, "sampler": 1e3 * sample, "engine": 1e3 * other}], quick=given.quick,
            peer_name="whole step", variant="overhead" if name == "14M" else "overhead-110M",
        )  # fmt: skip


if __name__ == "__main__":
    main()
