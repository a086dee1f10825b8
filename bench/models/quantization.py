"""Bits per byte, size and speed of a trained model in each quantization scheme.

    python bench/models/quantization.py --store STORE [--model quickstart/pretrain] [--folder DIR] [--every 4]
                                        [--seconds 110] [--time] [--quick]

Held-out files of the model's token set are scored (every `--every`-th), with rounding to nearest and with calibration
(GPTQ) on 64 rows of 512 training tokens. Results are stored in DIR. The same command continues with the missing ones,
for `--seconds`.

`--time` times a step of 1, 8 and 32 rows through the 48 matrices of a decoder of 12 x 768 (85 M weights, more than any
cache). Schemes alternate; figures are medians on one thread. Each uses torch's fastest operation, as `QuantizedLinear`
selects it. The engine's kernels are measured in `bench/engine/native_step.py`.

Bar: calibration loses at most half of the bits that int4 in groups of 64 loses with rounding to nearest.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse, sized
from bench.models._smoke_store import open_store

from whorl.engine.cache.kv_int8 import dequantize_kv, quantize_kv
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.models import load_model, save_model
from whorl.models.compression.gptq import quantize_model
from whorl.models.compression.quantize import QuantizationConfig
from whorl.nn import Linear
from whorl.nn.attention import backends
from whorl.nn.quantized_linear import QuantizedLinear
from whorl.recipes.steps.quantize import calibration_rows
from whorl.tokens.shards import TokenSet

BASE, NEAREST, CALIBRATED = "fp32", "int4, groups of 64", "int4, groups of 64, calibrated"
KINDS: dict[str, Any] = {
    BASE: {},
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"scheme": QuantizationConfig()},
    "int8, groups of 64": {"scheme": QuantizationConfig(group_size=64)},
    "int8, dynamic": {"scheme": QuantizationConfig(dynamic=True)},
    "fp8, dynamic (emulated)": {"scheme": QuantizationConfig(format="fp8", dynamic=True)},
    "int4, a scale a row": {"scheme": QuantizationConfig(format="int4")},
    "int4, a scale a row, calibrated": {"scheme": QuantizationConfig(format="int4", rounding="calibrated")},
    NEAREST: {"scheme": QuantizationConfig(format="int4", group_size=64)},
    CALIBRATED: {"scheme": QuantizationConfig(format="int4", group_size=64, rounding="calibrated")},
    "int4, groups of 32, calibrated": {
        "scheme": QuantizationConfig(format="int4", group_size=32, rounding="calibrated")
    },
    "int8 keys and values": {"kv": True},
    "int8, head and tables too": {"scheme": QuantizationConfig(head=True, ngram=True)},
    "int4 calibrated, head, tables, keys and values int8": {
        "scheme": QuantizationConfig(
            format="int4", group_size=64, rounding="calibrated", head=True, ngram=True
        ),
        "kv": True,
    },
}


@contextmanager
def int8_cache(enabled: bool) -> Iterator[None]:
    """Within it, attention uses keys and values rounded to int8."""
    original = backends.causal_attention

    def rounded(q: Any, k: Any, v: Any, segments: Any = None) -> Any:
        return original(
            q, dequantize_kv(quantize_kv(k), k.dtype), dequantize_kv(quantize_kv(v), v.dtype), segments
        )

    if enabled:
        backends.causal_attention = rounded
    try:
        yield
    finally:
        backends.causal_attention = original


def measure(kind: dict[str, Any], folder: Path, tokens: TokenSet, every: int) -> dict[str, Any]:
    """Bits per byte, bytes of the blocks' matrices, bytes of the model's file."""
    model = load_model(folder, kind.get("dtype", torch.float32))
    began = time.perf_counter()
    if scheme := kind.get("scheme"):
        rows = (
            calibration_rows(tokens, *sized((64, 512), (8, 64)), 0) if scheme.rounding == "calibrated" else []
        )
        quantize_model(model, scheme, rows)
    seconds = time.perf_counter() - began
    matrices = 0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and name.startswith("blocks."):
            matrices += module.codes.nbytes + module.scales.nbytes
        elif isinstance(module, Linear) and name.startswith("blocks."):
            matrices += module.weight.nbytes
    with tempfile.TemporaryDirectory() as place:
        save_model(model, Path(place) / "model")
        size = (Path(place) / "model" / "model.safetensors").stat().st_size
    test = tokens.split("test")
    chosen = range(0, test.n_documents, every)
    with int8_cache(bool(kind.get("kv"))):
        nats = sum(document_nats(model, (test.document(n) for n in chosen), 512))
    n_bytes = sum(int(test.documents["bytes"][n].as_py()) for n in chosen)
    return {
        "bits_per_byte": bits_per_byte(nats, n_bytes), "of_bytes": n_bytes, "matrices": matrices, "file": size,
        "seconds": seconds,
    }  # fmt: skip


SHAPES = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]  # d_in, d_out
TIMED = {
    "fp32": (None, torch.float32),
    "bf16": (None, torch.bfloat16),
    "int8, weights only, bf16 rows": (QuantizationConfig(), torch.bfloat16),
    "int4, groups of 64, bf16 rows": (QuantizationConfig(format="int4", group_size=64), torch.bfloat16),
    "int8, dynamic, fp32 rows": (QuantizationConfig(dynamic=True), torch.float32),
}


@torch.inference_mode()
def timed(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """By name: milliseconds of a step through all matrices by rows, and their bytes."""
    torch.set_num_threads(1)
    stacks: dict[str, list[Any]] = {name: [] for name in TIMED}
    for number in range(layers):
        for d_in, d_out in SHAPES:
            plain = Linear(d_in, d_out, std=0.02, generator=torch.Generator().manual_seed(number))
            for name, (scheme, dtype) in TIMED.items():
                if scheme is None:
                    layer = Linear(d_in, d_out, std=0.0)
                    layer.weight.data = plain.weight.data.to(dtype).clone()
                    stacks[name].append(layer)
                else:
                    stacks[name].append(
                        QuantizedLinear.from_linear(
                            plain, scheme.format, scheme.group_size, dynamic=scheme.dynamic
                        )
                    )
    found: dict[str, dict[str, float]] = {name: {} for name in TIMED}
    for rows in (1, 8, 32):
        times: dict[str, list[float]] = {name: [] for name in TIMED}
        for turn in range(rounds + 1):
            for name, (_, dtype) in TIMED.items():
                inputs = {d: torch.randn(rows, d).to(dtype) for d in (768, 3072)}
                began = time.perf_counter()
                for layer in stacks[name]:
                    layer(
                        inputs[
                            layer.weight.shape[1] if not isinstance(layer, QuantizedLinear) else layer.d_in
                        ]
                    )
                if turn:
                    times[name].append(time.perf_counter() - began)
        for name, each in times.items():
            found[name][str(rows)] = sorted(each)[len(each) // 2] * 1e3
    for name, stack in stacks.items():
        found[name]["bytes"] = sum(
            m.codes.nbytes + m.scales.nbytes if isinstance(m, QuantizedLinear) else m.weight.nbytes
            for m in stack
        )
    return found


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--store"),
            p.add_argument("--model", default="quickstart/pretrain"),
            p.add_argument("--folder", type=Path),
            p.add_argument("--every", type=int, default=4),
            p.add_argument("--seconds", type=float, default=0.0),
            p.add_argument("--time", action="store_true"),
            p.add_argument("--quick", action="store_true"),
        ),
        smoke={"every": 1},
    )
    every = 40 if given.quick else given.every
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if given.time:
        found = timed(2 if given.quick else 12, 3 if given.quick else 7)
        (folder / "speed.json").write_text(json.dumps(found))
        print("| 48 matrices of 12 x 768, one thread | MB | ms at 1 row | 8 | 32 |\n|---|---|---|---|---|")
        for name, row in found.items():
            cells = [f"{row['bytes'] / 1e6:.0f}", *(f"{row[n]:.1f}" for n in ("1", "8", "32"))]
            print(f"| {name} | {' | '.join(cells)} |")
        return
    torch.set_num_threads(1)
    store = open_store(given.store)
    model = store.open(given.model)
    tokens = store.find(model.parents["tokens"])
    assert tokens is not None, "the model's token set is not in this store"
    path = folder / f"bits-{every}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    began = time.monotonic()
    schemes = [BASE, NEAREST, CALIBRATED] if given.quick else list(KINDS)
    for name in schemes:
        if name not in results and not (given.seconds and time.monotonic() - began > given.seconds):
            results[name] = measure(KINDS[name], model.path, TokenSet(tokens.path), every)
            path.write_text(json.dumps(results))
            print(f"{name}: {results[name]['bits_per_byte']:.5f}", flush=True)
    if any(name not in results for name in schemes):
        print(f"{len(results)} of {len(schemes)} are done; run the same command again to continue")
        return
    base = results[BASE]["bits_per_byte"]
    print("| scheme | bits per byte | increase | matrices, MB | file, MB |\n|---|---|---|---|---|")
    for name in schemes:
        r = results[name]
        cells = [f"{r['bits_per_byte']:.4f}", f"{r['bits_per_byte'] - base:+.4f}"]
        print(f"| {name} | {' | '.join(cells)} | {r['matrices'] / 1e6:.2f} | {r['file'] / 1e6:.1f} |")
    nearest, calibrated = (results[name]["bits_per_byte"] - base for name in (NEAREST, CALIBRATED))
    claim(
        "bits per byte lost by int4, groups of 64, GPTQ",
        ours=calibrated, peer=nearest, unit="bits per byte", ratio=calibrated / nearest, bar=0.5,
        ok=calibrated <= 0.5 * nearest,
        samples=[{name: round(r["bits_per_byte"], 5) for name, r in results.items()}], quick=given.quick,
        peer_name="round to nearest",
    )  # fmt: skip


if __name__ == "__main__":
    main()
