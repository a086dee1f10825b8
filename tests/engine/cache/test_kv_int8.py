"""The int8 KV cache: quantization per position, and the engine with such a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine.parity import config, decoder, drain, expected, request
from tests.support.models.transformer_shapes import made

from whorl.engine.cache.kv_int8 import dequantize_kv, quantize_kv
from whorl.engine.engine import Engine
from whorl.models import LanguageModel, Transformer
from whorl.models.transformer_config import AttentionConfig
from whorl.nn.attention import backends


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.floats(-20, 20))
@settings(max_examples=40)
def test_quantize_kv_scales_each_position_and_head(seed: int, power: float) -> None:
    kv = normal(2, 3, 5, 16, seed=seed)
    kv[1, 2, 3] *= 2.0**power
    quantized = quantize_kv(kv)
    assert quantized.codes.dtype == torch.int8 and quantized.scale.shape == (2, 3, 5)
    bound = kv.abs().amax(-1, keepdim=True) / 127 * 0.5001
    assert ((dequantize_kv(quantized) - kv).abs() <= bound).all()
    one = quantize_kv(kv[1, 2, 3])
    assert torch.equal(one.codes, quantized.codes[1, 2, 3])
    assert torch.equal(one.scale, quantized.scale[1, 2, 3])
    assert not dequantize_kv(quantize_kv(torch.zeros(1, 4))).any()


HEADS_INT8 = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16, smear=True, qk_norm=True, window=9)
G = torch.Generator().manual_seed(4)
PROMPTS = [torch.randint(48, (n,), generator=G).tolist() for n in (23, 30, 7, 17)]


def small_decoder() -> Transformer:
    return decoder(vocab_size=48, head_dim=16, mlp_hidden=64)


def prompt_log_probs(model: LanguageModel, **fields: object) -> list[torch.Tensor]:
    engine = Engine(model, config(max_num_seqs=3, max_num_batched_tokens=11, **fields))
    names = [str(n) for n in range(len(PROMPTS))]
    found = drain(engine, [request(*one, prompt_log_probs=True) for one in zip(names, PROMPTS, strict=True)])
    scores = ([d.prompt_log_probs for d in found[name] if d.prompt_log_probs] for name in names)
    return [torch.tensor(log_probs) for (log_probs,) in scores]


def test_int8_engine_matches_forward_with_quantized_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")  # tests/engine/cpu has its int8 cache
    model, own = small_decoder(), backends.causal_attention
    found, plain = prompt_log_probs(model, kv_cache_dtype="int8"), prompt_log_probs(model)

    def rounded_attention(q: Any, k: Any, v: Any, *more: Any) -> torch.Tensor:
        return own(q, dequantize_kv(quantize_kv(k)), dequantize_kv(quantize_kv(v)), *more)

    monkeypatch.setattr(backends, "causal_attention", rounded_attention)
    for ids, int8_scores, without in zip(PROMPTS, found, plain, strict=True):
        assert torch.allclose(int8_scores, expected(model, ids, 1), atol=1e-4)
        assert 1e-4 < (int8_scores - without).abs().max() < 0.2


def test_int8_cache_supports_windows_and_smeared_keys() -> None:
    model = made(vocab_size=48, n_layers=2, mixers={"a": HEADS_INT8}).eval()
    found, plain = prompt_log_probs(model, kv_cache_dtype="int8"), prompt_log_probs(model)
    assert all(0 < (a - b).abs().max() < 0.2 for a, b in zip(found, plain, strict=True))


def test_int8_cache_has_expected_size() -> None:
    sizes = {}
    for kind in ("model", "int8"):
        layers = Engine(small_decoder(), config(kv_cache_dtype=kind)).runner.layers
        sizes[kind] = sum(t.nbytes for layer in layers for t in layer.tensors[:2] + layer.tensors[3:])
    assert sizes["int8"] == sizes["model"] * (16 + 4) / (4 * 16)
