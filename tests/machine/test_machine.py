"""Compute budgets, memory amounts, and the choice of device, dtype and threads from a measurement."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import BaseModel, ValidationError

from whorl.errors import ConfigError
from whorl.machine import device_probe as machine
from whorl.machine import gemm_benchmark as products
from whorl.machine import memory
from whorl.machine.budget import Budget, BudgetText
from whorl.machine.device_probe import probe
from whorl.machine.memory import Memory, device_memory
from whorl.train.config import RunConfig

BUDGETS = {"90s": 90, "5m": 300, "5 min": 300, "0.5H": 1800, "1e15flops": 1e15, "2E+3 FLOP": 2000}


@pytest.mark.parametrize(("text", "amount"), BUDGETS.items())
def test_budget_parse(text: str, amount: float) -> None:
    budget = Budget(flops=amount) if "flop" in text.lower() else Budget(seconds=amount)
    assert Budget.parse(text) == budget == Budget.parse(str(budget))


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "0s", "1..2s", "5 minutes please", "1e999s", "nanm"])
def test_budget_parse_invalid_raises(text: str) -> None:
    with pytest.raises(ConfigError, match="5m"):
        Budget.parse(text)


def test_budget_field_normalizes() -> None:
    class Config(BaseModel):
        budget: BudgetText

    assert Config(budget="5m").budget == Config(budget="300 s").budget == "300s"
    with pytest.raises(ValidationError, match="not a budget"):
        Config(budget="soon")


def measurement(bf16: float, fp32: float = 1e11, two: float = 1.8, gpu: bool = False) -> machine.Measurement:
    speeds = {"float32": fp32, "bfloat16": bf16}
    flops = {kind: {"1": [speed] * 3, "2": [two * speed] * 3} for kind, speed in speeds.items()}
    gpu_flops = {"float32": [5e13], "bfloat16": [8e14]} if gpu else {}
    return machine.Measurement(flops, 3e10, gpu_flops, 4e12 if gpu else 0.0)


def test_choose_follows_measurement() -> None:
    amx = machine.choose(measurement(bf16=9e11), cores=2)
    assert (amx.device, amx.dtype, amx.threads) == ("cpu", "bfloat16", 2)
    assert amx.peak_flops == pytest.approx(1.8 * 9e11)
    assert machine.choose(measurement(bf16=0.6e11)).dtype == "float32"
    assert machine.choose(measurement(bf16=1.1e11)).dtype == "float32"  # below the margin for casts
    assert machine.choose(measurement(bf16=1e11, two=0.9)).threads == 1
    gpu = machine.choose(measurement(bf16=1e10, gpu=True), gpu="H")
    assert (gpu.device, gpu.dtype, gpu.peak_flops, gpu.memory_bandwidth) == ("cuda", "bfloat16", 8e14, 4e12)


def test_choose_can_be_forced() -> None:
    measured = measurement(bf16=9e11, gpu=True)
    assert machine.choose(measured, gpu="H", device="cpu").device == "cpu"
    forced = machine.choose(measured, dtype="float32", threads=1)
    assert (forced.dtype, forced.threads, forced.peak_flops) == ("float32", 1, 1e11)
    assert "forced: type, threads" in forced.note
    assert machine.choose(measured, threads=7).threads == 7


def gpu_choice(forced: str | None = None, **speeds: float) -> machine.Machine:
    """Return the choice for a GPU with these measured speeds."""
    gpu_flops = {kind: [speed] for kind, speed in speeds.items()}
    measured = machine.Measurement(measurement(bf16=1e10).flops, 3e10, gpu_flops, 4e12)
    return machine.choose(measured, gpu="G", dtype=forced)


def test_gpu_dtypes_by_capability() -> None:
    assert products.gpu_dtypes((7, 5)) == ("float32", "float16")
    assert products.gpu_dtypes((8, 0)) == products.gpu_dtypes((8, 6)) == ("float32", "bfloat16")
    assert products.gpu_dtypes((8, 9)) == products.gpu_dtypes((9, 0)) == ("float32", "bfloat16", "float8")


def test_choose_narrow_dtype_needs_margin() -> None:
    half = gpu_choice(float32=8e12, float16=6e13)
    assert (half.dtype, half.peak_flops, half.torch_dtype) == ("float16", 6e13, torch.float16)
    assert gpu_choice(float32=8e12, float16=9e12).dtype == "float32"
    speeds = {"float32": 5e13, "bfloat16": 8e14, "float8": 1.2e15}
    eight = gpu_choice(**speeds)
    assert (eight.dtype, eight.peak_flops, eight.torch_dtype) == ("float8", 1.2e15, torch.bfloat16)
    assert "fp8 products ran at 1200.00 TFLOP/s and bf16 at 800.00, fp32 at 50.00" in eight.note
    assert (
        "bf16 products ran at 0.0041 TFLOP/s and fp32 at 0.50"
        in gpu_choice(float32=5e11, bfloat16=4.1e9).note
    )
    assert gpu_choice(float32=5e13, bfloat16=8e14, float8=9e14).dtype == "bfloat16"
    assert gpu_choice(float32=5e13, bfloat16=8e14).dtype == "bfloat16"  # float8 failed there
    assert all(gpu_choice(kind, **speeds).dtype == kind for kind in speeds)


def test_choose_fp16_and_fp8_on_cpu_only_if_forced() -> None:
    for kind, held in (("float16", torch.float16), ("float8", torch.bfloat16)):
        forced = machine.choose(measurement(bf16=9e11), dtype=kind, cores=2)
        assert (forced.dtype, forced.torch_dtype, forced.threads) == (kind, held, 2)
        assert forced.peak_flops == forced.flops["float32"] and f"none was timed in {kind}" in forced.note
    flops, _ = machine.measure_peaks("cpu", "float8")
    assert flops["float8"] == flops["float32"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device", "tpu", "one of: cpu, cuda"),
        ("device", "cuda", "finds no GPU"),
        ("dtype", "bfloat61", "did you mean 'bfloat16'"),
        ("threads", -1, "1 or more"),
    ],
)
def test_choose_invalid_raises(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine.choose(measurement(bf16=1e11), **{name: value})


def test_probe_caches_obeys_environment_and_restores_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WHORL_DEVICE", "WHORL_DTYPE", "WHORL_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    first = probe(cache_dir=tmp_path)
    assert torch.get_num_threads() == threads
    assert all(speed > 1e8 for speed in first.flops.values()) and first.memory_bandwidth > 1e8
    assert first.cores >= first.threads >= 1 and first.ram_bytes > 1e8
    monkeypatch.setattr(machine, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert probe(cache_dir=tmp_path) == first
    for name, value in (("DTYPE", "bfloat16"), ("THREADS", "1"), ("DEVICE", "cpu")):
        monkeypatch.setenv(f"WHORL_{name}", value)
    forced = probe(cache_dir=tmp_path)
    assert (forced.device, forced.dtype, forced.threads) == ("cpu", "bfloat16", 1)
    assert forced.torch_dtype == torch.bfloat16
    # an argument overrides the environment
    assert probe(cache_dir=tmp_path, dtype="float32").dtype == "float32"
    monkeypatch.setenv("WHORL_THREADS", "many")
    with pytest.raises(ConfigError, match="WHORL_THREADS"):
        probe(cache_dir=tmp_path)
    monkeypatch.setenv("WHORL_THREADS", "1")
    monkeypatch.setattr(machine, "measure", lambda *_, **__: measurement(bf16=1e10))
    next(tmp_path.glob("machine-*.json")).write_text("damaged")
    assert probe(cache_dir=tmp_path).threads == 1


def test_machine_apply_sets_torch_threads() -> None:
    before = torch.get_num_threads()
    try:
        machine.choose(measurement(bf16=1e11), threads=1).apply()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("alone", "age", "times"), [(True, 1e6, 1), (False, 60, 1), (False, 1e6, 2)])
def test_probe_contended_measurement_expires(
    alone: bool, age: float, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(measurement(bf16=1e10), uncontended=alone, measured_at=time.time() - age)
    measure = Mock(return_value=found)
    monkeypatch.setattr(machine, "measure", measure)
    for _ in range(2):
        machine.probe(cache_dir=tmp_path)
    assert measure.call_count == times


def test_available_core_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(products.time, "process_time", iter([0.0, 2.0]).__next__)
    # 2 CPU seconds in 2 s of wall time, on 2 cores
    assert products.available_core_fraction(2) == pytest.approx(0.5)


AMOUNTS = [("2GB", 2 * 10**9), ("1.5 MiB", 1572864), ("1e6", 10**6), (4096, 4096), (" 25 %", 25 * 10**7)]


@pytest.mark.parametrize(("text", "of_a_gigabyte"), AMOUNTS)
def test_memory_parse_normalizes(text: str | int, of_a_gigabyte: int) -> None:
    spelt = RunConfig.model_validate({"activation_budget": text}).activation_budget
    assert spelt == ("25%" if "%" in str(text) else f"{of_a_gigabyte}B")
    assert RunConfig(activation_budget=spelt).activation_budget == spelt
    assert Memory.parse(spelt).resolve(10**9) == of_a_gigabyte


@pytest.mark.parametrize("text", ["", "2 apples", "0GB", "101%", "0%", "-1GB", "GB", "nan", "0.5B", True, 0])
def test_memory_parse_invalid_raises(text: object) -> None:
    with pytest.raises(ValidationError, match="activation_budget"):
        RunConfig.model_validate({"activation_budget": text})
    if isinstance(text, str):
        with pytest.raises(ConfigError, match="not an amount of memory"):
            Memory.parse(text)


def test_device_memory_uses_container_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("1000000\n")
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "max")
    assert device_memory("cpu") == 1_000_000
    (tmp_path / "max").write_text("max\n")
    assert device_memory("cpu") > 1_000_000


HUGE = """
import re
from whorl.machine.malloc import request_huge_pages
request_huge_pages()
import torch
tensor = torch.ones(4 << 20)
print(sum(map(int, re.findall("AnonHugePages: +([0-9]+)", open("/proc/self/smaps").read()))))
"""


@pytest.mark.parametrize(("setting", "expected"), [(None, True), ("0", False)])
def test_large_tensors_are_in_huge_pages_unless_disabled(
    setting: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.exists() or "[madvise]" not in offered.read_text():
        pytest.skip("this system does not give huge pages on request")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if setting is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", setting)
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 0) == expected


@pytest.mark.parametrize(("row_seconds", "rows"), [(1e-9, [16, 2048]), (1e-3, [16])])
def test_an_emulated_type_is_timed_on_a_few_rows(
    row_seconds: float, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def seconds(work: Any, device: str, limit: float = 0.03) -> float:
        seen.append(len(work()))
        return row_seconds * seen[-1]

    monkeypatch.setattr(products, "best_seconds", seconds)
    assert products.matmul_flops((2048, 8, 4), "bfloat16", "cpu") == pytest.approx(2 * 8 * 4 / row_seconds)
    assert seen == rows
