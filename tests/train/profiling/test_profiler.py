"""Profiles: sums of operations, FLOPs of the model, names of compiled kernels, no effect on training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.train.model_shapes import HEADS, shape
from tests.support.train.pretraining import assert_equal, train
from tests.support.train.tiny import job
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils.flop_counter import FlopCounterMode

from whorl.plan.accounting.model_cost import decoder_config
from whorl.train.job import Job
from whorl.train.lm.build import build_model
from whorl.train.profiling.operations import product_flops, read_operations
from whorl.train.profiling.profiler import RANGE, STEP, Profile, profile


@pytest.fixture(scope="module")
def eager(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile(job(tokens), tmp_path_factory.mktemp("trace") / "t.json.gz", steps=3)


@pytest.mark.parametrize(
    "work",
    [
        lambda a, b: a @ b,
        lambda a, b: torch.addmm(b[0], a, b),
        lambda a, b: torch.bmm(a.view(4, 8, -1), b.expand(4, -1, -1)),
        lambda a, b: torch.nn.functional.linear(a, b.t()),
        lambda a, b: torch.baddbmm(torch.zeros(4, 8, 48), a.view(4, 8, -1), b.expand(4, -1, -1)),
    ],
)
def test_flops_of_operations_match_torch_counter(work: Any) -> None:
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    with FlopCounterMode(display=False) as counter:
        work(a, b)
    with torch_profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        work(a, b)
        work(a, b)
    averages = recorder.key_averages(group_by_input_shape=True)
    found = read_operations(averages, 2, on_device=False)
    assert sum(each.flops for each in found) == counter.get_total_flops()
    (product,) = (each for each in found if each.flops)
    assert (product.calls == 1 and "32x64" in product.shapes) or "4x8x64" in product.shapes
    times = [each.seconds for each in found]
    assert times == sorted(times, reverse=True)
    assert 2 * sum(times) == pytest.approx(1e-6 * sum(each.self_cpu_time_total for each in averages))


def test_flops_of_native_operators_and_of_attention() -> None:
    for name, shapes, flops in (
        ("whorl::mlp_backward", [[8, 4], [8, 4], [8, 16], [16, 4], [4, 16]], 8 * 8 * 4 * 16),
        ("whorl::mlp", [[8, 4], [16, 4], [4, 16]], 4 * 8 * 4 * 16),
        ("whorl::rotary_attention_backward", [[2, 8, 9, 4], [], []], 5 * 2 * 3 * 8 * 8 * 4),
        ("whorl::weight_gradient", [[8, 4], [8, 6]], 2 * 8 * 4 * 6),
        ("aten::scaled_dot_product_attention", [[2, 3, 8, 4]] * 3, 2 * 2 * 3 * 8 * 8 * 4),
        ("mkldnn::_linear_pointwise", [[5, 8, 4], [6, 4]], 2 * 5 * 8 * 4 * 6),
        ("aten::mul", [[8, 4], [8, 4]], 0),
        ("aten::_foreach_add_", [[[8, 4], [4]]], 0),
        ("aten::mm", [], 0),
        ("whorl: mlp", [[8, 4], [16, 4], [4, 16]], 0),
    ):
        assert product_flops(name, shapes) == flops, name


def test_profile_operations_sum_to_step_time(eager: Profile) -> None:
    total = sum(operation.seconds for operation in eager.operations)
    assert total == pytest.approx(eager.traced_seconds, rel=0.01)
    assert not eager.compiled and eager.step_seconds > 0
    assert {"data", "backward", "optimizer"} <= eager.phases.keys()
    assert 0 < eager.phases["optimizer"] < eager.step_seconds


def test_profile_flops_match_model(tokens: Path, eager: Profile) -> None:
    wanted = job(tokens)
    model = build_model(wanted)
    ids = torch.zeros(wanted.batch_size, wanted.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(ids))
    found = sum(operation.flops for operation in eager.operations)
    # forward and backward are three forwards; the rest is orthogonalization
    muon = found - 3 * counter.get_total_flops()
    assert 0 <= muon < found / 2  # 0: by C++, which is no operator
    assert 0 < eager.mfu < 1


def test_profile_trace_opens_and_json_is_valid(eager: Profile) -> None:
    with gzip.open(eager.trace) as file:
        events = json.load(file)["traceEvents"]
    names = [e.get("name") for e in events]
    assert {RANGE + "backward", RANGE + "optimizer"} <= set(names) and names.count(RANGE + STEP) == 3
    figures = json.loads(json.dumps(eager.to_json()))
    product = next(operation for operation in figures["operations"] if operation["flops"])
    rate = product["flops"] / product["seconds"]
    assert product["flops_per_second"] == rate
    assert product["share_of_peak"] == pytest.approx(rate / eager.peak_flops["float32"])


def test_profile_two_replicas(tokens: Path, tmp_path: Path) -> None:
    found = profile(job(tokens, replicas=2, serial_loader=False), tmp_path / "t.json.gz", steps=2)
    assert found.replicas == 2 and found.machine_flops > found.peak_flops["float32"]


def test_profile_experts_and_packed_rows(tokens: Path, tmp_path: Path) -> None:
    model = shape(HEADS, experts={"n_experts": 4, "top_k": 2, "hidden": 32}, max_length=64)
    found = profile(job(tokens, model=model, compile=True), tmp_path / "t.json.gz", steps=2)
    assert not found.compiled and found.operations  # experts are never compiled


def test_profile_names_kernels_of_a_compiled_step(tmp_path: Path) -> None:
    wide = Job(
        tokens="",
        model=decoder_config(64, 1, 256, ngram_orders=()),
        seq_len=128,
        batch_size=4,
        steps=1000,
        dtype="float32",
    )
    found = profile(wide, tmp_path / "t.json.gz", steps=3)
    plain = profile(wide.model_copy(update={"compile": False}), tmp_path / "u.json.gz", steps=2)
    assert found.compiled and found.compile_seconds > 1
    assert any("cpp_fused" in operation.name for operation in found.operations)
    flops = [sum(operation.flops for operation in each.operations) for each in (found, plain)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)  # equal arithmetic


def test_profile_does_not_change_later_training(tokens: Path, tmp_path: Path) -> None:
    before = train(job(tokens, steps=3), tmp_path / "a")
    profile(job(tokens), tmp_path / "t.json.gz", steps=1)
    assert_equal(before, train(job(tokens, steps=3), tmp_path / "b"))
