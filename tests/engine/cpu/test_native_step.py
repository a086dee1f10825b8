"""The native step against the model's forward: every weight format and every option of a dense decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.compiler import needs_compiler
from tests.support.engine.cpu import BOUNDS, SHAPES, Texts, llama
from tests.support.engine.parity import FAMILIES, check, config, prompt_requests, run

from whorl.engine.cache.pages import InputBatch
from whorl.engine.cpu import NativeStep, unsupported_reason
from whorl.engine.cpu.runner import NativeRunner, autotune, make_runner
from whorl.engine.engine import Engine
from whorl.engine.model.runner import ModelRunner
from whorl.errors import ConfigError
from whorl.machine import kernel_choice
from whorl.machine.kernel_choice import recorded_choices

pytestmark = needs_compiler

REASONS = {name: unsupported_reason(make()) for name, make in FAMILIES.items()}
NATIVE = {name: FAMILIES[name] for name, reason in REASONS.items() if reason is None}


@pytest.mark.parametrize("family", NATIVE)
def test_native_step_matches_forward(family: str) -> None:
    model = NATIVE[family]()
    assert Texts(model, 4, [1, 2, 7, 23, 41]).compare(NativeStep(model, 4, threads=2), most=12) < 1e-4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_step_matches_forward_for_shapes(shape: str, page_size: int, threads: int) -> None:
    model = llama(**SHAPES[shape])
    texts = Texts(model, page_size, [1, 3, 33, 100, 70], seed=threads)
    assert texts.compare(NativeStep(model, page_size, threads=threads), most=60) < 1e-4


@pytest.mark.parametrize("wanted", [[], [99], [1, 0, 5], [*range(30, 60), 103]])
@pytest.mark.parametrize("shape", SHAPES)
def test_wanted_positions_do_not_depend_on_the_others(shape: str, wanted: list[int]) -> None:
    """The last layer computes the wanted positions only; its keys and values are those of all positions."""
    model = llama(**SHAPES[shape])
    texts, step = Texts(model, 16, [4, 70, 30]), NativeStep(model, 16, threads=1 + len(wanted) % 2)
    layers, group_of = texts.runner.layers, texts.runner.group_of
    batch = texts.batch_of([0, 1, 2], [slice(0, 4), slice(0, 70), slice(0, 30)])
    everything = step.run(batch, layers, group_of).log_softmax(-1)
    kept = [t.clone() for layer in layers for t in layer.tensors]
    for layer in layers:
        for t in layer.tensors:
            t.fill_(float("nan"))
    some = InputBatch(**{**vars(batch), "logit_indices": torch.tensor(wanted, dtype=torch.long)})
    found = step.run(some, layers, group_of).log_softmax(-1)
    torch.testing.assert_close(found, everything[wanted], rtol=0, atol=2e-5)
    for t, before in zip((t for layer in layers for t in layer.tensors), kept, strict=True):
        torch.testing.assert_close(t, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("d_model", [65, 128])
def test_native_step_error_by_weight_dtype(kind: str, d_model: int) -> None:
    model = llama(d_model=d_model, bias=True)
    step = NativeStep(model, 16, weight_dtype=kind)
    worst = Texts(model, 16, [1, 5, 40, 64]).compare(step, most=30)
    assert (0 if kind == "float32" else 1e-4) < worst < BOUNDS[kind]


@pytest.mark.parametrize("group", [32, 64])
def test_native_step_error_by_group_size(group: int) -> None:
    model = llama()
    for kind in ("int8", "int4"):
        step = NativeStep(model, 16, weight_dtype=kind, weight_group_size=group)
        assert Texts(model, 16, [5, 40]).compare(step, most=30) < BOUNDS[kind]


def test_native_step_bf16_error_is_within_torch_bf16_error() -> None:
    exact, rounded = llama(), llama(dtype=torch.bfloat16)
    texts = Texts(rounded, 16, [3, 40, 64])
    ids = torch.from_numpy(texts.ids[1])[None]
    with torch.inference_mode():
        a, b = (m.logits(m(ids)).log_softmax(-1) for m in (exact, rounded))
        noise = float((a - b).abs().max())  # of torch's bf16 forward
    assert texts.runner.layers[0].tensors[0].dtype == torch.bfloat16
    assert 1e-3 < texts.compare(NativeStep(rounded, 16), most=30) < 2 * noise


@pytest.mark.parametrize(
    "shape", ["head_dim 64, many rows a head", "head_dim 128", "window", "sink, softcap", "smear, norm"]
)
def test_tile_attention_error_is_that_of_bf16(shape: str) -> None:
    """Chunks of prompts whose attention runs on tiles; emulated and real tiles agree to the bit."""
    model, worst = llama(**SHAPES[shape], dtype=torch.bfloat16), {}
    step = NativeStep(model, 16, threads=2)
    for method in ("emulated tiles", *step.methods):
        step.method = method
        worst[method] = Texts(model, 16, [1, 3, 33, 100, 170], seed=1).compare(step, most=90)
    assert max(worst.values()) < BOUNDS["bfloat16"]
    assert worst["emulated tiles"] == worst.get("tiles", worst["emulated tiles"])


def test_native_step_is_batch_invariant() -> None:
    model = llama()
    for kind, method in [*((kind, "vectors") for kind in BOUNDS), ("bfloat16", "emulated tiles")]:
        step = NativeStep(model, 16, weight_dtype=kind, threads=2)
        step.method = method
        found = []
        for lengths in ([37], [37, 1, 50, 9, 9, 9, 9, 9]):
            texts = Texts(model, 16, lengths)
            texts.ids[0] = np.arange(37) % 211
            batch = texts.batch_of(list(range(len(lengths))), [slice(0, n) for n in lengths])
            found.append(step.run(batch, texts.runner.layers, texts.runner.group_of)[:37])
        assert torch.equal(*found)


def test_native_hidden_states_and_logits() -> None:
    model = llama(logit_softcap=3.0)
    texts = Texts(model, 16, [20])
    batch, _, _ = texts.batch(20)
    step, hidden = NativeStep(model, 16), torch.empty(len(batch.ids), 96)
    logits = step.run(batch, texts.runner.layers, texts.runner.group_of, hidden)
    with torch.inference_mode():
        torch.testing.assert_close(hidden, model(batch.ids[None])[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step.logits(hidden), logits)


def test_native_step_rejects_bad_input_before_writing() -> None:
    model = llama()
    texts, step = Texts(model, 16, [20]), NativeStep(model, 16)
    batch, _, _ = texts.batch(20)
    layers, groups = texts.runner.layers, texts.runner.group_of
    batch.ids[0] = 211
    with pytest.raises(ConfigError, match="vocabulary"):
        step.run(batch, layers, groups)
    batch.ids[0] = 0
    for bad_pages in (np.full_like(batch.pages[0], 99), batch.pages[0][:, :0]):
        batch.pages[0] = bad_pages
        with pytest.raises(ConfigError, match="page table"):
            step.run(batch, layers, groups)
    assert bool(layers[0].tensors[0].isnan().all())


def test_unsupported_models_have_a_reason() -> None:
    assert REASONS["alibi"] == "attention with alibi" and REASONS["post"] and REASONS["latent"]
    assert all(REASONS[name] != "" for name in FAMILIES)
    assert "over all heads" in str(REASONS["olmo"])
    with pytest.raises(ConfigError, match="mixture"):
        NativeStep(FAMILIES["experts"](), 16)
    with pytest.raises(ConfigError, match="bfloat16"):
        NativeStep(llama(), 16, weight_dtype="bf16")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", NATIVE)
def test_native_engine_matches_forward(family: str, preemption: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=native")
    model, sizes = NATIVE[family](), {"max_num_seqs": 6, "max_model_len": 60, "kv_cache_tokens": 60}
    tight = config(**sizes, max_num_batched_tokens=7, preemption=preemption)
    engine = Engine(model, tight)
    assert isinstance(engine.runner, NativeRunner) and engine.runner.use_native
    requests = prompt_requests(20, temperature=0)
    check(model, requests, run(engine, requests))
    assert engine.stats.n_preemptions > 0 or family == "gemma"  # gemma's windows need few pages
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})
    engine.update_weights({}, version=1)
    again = [r.model_copy(update={"id": f"again {r.id}"}) for r in requests]
    check(model, again, run(engine, again))
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")
    assert type(Engine(model, tight).runner) is ModelRunner


def test_measured_path_is_kept_or_unused(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert type(make_runner(llama(), {None: 4}, 16, 2, 64)) is ModelRunner
    finally:
        torch.use_deterministic_algorithms(False)
    with recorded_choices(tmp_path):
        make_runner(llama(), {None: 4}, 16, 2, 64)
        (record,) = tmp_path.glob("kernel-*.json")
        for chosen in ("torch", "native, vectors, 1 threads"):
            record.write_text(json.dumps(chosen))
            kernel_choice._chosen.clear()  # as in another process
            again = make_runner(llama(), {None: 4}, 16, 2, 64)
            assert isinstance(again, NativeRunner)
            assert again.use_native == (chosen != "torch")
        assert (again.native_step.method, again.native_step.threads) == ("vectors", 1)


def test_autotune_selects_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama(), {None: 4}, 16, 2, 64)
    assert isinstance(runner, NativeRunner)
    chosen = autotune(runner)
    ((_, timed),) = [
        (n, c) for n, c in kernel_choice._read(kernel_choice.choices_file()).items() if c.chosen == chosen
    ][-1:]
    assert min(timed.seconds.values()) <= timed.seconds[chosen] <= 1.04 * min(timed.seconds.values())
    assert runner.use_native == (chosen != "torch")
    monkeypatch.setenv("WHORL_CHOOSE", "engine_step=torch")
    assert autotune(runner) == "torch" and not runner.use_native
    with pytest.raises(ConfigError, match="'torch' is impossible"):
        autotune(runner, native_only=True)


@pytest.mark.parametrize(("decode_rows", "timed"), [(40, {32}), (9, {1, 8})])
def test_autotune_times_a_batch_of_its_rows(
    decode_rows: int, timed: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(llama(), {None: 4}, 16, 2, 64)
    assert isinstance(runner, NativeRunner)
    seen, run = set[int](), runner.run
    monkeypatch.setattr(runner, "run", lambda batch: (seen.add(len(batch.lengths)), run(batch))[1])
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    monkeypatch.setattr(kernel_choice, "choices_file", lambda: tmp_path / "choices.json")
    way = autotune(runner, decode_rows=decode_rows, max_threads=1)
    assert seen == timed and "2 threads" not in way


def test_hooks_fall_back_to_torch_on_same_pages() -> None:
    model, ids, pages = llama(), torch.arange(9), [np.arange(4, dtype=np.int32)[None]]
    runner = NativeRunner(model, {None: 4}, 16, 2, 64)

    def step(a: int, b: int) -> torch.Tensor:
        here, rows = torch.arange(a, b), torch.arange(b - a)
        return runner.run(InputBatch(ids[a:b], here, [0, b - a], [b], [0], pages, rows, 0))

    first = step(0, 4)
    hook = model.blocks[0].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    up = model.blocks[0].mlp.up.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    assert runner._needs_torch()
    second = step(4, 7)
    hook.remove()
    up.remove()
    assert not runner._needs_torch()
    got = torch.cat([first, second, step(7, 9)])
    with torch.inference_mode():
        torch.testing.assert_close(got, model.logits(model(ids[None]))[0], atol=1e-4, rtol=1e-4)
