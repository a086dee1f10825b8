"""The products of a step: their number and size, equal results of all ways, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from whorl.engine.cpu.candidates import WEIGHT_DTYPES, NativeProducts
from whorl.errors import ConfigError
from whorl.machine import kernel_choice
from whorl.machine.kernel_choice import FORCE
from whorl.models import make_model
from whorl.models.transformer_config import AttentionConfig, CustomMixer, MoEConfig, TransformerConfig
from whorl.models.transformer_cost import linear_shapes, unlisted_parts
from whorl.plan.accounting.model_cost import decoder_config
from whorl.train.config import OptimConfig
from whorl.train.profiling import product_table
from whorl.train.profiling.product_table import ProductTimes, format_products, measure_bounds, total
from whorl.train.profiling.products import Bounds, linear_products, muon_batches

MODEL = decoder_config(64, 3, 160)
LLAMA = TransformerConfig(
    vocab_size=96, d_model=64, n_layers=2, mlp_hidden=80, mlp="swiglu",
    mixers={"attention": AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16)},
)  # fmt: skip
BOUNDS = Bounds({"float32": 1e11, "bfloat16": 4e11, "int8": 8e11}, {1 << 16: 4e10, 1 << 30: 1e10})


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of this test only, after one round."""
    monkeypatch.setattr(kernel_choice, "choices_file", lambda: tmp_path / "kernels.json")
    monkeypatch.setattr(kernel_choice, "available_core_fraction", lambda cores: 1.0)
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    for name in ("MIN_ROUNDS", "MAX_ROUNDS"):
        monkeypatch.setattr(kernel_choice, name, 1)
    monkeypatch.delenv(FORCE, raising=False)
    monkeypatch.setattr(product_table, "measure_bounds", lambda threads: BOUNDS)


@pytest.mark.parametrize("model", [MODEL, LLAMA])
def test_linear_shapes_are_those_of_the_model(model: TransformerConfig) -> None:
    weights = sum(n * k * calls for n, k, calls in linear_shapes(model).values())
    blocks = make_model(model).blocks
    assert weights == sum(p.numel() for p in blocks.parameters() if p.dim() > 1 and p.shape[-1] > 1)


def test_linear_products_hold_all_flops_of_the_layers() -> None:
    products = list(linear_products(MODEL, 64, "float32"))
    weights = sum(n * k * calls for n, k, calls in linear_shapes(MODEL).values())
    assert sum(p.calls * p.flops for p in products) == 6.0 * weights * 64
    assert {p.name.split()[0] for p in products} == {"forward", "input_gradient", "weight_gradient"}
    assert len({p.name for p in products}) == len(products)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ways_of_a_product_agree(dtype: str) -> None:
    for product in linear_products(MODEL, 64, dtype):
        default, *others = ways = product.ways
        expected = ways[default]()
        assert isinstance(expected, Tensor)
        for way in others:
            found = ways[way]()
            assert isinstance(found, Tensor)
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            assert error < (1e-5 if dtype == "float32" else 2e-2), (product.name, way, error)


