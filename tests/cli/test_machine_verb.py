"""`whorl machine`: the table of products, as text and as JSON, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cli import refuse, succeed
from tests.support.tiny import make_decoder

from whorl.machine import kernel_choice
from whorl.machine.kernel_choice import FORCE
from whorl.models import save_model
from whorl.plan.training_plan import TrainingPlan
from whorl.store import Build, Store
from whorl.train.job import Job
from whorl.train.profiling import product_table
from whorl.train.profiling.products import Bounds


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "choices_file", lambda: tmp_path / "kernels.json")
    monkeypatch.setattr(kernel_choice, "available_core_fraction", lambda cores: 1.0)
    for name in ("MIN_ROUNDS", "MAX_ROUNDS"):
        monkeypatch.setattr(kernel_choice, name, 1)
    bounds = Bounds(dict.fromkeys(("float32", "bfloat16", "int8"), 1e11), {1 << 20: 1e10})
    monkeypatch.setattr(product_table, "measure_bounds", lambda threads: bounds)
    monkeypatch.setattr(product_table, "DECODING_ROWS", (1,))
    for variable in (FORCE, "WHORL_HOME", "WHORL_THREADS"):
        monkeypatch.delenv(variable, raising=False)


def test_machine_prints_products_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = succeed(tmp_path, "machine", "2x64/128/4x32").stdout
    assert "usable cores" in printed and "GEMM in GFLOP/s" in printed and "AMX: " in printed
    assert "weight_gradient up 256x" in printed and "decode head 1x64x128 bf16" in printed
    assert "of the bound" in printed and "engine_step 2x64/128" in printed
    monkeypatch.setenv(FORCE, "engine_step=looped")
    assert "'looped' is impossible" in refuse(tmp_path, "machine", "2x64/128/4x32")


def test_machine_json_of_a_model_and_of_a_plan(tmp_path: Path) -> None:
    store, model = Store(tmp_path / ".whorl"), make_decoder(d_model=64, n_kv_heads=2, head_dim=32)
    store.make_folders()
    with Build(store, kind="model", name="run/pretrain", parents={}, config={}, version=1) as build:
        save_model(model, build.path)
    job = Job(tokens="", model=model.config, seq_len=32, batch_size=6, steps=1)
    plan = TrainingPlan(job=job, budget="5m", expected={}, arithmetic=[], candidates=[])
    with Build(store, kind="plan", name="quickstart/plan", parents={}, config={}, version=1) as build:
        (build.path / "plan.json").write_text(plan.model_dump_json())
    words = ("run/pretrain", "--step", "training", "--batch", "4x16", "--replicas", "2", "--json")
    found = json.loads(succeed(tmp_path, "machine", *words).stdout)
    assert (found["rows"], found["length"], found["replicas"]) == (4, 16, 2)
    assert found["shape"].startswith("run/pretrain (")
    assert not found["decoding"] and "-" in found["kind"] and found["left_out"] == []
    line = next(line for line in found["training"] if line["name"].startswith("forward"))
    assert line["chosen"] in line["rates"] and line["share_of_bound"] > 0 and "qkv 32x64x" in line["name"]
    found = json.loads(succeed(tmp_path, "machine", "--step", "decoding", "--json").stdout)
    assert (found["shape"].split()[0], found["rows"], found["length"]) == ("quickstart/plan", 6, 32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("machine", "3x30/128"), "a width that 32 divides"),
        (("machine", "2y64/128"), "layers x width / vocabulary"),
        (("machine", "2x64/128", "--batch", "8"), "rows x tokens"),
        (("machine", "2x64/128", "--step", "sampling"), "training, decoding, both"),
        (("machine", "2x64/128/4x32", "--replicas", 3), "a divisor of the 4 rows"),
    ],
)
def test_machine_refuses(words: tuple[object, ...], message: str, tmp_path: Path) -> None:
    assert message in refuse(tmp_path, *words)
    assert "has no artifact 'nothing'" in refuse(tmp_path, "machine", "nothing")


def test_machine_refuses_a_type_without_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_DTYPE", "float16")
    message = refuse(tmp_path, "machine", "1x32/64/2x32")
    assert "WHORL_DTYPE=float16" in message and "one of: float32, bfloat16" in message
