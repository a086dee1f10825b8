"""The native step (`engine/cpu`): its memory bandwidth, its matrix products and whole steps against the torch path.

    python bench/engine/native_step.py [--quick] [--model 14M|110M]

The bandwidth is measured in alternation with the steps, by a loop that only reads the memory of the packed weights.
Products: two matrices of the model with 1 to 128 rows in every weight format; the peer is `F.linear`. Steps: rows of 192
positions decode one token each; a prompt of 128 tokens is prefilled.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.engine.cache.pages import InputBatch
from whorl.engine.cpu import NativeStep, build, layout
from whorl.engine.model.runner import ModelRunner
from whorl.machine.device_probe import probe, usable_cores
from whorl.models import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

BAR = 0.6
PAGE, CONTEXT = 32, 192
# d_model, layers, hidden, vocabulary
SHAPES = sized(
    {"14M": (384, 6, 1024, 8192), "110M": (768, 12, 2048, 32000)},
    {"14M": (128, 2, 256, 1024), "110M": (128, 2, 256, 1024)},
)


def llama(name: str) -> Transformer:
    """Random weights, tied, in bf16."""
    d, layers, hidden, vocab = SHAPES[name]
    heads = AttentionConfig(n_heads=d // 64, n_kv_heads=d // 64, head_dim=64)
    config = TransformerConfig(
        vocab_size=vocab, d_model=d, n_layers=layers, mlp_hidden=hidden, mixers={"heads": heads}, tie_embeddings=True
    )  # fmt: skip
    model = Transformer(config, torch.Generator().manual_seed(0), torch.bfloat16).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape) * p.shape[1] ** -0.5)
    return model


def rows_of(n: int, context: int, tokens: int) -> tuple[InputBatch, int]:
    """A batch of n rows with `context` cached positions and `tokens` new ones, and the number of pages it uses."""
    per = -(-(context + tokens) // PAGE)
    pages = np.random.default_rng(0).permutation(n * per).reshape(n, per).astype(np.int32)
    total = n * tokens
    batch = InputBatch(
        torch.arange(total) % 1000, torch.arange(context, context + tokens).repeat(n), list(range(0, total + 1, tokens)),
        [context + tokens] * n, list(range(n)), [pages], torch.arange(tokens - 1, total, tokens), n * (tokens == 1),
    )  # fmt: skip
    return batch, n * per


def in_turn(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Run the contenders in alternation for `seconds` each. Returns their times."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    while min(map(sum, times.values())) < seconds or min(map(len, times.values())) < 3:
        for name, run in contenders.items():
            if sum(times[name]) > seconds and len(times[name]) >= 3:
                continue
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def products(library: ctypes.CDLL, n: int, k: int, threads: int, seconds: float) -> None:
    """Print the rates of one matrix by weight format and rows."""
    weight = torch.randn(n, k) * k**-0.5
    half, handle, packed = weight.bfloat16(), library.whorl_open(), {}
    for kind in get_args(layout.WeightKind):
        matrix = layout.make_matrix(kind, 32 if kind == "int4" else None, n, k)
        arena = layout.Arena(library, [matrix])
        library.whorl_pack(ctypes.byref(matrix), weight.data_ptr(), None, None, threads)
        packed[kind] = matrix, arena
    for m in sized((1, 8, 32, 128), (1, 8)):
        x, y = torch.randn(m, k), torch.empty(m, n)
        short = x.bfloat16()

        def ours(matrix: layout.Matrix, x: torch.Tensor = x, y: torch.Tensor = y, m: int = m) -> None:
            library.whorl_product(
                handle, ctypes.byref(matrix), x.data_ptr(), m, y.data_ptr(), 0, 0.0, threads
            )

        contenders: dict[str, Callable[[], object]] = {
            kind: lambda matrix=matrix: ours(matrix)  # type: ignore[misc]
            for kind, (matrix, _) in packed.items()
        }
        contenders["torch float32"] = lambda x=x: torch.nn.functional.linear(x, weight)  # type: ignore[misc]
        contenders["torch bfloat16"] = lambda x=short: torch.nn.functional.linear(x, half)  # type: ignore[misc]
        times = in_turn(contenders, seconds)
        line = f"  {n} x {k}, {m:3d} rows:"
        for name, each in times.items():
            t = statistics.median(each)
            line += f"  {name} {t * 1e6:.0f} us"
            line += (
                f" ({packed[name][1].n_bytes / t / 1e9:.0f} GB/s)"
                if m == 1 and name in packed
                else f" ({2e-9 * m * n * k / t:.0f} G/s)"
            )
        print(line, flush=True)
    library.whorl_close(handle)


def main() -> None:
    options = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--model", choices=list(SHAPES), default="110M"),
        ),
        smoke={"quick": True},
    )
    quick, seconds = options.quick, sized(0.05 if options.quick else 0.4, 0.001)
    probe()
    library, threads = build.library(), max(1, usable_cores())
    torch.set_num_threads(threads)
    if library is None:
        print("skipped: needs a C++ compiler")
        sys.exit(77)
    d, _, hidden, vocab = SHAPES[options.model]
    for n, k in ((2 * hidden, d), (vocab, d)):
        products(library, n, k, threads, seconds / 4)
    model = llama(options.model)
    handle = library.whorl_open()
    steps = {kind: NativeStep(model, PAGE, kind, threads=threads) for kind in ("bfloat16", "int8", "int4")}
    shares: dict[str, float] = {}
    samples: list[str] = []
    for n, context, tokens in ((1, CONTEXT, 1), (8, CONTEXT, 1), (32, CONTEXT, 1), (1, 0, 128)):
        batch, pages = rows_of(n, context, tokens)
        runner = ModelRunner(model, {None: pages}, PAGE, n, context + tokens)
        contenders: dict[str, Callable[[], object]] = {}
        for kind, step in steps.items():
            contenders[kind] = lambda s=step, b=batch, r=runner: s.run(b, r.layers, r.group_of)  # type: ignore[misc]
            if n == tokens == 1:
                at, size = step.weights.arena.address, step.weights.arena.n_bytes
                contenders[f"reading {kind}"] = lambda a=at, s=size: library.whorl_read(handle, a, s, threads)  # type: ignore[misc]
        contenders["torch"] = lambda b=batch, r=runner: r.run(b)  # type: ignore[misc]
        times = {name: statistics.median(each) for name, each in in_turn(contenders, seconds).items()}
        text = f"{n} rows, {tokens} new: " + ", ".join(
            f"{name} {1e3 * t:.2f} ms" for name, t in times.items()
        )
        print(text, flush=True)
        samples.append(text)
        if n == tokens == 1:
            for kind, step in steps.items():
                read = (step.n_bytes + runner.n_bytes) / times[kind]
                peak = step.n_bytes / times[f"reading {kind}"]
                shares[kind] = read / peak
                text = f"  {kind}: {read / 1e9:.0f} of {peak / 1e9:.0f} GB/s, {1 / times[kind]:.0f} tokens/s"
                print(text, flush=True)
                samples.append(text)
                if kind == "bfloat16":
                    ours, peer = read, peak
    claim(
        f"memory bandwidth of a native decoding step of one row, {options.model}, bf16",
        ours=ours / 1e9, peer=peer / 1e9, unit="GB/s", ratio=shares["bfloat16"], bar=BAR,
        ok=shares["bfloat16"] >= BAR, samples=samples, quick=quick,
        peer_name="reading the same memory",
    )  # fmt: skip


if __name__ == "__main__":
    main()
