"""Run folders, metrics, random streams and progress."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from whorl.errors import ConfigError
from whorl.machine import device_probe as machine
from whorl.machine import gemm_benchmark as products
from whorl.machine.budget import Budget, BudgetText
from whorl.machine.device_probe import probe
from whorl.tracking import seeds
from whorl.tracking.progress import Progress, format_duration
from whorl.tracking.run import Run, read_metrics

# Seeds


def test_derive_is_fixed_and_distinct() -> None:
    assert seeds.derive(0, "init") == 6291500876198751163
    different = [
        seeds.derive(0, "init"),
        seeds.derive(1, "init"),
        seeds.derive(0, "data"),
        seeds.derive(0, "init", 1),
        seeds.derive(0, "init", "1"),
        seeds.derive(0, "in", "it"),
    ]
    assert len(set(different)) == len(different)


@given(st.integers(), st.lists(st.text() | st.integers(), max_size=3))
def test_derive_fits_every_generator(seed: int, names: list[str | int]) -> None:
    assert 0 <= seeds.derive(seed, *names) < 2**63


def test_generators_repeat_and_keep_global_state() -> None:
    import torch

    before = torch.get_rng_state()
    a, b = (torch.randn(4, generator=seeds.generator(7, "x")) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)
    assert seeds.numpy_rng(7, "x").integers(1 << 40) == seeds.numpy_rng(7, "x").integers(1 << 40)


def test_reseedable_rng_has_no_memory() -> None:
    many = seeds.ReseedableRNG()
    first = many(1).random(5).tolist(), many(2).normal(size=3).tolist(), many(1).integers(9, size=3).tolist()
    many(7).integers(1 << 20, dtype="int32")  # leaves half a word in the generator's buffer
    assert first[0] == many(1).random(5).tolist() and first[1] == many(2).normal(size=3).tolist()
    assert first[2] == seeds.ReseedableRNG()(1).integers(9, size=3).tolist()
    means = [many(seed).random(64).mean() for seed in range(2000)]
    assert abs(np.mean(means) - 0.5) < 0.004 and abs(np.std(means) * 8 * 12**0.5 - 1) < 0.1
    assert len({many(seed).integers(1 << 60) for seed in range(2000)}) == 2000


# Metrics and the run folder


def test_metrics_resume_drops_later_records(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config={"name": "r"}, tensorboard=False)
    with run.metrics("pretrain") as log:
        for step in range(5):
            log.write(step, {"loss": 5.0 - step})
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')  # cut off by a kill
    with run.metrics("other") as other:
        other.write(9, {"x": 1.0})
    with run.metrics("pretrain", resume_at=3) as log:
        log.write(3, {"loss": 0.5, "note": "again"})
    records = list(run.read_metrics("pretrain"))
    assert [(record["step"], record["loss"]) for record in records] == [
        (0, 5.0),
        (1, 4.0),
        (2, 3.0),
        (3, 0.5),
    ]
    assert all(record["step_name"] == "pretrain" and record["time"] > 0 for record in records)
    assert len(list(run.read_metrics())) == 5
    assert json.loads((run.dir / "config.json").read_text()) == {"name": "r"}


def test_metrics_fresh_start_drops_all(tmp_path: Path) -> None:
    run = Run(tmp_path, tensorboard=False)
    for _ in range(2):
        with run.metrics("s") as log:
            log.write(1, {"x": 1.0})
    assert len(read_metrics(log.path)) == 1


def test_tensorboard_reads_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run(tmp_path).metrics("pretrain") as log:
        log.write(1, {"loss": 2.5, "sample": "def f"})
    events = EventAccumulator(str(tmp_path / "tb" / "pretrain"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5)]


def test_environment_and_log_are_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found = run.record_environment()
    assert found["cpu"] and found["versions"]["torch"].startswith("2.")
    assert json.loads((tmp_path / "environment.json").read_text()) == found
    run.log("one\ntwo")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["one", "two"]


# Progress


def test_progress_plain_lines_and_closing_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interactive=False, every=1000)
    heard: list[str] = []
    progress.sinks.append(heard.append)
    with progress.task("Reading", total=100, unit="MB") as task:
        for _ in range(100):
            task.advance(note="fine")
    assert re.fullmatch(r"Reading: 100 of 100 MB, \d\.\d s, fine\n", stream.getvalue())
    assert heard == stream.getvalue().splitlines()


def test_progress_plain_lines_for_long_tasks() -> None:
    stream = io.StringIO()
    with Progress(stream, interactive=False, every=0).task("Reading", total=4) as task:
        task.advance()
    assert stream.getvalue().splitlines()[0].startswith("Reading: 1 of 4 (25 %)")


def test_progress_failed_task_and_silent() -> None:
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress(stream, interactive=False).task("Reading"):
        raise ZeroDivisionError
    assert "(stopped)" in stream.getvalue()
    silent = Progress.silent()
    silent.stream = stream
    before = stream.getvalue()
    with silent.task("x") as task:
        task.update(done=3, note="n")
    silent.log("y")
    assert stream.getvalue() == before


def test_progress_terminal_bar_and_closing_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interactive=True)
    with progress.task("Reading [bold]", total=2, unit="MB") as task:
        task.advance(2)
        progress.log("between")
    lines = stream.getvalue().splitlines()
    assert "between" in lines and re.search(r"Reading \[bold\]: 2 of 2 MB, \d+\.\d s$", lines[-1])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (12.3, "12 s"), (59.9, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# Budgets


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("90s", Budget(seconds=90)),
        ("5m", Budget(seconds=300)),
        ("5 min", Budget(seconds=300)),
        ("0.5H", Budget(seconds=1800)),
        ("1e15flops", Budget(flops=1e15)),
        ("2E+3 FLOP", Budget(flops=2000)),
    ],
)
def test_budget_parse(text: str, budget: Budget) -> None:
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


# The machine


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


def gpu_choice(speeds: dict[str, float], **forced: Any) -> machine.Machine:
    """Return the choice for a GPU with these measured speeds."""
    gpu_flops = {kind: [speed] for kind, speed in speeds.items()}
    measured = machine.Measurement(measurement(bf16=1e10).flops, 3e10, gpu_flops, 4e12)
    return machine.choose(measured, gpu="G", **forced)


def test_gpu_dtypes_by_capability() -> None:
    assert products.gpu_dtypes((7, 5)) == ("float32", "float16")
    assert products.gpu_dtypes((8, 0)) == products.gpu_dtypes((8, 6)) == ("float32", "bfloat16")
    assert products.gpu_dtypes((8, 9)) == products.gpu_dtypes((9, 0)) == ("float32", "bfloat16", "float8")


def test_choose_narrow_dtype_needs_margin() -> None:
    import torch

    half = gpu_choice({"float32": 8e12, "float16": 6e13})
    assert (half.dtype, half.peak_flops, half.torch_dtype) == ("float16", 6e13, torch.float16)
    assert gpu_choice({"float32": 8e12, "float16": 9e12}).dtype == "float32"
    eight = gpu_choice({"float32": 5e13, "bfloat16": 8e14, "float8": 1.2e15})
    assert (eight.dtype, eight.peak_flops, eight.torch_dtype) == ("float8", 1.2e15, torch.bfloat16)
    assert "fp8 products ran at 1200.00 TFLOP/s and bf16 at 800.00, fp32 at 50.00" in eight.note
    assert gpu_choice({"float32": 5e13, "bfloat16": 8e14, "float8": 9e14}).dtype == "bfloat16"
    assert gpu_choice({"float32": 5e13, "bfloat16": 8e14}).dtype == "bfloat16"  # float8 failed there
    for kind in ("float32", "bfloat16", "float8"):
        assert gpu_choice({"float32": 5e13, "bfloat16": 8e14, "float8": 1.2e15}, dtype=kind).dtype == kind


def test_choose_fp16_and_fp8_on_cpu_only_if_forced() -> None:
    import torch

    for kind, held in (("float16", torch.float16), ("float8", torch.bfloat16)):
        forced = machine.choose(measurement(bf16=9e11), dtype=kind, cores=2)
        assert (forced.dtype, forced.torch_dtype, forced.threads) == (kind, held, 2)
        assert forced.peak_flops == forced.flops["float32"] and f"none was timed in {kind}" in forced.note
    flops, _ = machine.measure_peaks("cpu", "float8")
    assert flops["float8"] == flops["float32"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"device": "tpu"}, "one of: cpu, cuda"),
        ({"device": "cuda"}, "finds no GPU"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"threads": -1}, "1 or more"),
    ],
)
def test_choose_invalid_raises(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine.choose(measurement(bf16=1e11), **choice)


def test_probe_caches_obeys_environment_and_restores_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    for name in ("WHORL_DEVICE", "WHORL_DTYPE", "WHORL_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    first = probe(cache_dir=tmp_path)
    assert torch.get_num_threads() == threads
    assert all(speed > 1e8 for speed in first.flops.values()) and first.memory_bandwidth > 1e8
    assert first.cores >= first.threads >= 1 and first.ram_bytes > 1e8
    measured = machine.measure
    monkeypatch.setattr(machine, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert probe(cache_dir=tmp_path) == first
    monkeypatch.setenv("WHORL_DTYPE", "bfloat16")
    monkeypatch.setenv("WHORL_THREADS", "1")
    monkeypatch.setenv("WHORL_DEVICE", "cpu")
    forced = probe(cache_dir=tmp_path)
    assert (forced.device, forced.dtype, forced.threads) == ("cpu", "bfloat16", 1)
    assert forced.torch_dtype == torch.bfloat16
    assert (
        probe(cache_dir=tmp_path, dtype="float32").dtype == "float32"
    )  # an argument overrides the environment
    monkeypatch.setenv("WHORL_THREADS", "many")
    with pytest.raises(ConfigError, match="WHORL_THREADS"):
        probe(cache_dir=tmp_path)
    monkeypatch.setenv("WHORL_THREADS", "1")
    monkeypatch.setattr(machine, "measure", measured)
    next(tmp_path.glob("machine-*.json")).write_text("damaged")
    assert probe(cache_dir=tmp_path).threads == 1


def test_machine_apply_sets_torch_threads() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        machine.choose(measurement(bf16=1e11), threads=1).apply()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("alone", "age", "again"), [(True, 1e6, False), (False, 60, False), (False, 1e6, True)]
)
def test_probe_contended_measurement_expires(
    alone: bool, age: float, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def measure(cores: int, *, gpu: bool) -> machine.Measurement:
        calls.append(cores)
        return replace(measurement(bf16=1e10), uncontended=alone, measured_at=time.time() - age)

    monkeypatch.setattr(machine, "measure", measure)
    for _ in range(2):
        machine.probe(cache_dir=tmp_path)
    assert len(calls) == 1 + again


def test_available_core_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.machine import gemm_benchmark as products

    clock = iter(range(10**6))
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(products.time, "process_time", iter([0.0, 2.0]).__next__)
    assert products.available_core_fraction(2) == pytest.approx(
        0.5
    )  # 2 CPU seconds in 2 s of wall time, on 2 cores
