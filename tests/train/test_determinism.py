"""Deterministic mode: equal bits for any number of threads and any library speed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_equal, train
from tests.support.train.tiny import job

from whorl.machine.device_probe import cache_folder
from whorl.machine.kernel_choice import TimedChoice, choices_file, listed_requests
from whorl.nn import Linear, quantized_linear
from whorl.nn.cpu import attention
from whorl.nn.experts import experts
from whorl.objectives.next_token import Loss
from whorl.train.determinism import deterministic
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.build import build_model
from whorl.train.lm.kernels import MIN_TIMED_FLOPS, choose_kernels
from whorl.train.lm.objective import LMObjective


def state() -> tuple[object, ...]:
    import torch._inductor.config as inductor

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        experts.forced_library,
        inductor.deterministic,
    )


def test_deterministic_sets_and_restores_settings() -> None:
    before = state()
    with deterministic(False):
        assert state() == before
    with pytest.raises(KeyError), deterministic():
        assert state() == (True, 1, False, "mkl", True)
        raise KeyError
    assert state() == before


def test_deterministic_does_not_time_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_onednn_is_faster", partial(pytest.fail, "timed"))
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    with deterministic():
        assert torch.equal(experts.matmul(left, right), left @ right)
    monkeypatch.setattr(experts, "forced_library", "onednn")
    torch.testing.assert_close(experts.matmul(left, right), left @ right)
    monkeypatch.setattr(experts, "forced_library", None)
    with pytest.raises(pytest.fail.Exception, match="timed"):
        experts.matmul(left, right)


def test_deterministic_threads_do_not_change_bits(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is wide enough to split products and sums over threads."""
    plain, seen = LMObjective.__call__, set[int]()

    def watched(self: LMObjective, part: MicroBatch) -> Loss:
        seen.add(torch.get_num_threads())
        return plain(self, part)

    monkeypatch.setattr(LMObjective, "__call__", watched)
    model = shape({"n_heads": 4, "n_kv_heads": 4, "head_dim": 64}, d_model=256, mlp_hidden=1024)
    wanted = job(tokens, model=model, seq_len=64, steps=2, deterministic=True)
    assert_equal(*(train(wanted.model_copy(update={"threads": n}), tmp_path / f"{n}") for n in (1, 2)))
    assert seen == {1}
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_experts_ignore_faster_library(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tokens, model=shape(HEADS, experts=EXPERTS), steps=4, deterministic=True)
    ends = []
    for faster in (False, True):
        monkeypatch.setattr(experts, "_onednn_is_faster", lambda faster=faster: faster)
        ends.append(train(wanted, tmp_path / f"{faster}"))
    assert_equal(*ends)


def test_kept_choices_decide_no_bit_of_replicas(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of a job that is long enough to time kernels; its cache of choices is empty, then names others."""
    measured = cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path in measured.glob("machine-*"):
        cache_folder().mkdir(parents=True, exist_ok=True)
        shutil.copy(path, cache_folder())
    wanted = job(tokens, steps=10**6, evaluations=1, batch_size=8, seq_len=64, replicas=2, deterministic=True)
    with listed_requests() as timed, deterministic():
        model = build_model(wanted)
        choose_kernels(model, wanted)
    flops = wanted.steps * 8 * 64 * model.flops_per_token(64)
    assert flops > MIN_TIMED_FLOPS and len(timed) >= 5
    whole = train(wanted, tmp_path / "whole", stop_after=2)
    assert not choices_file().exists()
    last = {
        f"{each.name}, 1 threads": asdict(
            TimedChoice([*each.candidates][-1], dict.fromkeys(each.candidates, 1.0))
        )
        for each in timed
    }
    choices_file().write_text(json.dumps(last))
    assert_equal(whole, train(wanted, tmp_path / "again", stop_after=2))


def test_deterministic_forgets_choices_of_earlier_jobs() -> None:
    q = torch.zeros(4, 2, 32, 32)
    attention.select((4, 2, 32, 32), torch.float32, True)
    with deterministic():
        assert not attention.is_chosen(q, q, q)
        attention.select((4, 2, 32, 32), torch.float32, True)  # as a forced choice does
        with deterministic():
            assert attention.is_chosen(q, q, q)


def test_quantized_products_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantized_linear.QuantizedLinear.from_linear(Linear(64, 64, std=0.1), "int8", dynamic=True)
    x = torch.linspace(-1, 1, 4 * 64).view(4, 64)
    expected = quantized_linear.KERNELS["dequantize"].run(layer, x)
    monkeypatch.setattr(quantized_linear.time, "perf_counter", partial(pytest.fail, "timed"))
    monkeypatch.setattr(quantized_linear, "_kernel_cache", {})
    with deterministic():
        assert torch.equal(layer(x), expected)
    with pytest.raises(pytest.fail.Exception, match="timed"):
        layer(x)
