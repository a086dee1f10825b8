"""Q4_K and Q8_0 matrices of GGUF files, checked with the reader of the `gguf` package."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.gguf_files import gguf, llama_cpp
from tests.support.tiny import make_transformer

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.models.exchange.gguf_file import export_gguf
from whorl.models.exchange.gguf_types import quantize_q4_k
from whorl.models.transformer_config import AttentionConfig

Q4_K = gguf.GGMLQuantizationType.Q4_K


def error(w: np.ndarray) -> np.ndarray:
    made = quantize_q4_k(w)
    assert made.shape == (*w.shape[:-1], w.shape[-1] // 256 * 144) and made.dtype == np.uint8
    return np.abs(gguf.quants.dequantize(made, Q4_K) - w)


def rounded_error(w: np.ndarray) -> np.ndarray:
    """The error of 16 equal steps between the ends of each part of 32, with exact ends (and 0, as the format has)."""
    parts = w.reshape(-1, 32)
    low, high = np.minimum(parts.min(1, keepdims=True), 0), np.maximum(parts.max(1, keepdims=True), 0)
    step = (high - low) / 15
    codes = np.round((parts - low) / np.where(step > 0, step, 1))
    return np.abs(low + codes * step - parts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.floats(-4, 4),
    st.sampled_from(["normal", "positive", "sparse", "outlier", "shifted"]),
)
def test_q4_k_error_is_within_a_step(seed: int, exponent: float, kind: str) -> None:
    generator = np.random.default_rng(seed)
    w = generator.standard_normal((3, 512)).astype(np.float32)
    if kind == "positive":
        w = np.abs(w)
    elif kind == "sparse":
        w *= generator.random(w.shape) < 0.05
    elif kind == "outlier":
        w[generator.random(w.shape) < 0.01] *= 20
    elif kind == "shifted":
        w += generator.uniform(-5, 5, (3, 1))
    w = (w * 10.0**exponent).astype(np.float32)
    blocks = w.reshape(-1, 256)
    span = np.maximum(blocks.max(1), 0) - np.minimum(blocks.min(1), 0)
    assert np.all(error(w).reshape(-1, 256).max(1) <= 0.1 * span)


def test_q4_k_is_better_than_rounding_and_keeps_simple_blocks() -> None:
    w = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32) * 0.02
    assert np.square(error(w)).mean() < np.square(rounded_error(w)).mean()
    assert not error(np.zeros((2, 256), np.float32)).any()
    for value in (0.5, -0.5):
        assert error(np.full((1, 256), value, np.float32)).max() < 2e-3
    grid = np.tile(np.arange(16, dtype=np.float32), 16)[None] - 8
    assert error(grid).max() < 0.02


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_gguf_matrices_have_the_type_that_rows_allow(kind: str, tmp_path: Path) -> None:
    model = make_transformer(
        d_model=48, mlp_hidden=256, mixers={"a": AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=32)}
    )
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        export_gguf(model, tmp_path / "m.gguf", kind=kind)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    types = {name: t.tensor_type.name for name, t in tensors.items()}
    assert types["output_norm.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == types["output.weight"] == "F16"  # rows of 48
    assert types["blk.0.attn_output.weight"] == "Q8_0"  # rows of 64
    assert types["blk.1.ffn_down.weight"] == kind.upper()
    down = model.blocks[1].mlp.down.weight.detach().numpy()
    back = gguf.quants.dequantize(
        tensors["blk.1.ffn_down.weight"].data, tensors["blk.1.ffn_down.weight"].tensor_type
    )
    assert np.abs(back - down).max() < {"Q8_0": 0.005, "Q4_K": 0.1}[kind.upper()] * np.abs(down).max()
    text = str(notes[0].message)
    assert f"tensors are not {kind}" in text and "(f16)" in text and len(notes) == 1


@pytest.mark.parametrize(("kind", "error"), [("f32", 1e-4), ("q8_0", 0.02), ("q4_k", 0.2)])
def test_llama_cpp_continues_as_the_engine(kind: str, error: float, tmp_path: Path) -> None:
    heads = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=64)
    model = make_transformer(d_model=256, mlp_hidden=256, mixers={"a": heads}).eval()
    with torch.no_grad():
        model.head.mul_(20)
    export_gguf(model, tmp_path / "m.gguf", kind=kind)
    prompt = [1, 5, 9, 33, 7]
    llama = llama_cpp(tmp_path / "m.gguf", n_ctx=64, logits_all=True, type_k=0, type_v=0, flash_attn=False)
    stream = llama.generate(prompt, temp=0.0)
    continued = [int(next(stream)) for _ in range(12)]
    llama.reset()
    llama.eval(prompt)
    found = torch.from_numpy(llama.scores[: len(prompt)].copy())
    with torch.no_grad():
        want = model.logits(model(torch.tensor([prompt])))[0]
    assert (found - want).norm() < error * want.norm()
    if kind == "f32":
        engine = Engine(model, EngineConfig(max_num_seqs=1))
        (made,) = engine.generate([prompt], SamplingParams(temperature=0), max_tokens=12)
        assert continued == [token.id for token in made.tokens] and len(set(continued)) > 1
