"""The native step over int8 keys and values: its codes, its attention, and pages that torch and the native step share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.compiler import needs_compiler
from tests.support.engine.cpu import BOUNDS, SHAPES, Texts, llama
from tests.support.engine.parity import FAMILIES, config, prompt_requests, run

from whorl.engine.cache.kv_int8 import Int8KVPages, quantize_kv
from whorl.engine.cpu import NativeStep
from whorl.engine.cpu.runner import NativeRunner
from whorl.engine.engine import Engine
from whorl.models import Transformer

pytestmark = needs_compiler

HEADS_64 = {"head_dim": 64, "n_heads": 6, "n_kv_heads": 2, "d_model": 64}  # several registers of codes
INTEGER_BOUND = 2e-3  # queries and weights in 16 bits; twice the error seen


def value_weights(model: Transformer) -> torch.Tensor:
    return dict(model.named_parameters())["blocks.0.mixer.v.weight"]


@given(st.integers(0, 9), st.floats(-12, 8))
@settings(max_examples=8)
def test_native_codes_and_scales_equal_quantize_kv(seed: int, power: float) -> None:
    """To the bit: the first layer's keys do not depend on the cache, so an fp32 cache has what was quantized."""
    model = llama(seed, head_dim=20, smear=True, n_layers=1)
    with torch.no_grad():
        values = value_weights(model)
        values.mul_(10.0**power)
        values[:20] = 0
    step, pages = NativeStep(model, 8, threads=1), []
    for dtype in (torch.float32, torch.int8):
        texts = Texts(model, 8, [40, 3], seed, dtype)
        texts.compare(step)
        pages.append((texts.runner.layers[0], texts.pages.ravel()))
    (exact, at), (layer, _) = pages
    assert isinstance(layer, Int8KVPages)
    for t, codes, scales in ((exact.k, layer.k, layer.k_scale), (exact.v, layer.v, layer.v_scale)):
        written = t[at].isfinite().all(-1)
        want = quantize_kv(t[at])
        assert int(written.sum()) == 2 * 43
        assert torch.equal(codes[at][written], want.codes[written])
        assert torch.equal(scales[at][..., 0][written], want.scale[written])


@pytest.mark.parametrize("page_size", [4, 8, 32])
@pytest.mark.parametrize(
    "shape", [HEADS_64, *(SHAPES[name] for name in ("plain", "head_dim 80", "window", "sink, softcap", "smear, norm"))]
)  # fmt: skip
def test_native_int8_attention_matches_forward(shape: dict[str, Any], page_size: int) -> None:
    """Chunks, then single tokens, over more positions than one chunk of keys."""
    model, worst = llama(**shape), {}
    for threads in (1, 2):
        texts = Texts(model, page_size, [1, 3, 33, 290], threads, torch.int8)
        step = NativeStep(model, page_size, threads=threads)
        worst[threads] = texts.compare(step, most=120, rounds=60, decode_from=265)
    integers = shape.get("head_dim") == 64 and page_size % 8 == 0
    assert max(worst.values()) < (INTEGER_BOUND if integers else 1e-4)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", [HEADS_64, SHAPES["plain"], {"window": 9}])
def test_native_int8_attention_of_rounded_weights(kind: str, shape: dict[str, Any]) -> None:
    """By vectors and by tiles; emulated and real tiles agree to the bit."""
    model, worst = llama(**shape, dtype=torch.bfloat16), {}
    step = NativeStep(model, 16, kind, threads=2)
    for method in ("vectors", "emulated tiles", *step.methods):
        step.method = method
        worst[method] = Texts(model, 16, [1, 3, 33, 100, 170], 1, torch.int8).compare(step, most=90)
    assert max(worst.values()) < BOUNDS[kind]
    assert worst["emulated tiles"] == worst.get("tiles", worst["emulated tiles"])


def test_native_int8_step_is_batch_invariant() -> None:
    model = llama(**HEADS_64)
    step, found = NativeStep(model, 16, threads=2), []
    for lengths in ([37], [37, 1, 50, 9, 9, 9, 9, 9]):
        texts = Texts(model, 16, lengths, dtype=torch.int8)
        texts.ids[0] = np.arange(37) % 211
        for start, stop in ((0, 36), (36, 37)):
            spans = [slice(min(start, n - 1), min(stop, n)) for n in lengths]
            batch = texts.batch_of(list(range(len(lengths))), spans)
            got = step.run(batch, texts.runner.layers, texts.runner.group_of)
        found.append(got[:1])
    assert torch.equal(*found)


def test_nan_is_kept_by_int8_cache() -> None:
    model = llama()
    with torch.no_grad():
        value_weights(model)[0, 0] = float("nan")
    texts, step = Texts(model, 16, [5], dtype=torch.int8), NativeStep(model, 16)
    batch = texts.batch_of([0], [slice(0, 5)])
    assert bool(step.run(batch, texts.runner.layers, texts.runner.group_of).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_and_native_steps_share_int8_pages(dtype: torch.dtype) -> None:
    """Steps in turn, over keys that also keep their raw form, against torch alone."""
    model = llama(**HEADS_64, smear=True, qk_norm=True, dtype=dtype)
    native, found = NativeStep(model, 16), []
    for in_turn in (False, True):
        texts, parts = Texts(model, 16, [60], dtype=torch.int8), []
        layers, groups = texts.runner.layers, texts.runner.group_of
        for n in range(12):
            batch = texts.batch_of([0], [slice(5 * n, 5 * n + 5)])
            by_native = in_turn and n % 2 == 0
            parts.append(native.run(batch, layers, groups) if by_native else texts.runner.run(batch))
        found.append(torch.cat(parts).float().log_softmax(-1))
    error = float((found[0] - found[1]).abs().max())
    assert 0 < error < (0.02 if dtype == torch.float32 else BOUNDS["bfloat16"])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["decoder", "gemma"])
def test_native_int8_engine_matches_torch(
    family: str, preemption: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes reused, rows preempted and copied, pages of 4 positions; scores of the same prompts."""
    sizes = {"max_num_seqs": 6, "max_model_len": 60, "kv_cache_tokens": 60, "kv_cache_dtype": "int8"}
    tight, scores = config(**sizes, max_num_batched_tokens=7, preemption=preemption), []
    for native in ("torch", "native"):
        monkeypatch.setenv("WHORL_CHOOSE", f"cpu={native}")
        engine = Engine(FAMILIES[family](), tight)
        assert isinstance(engine.runner, NativeRunner) == (native == "native")
        requests = prompt_requests(12, temperature=0)
        run(engine, requests)
        again = [r.model_copy(update={"id": f"again {r.id}"}) for r in requests]
        out = run(engine, again)
        scores.append({name: [(t.id, t.raw_log_prob) for t in tokens] for name, tokens in out.items()})
    n_equal = 0
    for name, tokens in scores[0].items():
        for (a, x), (b, y) in zip(tokens, scores[1][name], strict=True):
            if a != b:
                break  # a near tie
            n_equal += 1
            assert abs(x - y) < 0.02
    assert n_equal > 0.8 * sum(map(len, scores[0].values()))
