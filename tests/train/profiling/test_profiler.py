"""Profiles: reading of traces, sums of parts, FLOPs of the model, no effect on training."""

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
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile
from torch.utils.flop_counter import FlopCounterMode

from whorl.machine.forced_choices import force_choices
from whorl.nn.native import linear
from whorl.objectives.next_token import next_token
from whorl.plan.cost import decoder_config
from whorl.train.job import Job
from whorl.train.lm import objective as language
from whorl.train.lm.build import build_model
from whorl.train.profiling import trace
from whorl.train.profiling.inductor import classify_kernel, part_of_traces
from whorl.train.profiling.profiler import Profile, profile
from whorl.train.profiling.trace import ATTENTION, COPIES, MATMULS, POINTWISE, RANGE, REDUCTIONS, STEP


@pytest.fixture(scope="module")
def eager(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile(job(tokens), tmp_path_factory.mktemp("trace") / "t.json.gz", steps=3)


def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    args = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat, "args": args}


def marked(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    """The event of a named range."""
    return event(RANGE + name, ts, dur, cat="user_annotation", **args)


BACKWARD = "autograd::engine::evaluate_function: "


def test_read_trace_by_part_and_class() -> None:
    shapes = {"Input_Dims": [[4, 8], [8, 2]], "Input_type": ["float", "float"]}
    events = [
        marked(STEP, 100, 900),
        marked("MLP, experts", 102, 60),
        event("aten::linear", 105, 50, Sequence_number=7),
        event("aten::mm", 110, 40, **shapes),
        event("aten::add", 170, 10, Sequence_number=8),  # in no part
        event(BACKWARD + "MmBackward0", 300, 100, Sequence_number=7),
        event("aten::mul", 310, 30),
        event(BACKWARD + "torch::autograd::AccumulateGrad", 450, 10),
        marked("all-gather", 500, 50),
        marked("attention | fused:1", 600, 20),
        event("aten::mm", 2000, 500),  # in no step
    ]
    known = {RANGE + "attention | fused:1": trace.KernelInfo("attention", REDUCTIONS, 64.0, 16.0)}
    found = trace.read_trace(events, known)
    assert found.steps == 1 and found.seconds == pytest.approx(900e-6)
    assert sum(found.parts.values()) == pytest.approx(900e-6)  # every microsecond once
    assert sum(cost.seconds for cost in found.classes.values()) == pytest.approx(900e-6)
    parts = {("MLP, experts", False): 60e-6, ("MLP, experts", True): 100e-6, ("attention", False): 20e-6}
    parts |= {("gradient accumulation", False): 10e-6}
    assert {part: found.parts[part] for part in parts} == pytest.approx(parts)
    seconds = {MATMULS: 40e-6, POINTWISE: 40e-6, trace.WAITING: 50e-6}
    assert {kind: found.classes[kind].seconds for kind in seconds} == pytest.approx(seconds)
    assert found.classes[MATMULS].flops == 2 * 4 * 8 * 2
    assert found.classes[MATMULS].bytes == 4 * (32 + 16 + 8)
    assert found.classes[REDUCTIONS].bytes == 64.0


def test_read_trace_names_native_kernels_and_compiled_dispatch() -> None:
    graph = "## Call CompiledFxGraph abc ##"
    shapes = {"Input_Dims": [[1, 2, 8, 4]] * 3, "Input_type": ["c10::BFloat16"] * 3}
    events = [
        marked(STEP, 0, 1000),
        event("Torch-Compiled Region: 0/0", 0, 300),
        event(graph, 10, 280),
        event("whorl::causal_attention", 20, 100, **shapes),
        event("whorl::cross_entropy_", 130, 50),
        event(BACKWARD + "CompiledFunctionBackward", 400, 400),
        event(graph, 410, 380),
        event("whorl::causal_attention_backward", 420, 200),
    ]
    found = trace.read_trace(events)
    expected = {
        ("attention", False): 100, ("attention", True): 200, ("head, loss", False): 50, ("dispatch", False): 150,
        ("dispatch", True): 200, ("other", False): 300,
    }  # fmt: skip
    assert {part: round(seconds * 1e6) for part, seconds in found.parts.items()} == expected
    assert found.classes[ATTENTION].seconds == pytest.approx(300e-6)
    assert found.classes[ATTENTION].flops == 4 * 0.5 * (2 * 8 * 4) * 8


def test_read_trace_assigns_gpu_kernels_to_launching_op() -> None:
    """A synthetic trace in CUDA's format; no GPU recorded it."""
    events = [
        marked(STEP, 0, 100, External_id=1),
        marked("attention", 1, 30, External_id=2),
        event("aten::linear", 2, 20, External_id=3, Sequence_number=1),
        event("aten::mm", 3, 10, External_id=4),
        event("gemm", 40, 25, tid=7, cat="kernel", External_id=4),
        event(BACKWARD + "MmBackward0", 50, 20, tid=2, External_id=5, Sequence_number=1),
        event("aten::mm", 51, 10, tid=2, External_id=6),
        event("gemm", 70, 28, tid=7, cat="kernel", External_id=6),
    ]
    found = trace.read_trace(events)
    assert found.on_device
    assert found.parts["attention", False] == pytest.approx(25e-6)
    assert found.parts["attention", True] == pytest.approx(28e-6)
    assert found.classes[MATMULS].seconds == pytest.approx(53e-6)


def test_classify_op_known_operators() -> None:
    for name, part, kind in (
        ("aten::mm", "attention", MATMULS), ("aten::bmm", "attention", ATTENTION), ("aten::bmm", "optimizer", MATMULS),
        ("aten::_softmax", "attention", ATTENTION), ("aten::_softmax", "head, loss", REDUCTIONS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "other", ATTENTION), ("aten::copy_", "other", COPIES),
        ("aten::index_select", "embed", trace.LOOKUPS), ("aten::mul", "other", POINTWISE), ("aten::view", "other", None),
        ("torch::autograd::AccumulateGrad", "other", None), ("Optimizer", "other", None),
    ):  # fmt: skip
        assert trace.classify_op(name, part) == kind, name
    assert (
        trace.classify_op("aten::square", "other", is_leaf=False) is None
    )  # the operators it calls are counted


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
def test_read_trace_flops_match_torch_counter(work: Any, tmp_path: Path) -> None:
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    with FlopCounterMode(display=False) as counter:
        work(a, b)
    recorder = torch_profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with recorder, record_function(RANGE + STEP):
        work(a, b)
    recorder.export_chrome_trace(str(tmp_path / "t.json"))
    found = trace.read_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert found.classes[MATMULS].flops == counter.get_total_flops()
    assert found.classes[MATMULS].bytes >= 4 * (a.numel() + b.numel())


def test_estimate_cost_bytes_of_other_ops() -> None:
    f, b, tables = "float", "c10::BFloat16", ["TensorList", "TensorList"]
    for name, shapes, types, cost in (
        ("add", [[8, 4], [8, 4], []], [f, f, "Scalar"], (32, 3 * 128)),
        ("copy_", [[8], [8], []], [f, "c10::BFloat16", ""], (0, 8 * 4 + 8 * 2)),
        ("_foreach_copy_", [[[8], [4]], [[8], [4]]], tables, (12, 96)),
        ("embedding", [[1000, 16], [3]], [f, "long int"], (0, 3 * (8 + 2 * 16 * 4))),
        ("gather", [[64, 1000], [], [64, 1]], [f, "Scalar", "long int"], (0, 64 * 16)),
        ("index", [[64, 16], []], [f, ""], (0, 64 * (8 + 2 * 16 * 4))),
        (
            "mlp_backward",
            [[8, 4], [8, 4], [8, 16], [16, 4], [4, 16]],
            [b] * 3 + [f] * 2,
            (8 * 8 * 4 * 16, 960),
        ),
        ("rotary_attention_backward", [[2, 8, 9, 4]], ["c10::BFloat16"], (5 * 2 * 3 * 8 * 8 * 4, 2 * 1152)),
        ("weight_gradient", [[8, 4], [8, 6]], [b, b], (2 * 8 * 4 * 6, 2 * (32 + 48 + 24))),
        ("add", [], [], (0, 0)),
    ):
        assert trace.estimate_cost(f"aten::{name}", shapes, types) == cost, name


def test_profile_parts_sum_to_step_time(eager: Profile) -> None:
    total = sum(sum(both.values()) for both in eager.parts.values())
    assert total == pytest.approx(eager.traced_seconds, rel=1e-6)
    assert sum(cost.seconds for cost in eager.classes.values()) == pytest.approx(total, rel=1e-6)
    for part in ("data wait", "embed", "attention", "MLP, experts", "norms, residuals", "head, loss",
                 "gradient accumulation", "optimizer", "all-gather"):  # fmt: skip
        assert eager.parts[part]["forward"] > 0, part
    for part in ("embed", "attention", "MLP, experts", "norms, residuals"):
        assert eager.parts[part]["backward"] > 0, part
    assert sum(eager.parts["other"].values()) < 0.2 * total
    assert not eager.compiled and eager.step_seconds > 0


def test_profile_flops_match_model(tokens: Path, eager: Profile) -> None:
    wanted = job(tokens)
    model = build_model(wanted)
    ids = torch.zeros(wanted.batch_size, wanted.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(ids))
    found = eager.classes[MATMULS].flops + eager.classes[ATTENTION].flops
    # forward and backward are three forwards; the rest is orthogonalization
    muon = found - 3 * counter.get_total_flops()
    assert 0 < muon < found / 2
    assert 0 < eager.mfu < 1


def test_profile_trace_opens_and_json_is_valid(eager: Profile) -> None:
    with gzip.open(eager.trace) as file:
        events = json.load(file)["traceEvents"]
    names = {e.get("name") for e in events}
    assert {RANGE + STEP, RANGE + "attention", RANGE + "optimizer"} <= names
    assert sum(e.get("name") == RANGE + STEP for e in events) == 3
    figures = json.loads(json.dumps(eager.to_json()))
    assert figures["classes"][MATMULS]["bound_seconds"] == eager.roofline_seconds(MATMULS)
    assert figures["parts"]["attention"]["backward"] > 0


def test_profile_two_replicas(tokens: Path, tmp_path: Path) -> None:
    found = profile(job(tokens, replicas=2, serial_loader=False), tmp_path / "t.json.gz", steps=2)
    assert found.replicas == 2 and found.parts["all-gather"]["forward"] > 0
    assert found.machine_flops > found.peak_flops["float32"]


def test_profile_experts_and_packed_rows(tokens: Path, tmp_path: Path) -> None:
    model = shape(HEADS, experts={"n_experts": 4, "top_k": 2, "hidden": 32}, max_length=64)
    found = profile(job(tokens, model=model, compile=True), tmp_path / "t.json.gz", steps=2)
    assert not found.compiled  # experts are never compiled
    assert found.parts["MLP, experts"]["forward"] > 0 and found.parts["MLP, experts"]["backward"] > 0


def test_compiled_step_is_accounted_for(tmp_path: Path) -> None:
    has_bf16 = torch.cpu._is_avx512_bf16_supported()  # without it torch needs minutes for these steps
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    wide = Job(
        tokens="", model=decoder_config(128, 1, 512), seq_len=512, batch_size=24, steps=1000,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    with force_choices({"linear": "native"} if linear.supports((12288, 128, 384), dtype) else {}):
        for _ in range(3):  # time in which another process has the core has no name
            found = profile(wide, tmp_path / "t.json.gz", steps=5)  # compiled without caches
            if found.accounted >= 0.95:
                break
        plain = profile(wide.model_copy(update={"compile": False}), tmp_path / "u.json.gz", steps=2)
    assert found.compiled and found.compile_seconds > 1 and found.accounted >= 0.95
    named = seconds(found)
    assert sum(sum(by_class.values()) for by_class in named.values()) == pytest.approx(found.traced_seconds)
    for part in trace.UNNAMED:  # no kernel is without a part
        assert set(named[part]) <= {trace.FRAMEWORK}
    assert named["optimizer"].keys() & {POINTWISE, MATMULS} and named["MLP, experts"][MATMULS] > 0
    assert found.to_json()["accounted"] == found.accounted
    for part in ("attention", "MLP, experts", "norms, residuals"):
        assert found.parts[part]["forward"] > 0 and found.parts[part]["backward"] > 0, part
    assert found.parts["head, loss"]["forward"] > 0
    with gzip.open(found.trace) as file:
        assert any("cpp_fused" in e.get("name", "") for e in json.load(file)["traceEvents"])
    for kind in (MATMULS, ATTENTION):  # equal arithmetic
        assert found.classes[kind].flops == pytest.approx(plain.classes[kind].flops, rel=0.02)


def seconds(found: Profile) -> dict[str, dict[str, float]]:
    """Seconds by part and class."""
    return {part: {kind: cost.seconds for kind, cost in by.items()} for part, by in found.costs.items()}


def test_part_of_traces_uses_source_files() -> None:
    def stack(*files: str) -> str:
        return "\n".join(f'  File "/x/src/whorl/{file}", line 1, in f' for file in files)

    attention = stack("train/lm/objective.py", "models/decoder.py", "nn/attention/causal.py", "nn/linear.py")
    mlp = stack("models/decoder.py", "nn/mlp.py", "nn/linear.py")
    assert part_of_traces([attention]) == "attention"
    assert part_of_traces([mlp, mlp, attention]) == "MLP, experts"
    assert part_of_traces([stack("models/decoder.py", "nn/norm.py")]) == "norms, residuals"
    assert part_of_traces([stack("train/lm/objective.py", "objectives/next_token.py")]) == "head, loss"
    assert part_of_traces([]) == "other"
    assert classify_kernel("extern_kernels.bmm", "attention") == ATTENTION
    assert classify_kernel("extern_kernels.mm", "attention") == MATMULS
    assert classify_kernel("cpp_fused_clone_transpose_view_3", "attention") == COPIES
    assert classify_kernel("cpp_fused_add_mean_mul_pow_rsqrt_0", "norms, residuals") == REDUCTIONS
    assert classify_kernel("cpp_fused__unsafe_view_pow_relu_5", "MLP, experts") == POINTWISE


def test_profile_leaves_no_hooks_or_changed_weights(tokens: Path, tmp_path: Path) -> None:
    before = train(job(tokens, steps=3), tmp_path / "a")
    hooks = nn.modules.module._global_forward_hooks
    found = profile(job(tokens), tmp_path / "t.json.gz", steps=1)
    assert hooks is nn.modules.module._global_forward_hooks and not hooks
    assert vars(language)["next_token"] is next_token and trace.FRAMEWORK in found.classes
    assert_equal(before, train(job(tokens, steps=3), tmp_path / "b"))
