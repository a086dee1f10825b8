"""The native step of quantized models: it multiplies with the stored codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compiler import needs_compiler
from tests.support.engine.cpu import Texts, llama
from tests.support.engine.parity import config, expected, prompt_requests, run

from whorl.engine.cpu import NativeStep
from whorl.engine.cpu.runner import NativeRunner
from whorl.engine.engine import Engine
from whorl.models import Transformer, load_model, save_model
from whorl.models.compression.gptq import quantize_model
from whorl.models.compression.quantize import QuantizationConfig
from whorl.models.transformer_config import NGramConfig

pytestmark = needs_compiler


def quantized(dtype: torch.dtype = torch.float32, **fields: Any) -> Transformer:
    """A model of 4 heads with an n-gram embedding, and its matrices as `fields` of `QuantizationConfig`."""
    model = llama(ngram=NGramConfig(orders=(2, 3), buckets=50), n_kv_heads=1, bias=True, dtype=dtype)
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(211, (8, 32), generator=g)]
    quantize_model(model, QuantizationConfig(**fields), batches)
    return model


@pytest.mark.parametrize(
    ("fields", "stored", "bound"),
    [({"format": "int8"}, 8, 0.34),
     ({"format": "int8", "dynamic": True, "head": True, "ngram": True}, 9, 0.06),
     ({"format": "int8", "group_size": 32, "rounding": "calibrated"}, 8, 0.19),
     ({"format": "int4", "group_size": 16, "rounding": "calibrated", "head": True}, 9, 0.21),
     ({"format": "int4", "group_size": 2}, 8, 0.08),
     ({"format": "int4"}, 8, 0.33),
     ({"format": "fp8"}, 0, 1e-4)],
)  # fmt: skip
def test_native_step_multiplies_with_stored_codes(fields: dict[str, Any], stored: int, bound: float) -> None:
    """The remaining error is the rounding of activations to int8; `bound` is twice the error seen with this seed."""
    model = quantized(**fields)
    step = NativeStep(model, 16, threads=2)
    assert step.weights.n_stored == stored
    assert Texts(model, 16, [1, 5, 40, 64]).compare(step, most=30) < bound


def test_other_weight_formats_are_rounded_from_the_codes() -> None:
    model = quantized(format="int8", group_size=32, rounding="calibrated")
    for kind, group, stored in (("int8", None, 8), ("int8", 32, 8), ("int8", 16, 0), ("float32", None, 0)):
        step = NativeStep(model, 16, kind, group)
        assert step.weights.n_stored == stored
    assert Texts(model, 16, [1, 40]).compare(step, most=30) < 1e-4


def test_engine_runs_a_gptq_model_natively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=native")
    save_model(
        quantized(format="int4", group_size=32, rounding="calibrated", head=True, ngram=True), tmp_path
    )
    model = load_model(tmp_path)
    engine = Engine(model, config(max_num_seqs=6, max_model_len=60))
    assert isinstance(engine.runner, NativeRunner) and engine.runner.use_native
    step = engine.runner.native_step
    assert (step.weight_dtype, step.weights.n_stored) == ("int4+int8", 9)
    requests = prompt_requests(20, temperature=0)
    for name, tokens in run(engine, requests).items():
        ids = next(r.ids for r in requests if r.id == name)
        want = expected(model, [*ids, *(t.id for t in tokens)], len(ids))
        got = torch.tensor([t.raw_log_prob for t in tokens])
        torch.testing.assert_close(got, want, atol=0.1, rtol=0)