def test_unlisted_parts_names_what_is_not_listed() -> None:
    assert unlisted_parts(MODEL) == []
    fields = {**LLAMA.model_dump(), "pattern": ("attention", "m")}
    fields["mixers"] = {**LLAMA.mixers, "m": CustomMixer(kind="linear", options={"n_heads": 2})}
    fields["experts"] = MoEConfig(n_experts=4, top_k=2, hidden=32)
    mixed = TransformerConfig.model_validate(fields)
    assert unlisted_parts(mixed) == ["experts", "linear layers"]
    assert {name: calls for name, (_, _, calls) in linear_shapes(mixed).items()} == {
        "q": 1,
        "kv": 2,
        "out": 1,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_table_has_choices_of_training_and_their_parts(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = ProductTimes(MODEL, 2, 32, dtype, threads=1, cores=1)
    lines = times.training()
    calls = {" ".join(line.name.split()[:2]): line.calls for line in lines}
    assert calls["attention 2x1x32x64"] == calls["mlp 64x64x256"] == calls["forward qkv"] == 3
    batches = [
        f"orthogonalize {n}x{rows}x{columns}"
        for n, rows, columns in muon_batches(MODEL, OptimConfig().muon_every)
    ]
    assert [calls[name] for name in (*batches, "head 64x64x160")] == [1] * (len(batches) + 1) and len(
        batches
    ) == 3
    for part in ("cross_entropy 64x160", "update 256x64", "weight_gradient up"):
        assert calls[part] == 0
    assert calls.keys() >= {"adamw 10240"}
    for line in lines:
        assert line.chosen in line.times and line.threads == 1 and not line.dropped
        assert 0 < line.share <= 1 if line.flops else line.share == 0
        assert (
            "_" not in line.name.split()[0]
            or line.name.startswith("cross")
            or line.chosen == next(iter(line.times))
        )
    seconds, bound = total(lines)
    assert seconds > 0 and bound == pytest.approx(sum(line.calls * line.bound_seconds for line in lines))
    text = format_products(lines)
    assert len(text.splitlines()) == len(lines) + 1 and "weight_gradient down" in text and "fp32" in text
    monkeypatch.setenv(FORCE, "mlp=torch")
    assert next(line.chosen for line in times.training() if line.name.startswith("mlp")) == "torch"
    monkeypatch.setenv(FORCE, "mlp=looped")
    with pytest.raises(ConfigError, match="the choice 'looped' is impossible"):
        times.training()


def test_refresh_times_choices_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times, timed = ProductTimes(MODEL, 2, 32, "bfloat16", threads=1, cores=1), list[str]()
    real = kernel_choice.time_candidates
    monkeypatch.setattr(
        kernel_choice, "time_candidates", lambda name, *rest: timed.append(name) or real(name, *rest)
    )
    first = len(times.training()), len(timed)
    times.training()
    assert first == (len(timed), len(timed))  # each line once
    times.training(refresh=True)
    assert len(timed) == 2 * first[1]


@pytest.mark.parametrize(
    ("flops", "n_bytes", "dtypes", "seconds"),
    [
        (4e11, 8, ("bfloat16",), 1.0),
        (4e11, 8, ("float32", "bfloat16"), 1.0),
        (4e11, 8, ("float32",), 4.0),
        (8.0, 4e4, ("float32",), 1e-6),  # from the cache
        (8.0, 1e10, ("float32",), 1.0),  # from memory
    ],
)
def test_bound_is_by_arithmetic_or_bandwidth(
    flops: float, n_bytes: float, dtypes: Sequence[str], seconds: float
) -> None:
    assert BOUNDS.seconds(flops, n_bytes, dtypes) == pytest.approx(seconds)
    slower = Bounds(
        {kind: rate / 2 for kind, rate in BOUNDS.flops.items()}, dict.fromkeys(BOUNDS.bandwidth, 1.0)
    )
    assert slower.at_least(BOUNDS) == BOUNDS


def test_decoding_table_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.engine.cpu.build.library", lambda: None)
    monkeypatch.setattr(product_table, "DECODING_ROWS", (1, 8))
    lines = ProductTimes(MODEL, 2, 32, "float32", threads=1, cores=2).decoding()
    assert len(lines) == 5 * 2 * 2  # products, rows, types; no choice without the library
    assert {way for line in lines for way in line.rates} == {"torch, 1 thread", "torch, 2 threads"}
    assert all(math.isfinite(line.share) and line.chosen in line.rates for line in lines)


def test_native_candidates_compute_the_same_product() -> None:
    with NativeProducts(48, 64) as products:
        ways = products.candidates(3, threads=1)
        if not ways:
            pytest.skip("there is no C++ compiler here")
        results = []
        for way in ways.values():
            torch.manual_seed(0)
            results.append(way())
        assert {f"native {kind} vectors" for kind in WEIGHT_DTYPES} <= set(ways)
        for result in results:
            assert isinstance(result, Tensor) and result.shape == (3, 48)
            assert torch.allclose(result, results[0], atol=0.1)


def test_bound_of_a_type_is_at_least_that_of_the_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"float32": 80e9, "bfloat16": 1e9}
    monkeypatch.setattr(product_table, "measure_peaks", lambda device: (dict(rates), 1e10))
    monkeypatch.setattr(product_table, "copy_bandwidth", lambda device, size: 1e10)
    monkeypatch.setattr(product_table, "_int8_rate", lambda: 0.0)
    assert measure_bounds(1).flops == {"float32": 80e9, "bfloat16": 80e9, "int8": 80e9}
    rates["bfloat16"] = 400e9
    assert measure_bounds(1).flops == {"float32": 80e9, "bfloat16": 400e9, "int8": 400e9}
