"""Keys and values in int8: rounded row by row, attended to without being written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.engine.cache.kv_int8 import attend, attend_reference, bytes_per_token, dequantize_kv, quantize_kv
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.models import Decoder, DecoderConfig, LanguageModel, Transformer, TransformerConfig
from whorl.models.transformer_config import AttentionConfig
from whorl.nn.attention import causal


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.floats(-20, 20))
@settings(max_examples=40, deadline=None)
def test_each_position_and_head_is_rounded_by_itself(seed: int, power: float) -> None:
    kv = drawn(2, 3, 5, 16, seed=seed)
    kv[1, 2, 3] *= 2.0**power
    kept = quantize_kv(kv)
    assert kept.codes.dtype == torch.int8 and kept.scale.shape == (2, 3, 5)
    bound = kv.abs().amax(-1, keepdim=True) / 127 * 0.5001
    assert ((dequantize_kv(kept) - kv).abs() <= bound).all()
    one = quantize_kv(kv[1, 2, 3])
    assert torch.equal(one.codes, kept.codes[1, 2, 3]) and torch.equal(one.scale, kept.scale[1, 2, 3])
    assert not dequantize_kv(quantize_kv(torch.zeros(1, 4))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "n_kv"), [(4, 4), (6, 2)])
def test_attention_over_codes_is_attention_over_what_they_mean(
    heads: int, n_kv: int, dtype: torch.dtype
) -> None:
    q = drawn(2, heads, 3, 16).to(dtype)
    k, v = (quantize_kv(drawn(2, n_kv, 9, 16, seed=s) * (1 + torch.arange(9.0))[:, None]) for s in (1, 2))
    bias = torch.zeros(3, 9).masked_fill(torch.ones(3, 9).triu(7).bool(), float("-inf"))
    for more in ({}, {"bias": bias, "scale": 0.25}):
        want, found = attend_reference(q, k, v, **more), attend(q, k, v, **more)
        assert found.dtype == dtype
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_the_size_is_what_is_kept() -> None:
    k = quantize_kv(drawn(1, 2, 10, 64))
    assert 2 * 3 * k.n_bytes == 10 * bytes_per_token(3, 2, 64)
    assert bytes_per_token(3, 2, 64) < 0.54 * (2 * 3 * 2 * 64 * 2)


def lively(model: LanguageModel) -> LanguageModel:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.15)
    return model.eval()


def decoder() -> LanguageModel:
    config = DecoderConfig(
        vocab_size=48,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        mlp_hidden=64,
        ngram_buckets=64,
    )
    return lively(Decoder(config, torch.Generator().manual_seed(0)))


def transformer() -> LanguageModel:
    heads = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16, smear=True, qk_norm=True, window=9)
    config = TransformerConfig(vocab_size=48, d_model=32, n_layers=2, mlp_hidden=64, mixers={"a": heads})
    return lively(Transformer(config, torch.Generator().manual_seed(0)))


def prompt_log_probs(
    model: LanguageModel, prompts: list[tuple[int, ...]], **fields: object
) -> list[torch.Tensor]:
    config = EngineConfig(max_num_seqs=3, max_model_len=64, block_size=4, max_num_batched_tokens=11, **fields)
    engine = Engine(model, config)
    for number, ids in enumerate(prompts):
        sampling = SamplingParams(temperature=0)
        engine.add(Request(id=str(number), ids=ids, sampling=sampling, max_tokens=6, prompt_log_probs=True))
    found: dict[str, tuple[float, ...]] = {}
    while engine.busy:
        for delta in engine.step():
            if delta.prompt_log_probs:
                found[delta.request_id] = delta.prompt_log_probs
        engine.check_integrity()
    return [torch.tensor(found[str(number)]) for number in range(len(prompts))]


def prompts() -> list[tuple[int, ...]]:
    g = torch.Generator().manual_seed(4)
    return [tuple(torch.randint(48, (n,), generator=g).tolist()) for n in (23, 30, 7, 17)]


def test_the_engine_with_such_a_cache_is_the_forward_with_rounded_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = decoder(), prompts()
    found = prompt_log_probs(model, texts, kv_cache_dtype="int8")
    plain = prompt_log_probs(model, texts)
    own = causal.causal_attention
    monkeypatch.setattr(
        causal,
        "causal_attention",
        lambda q, k, v, s=None: own(q, dequantize_kv(quantize_kv(k)), dequantize_kv(quantize_kv(v)), s),
    )
    for ids, ours, without in zip(texts, found, plain, strict=True):
        row = torch.tensor([ids])
        with torch.no_grad():
            said = model.logits(model(row)).log_softmax(-1)
        want = said[0, :-1].gather(1, row[0, 1:, None])[:, 0]
        assert torch.allclose(ours, want, atol=1e-4)
        assert 1e-4 < (ours - without).abs().max() < 0.2


def test_windows_and_smeared_keys_go_with_it() -> None:
    model, texts = transformer(), prompts()
    for ours, plain in zip(
        prompt_log_probs(model, texts, kv_cache_dtype="int8"), prompt_log_probs(model, texts), strict=True
    ):
        assert 0 < (ours - plain).abs().max() < 0.2


def test_such_a_cache_is_smaller() -> None:
    model = decoder()
    sizes = {kind: Engine(model, EngineConfig(kv_cache_dtype=kind)).runner for kind in ("model", "int8")}
    kept = {
        kind: sum(t.nbytes for layer in runner.layers for t in layer.tensors[:2] + layer.tensors[3:])
        for kind, runner in sizes.items()
    }
    assert kept["int8"] == kept["model"] * (16 + 4) / (4 * 16)
