"""Stochastic rounding is unbiased, does not stall, and repeats exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_resume_is_exact, train, weights
from tests.support.train.tiny import Notes, job

from whorl.errors import ConfigError
from whorl.models import load_model, save_model
from whorl.recipes.steps.pretrain.pretrain import PretrainTrainConfig
from whorl.train.learner.update import ParamOptim
from whorl.train.lm.build import allocate_shared, build_model
from whorl.train.lm.precision import make_rounding
from whorl.train.optim.optimizers import Muon
from whorl.train.optim.stochastic_rounding import Rounding, stochastic_bf16

DRAWS = 20_000


@pytest.mark.parametrize("x", [1.001, -1.001, 3.1415927, 1e-30, -6.0221e23, 255.3])
def test_stochastic_bf16_mean_and_variance_match_theory(x: float) -> None:
    value = torch.tensor(x)
    draws = stochastic_bf16(value.expand(DRAWS), torch.Generator().manual_seed(0)).double()
    low, high = sorted(set(draws.tolist()))  # exactly two
    exact = float(value.double())
    assert low < exact < high
    nearest = float(value.bfloat16().double())
    assert nearest in (low, high) and (high - low) / abs(exact) <= 2**-7
    variance = (high - exact) * (exact - low)
    assert abs(float(draws.mean()) - exact) < 5 * (variance / DRAWS) ** 0.5
    assert float(draws.var()) == pytest.approx(variance, rel=0.1)


def test_stochastic_bf16_keeps_bf16_values() -> None:
    held = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    held[:4] = torch.tensor([0.0, float("inf"), -float("inf"), 1.0])
    assert torch.equal(stochastic_bf16(held.float(), torch.Generator().manual_seed(1)), held)


def test_rounding_nearest_stalls_and_stochastic_does_not() -> None:
    """Muon with learning rate 1e-4 on weights near 1: each of 500 updates is below half a bf16 step."""
    gradient = torch.eye(8)
    reached = {}
    for kind in (None, "nearest", "stochastic"):
        w = torch.ones(8, 8, dtype=torch.float32 if kind is None else torch.bfloat16)
        muon = Muon([[("w", w)]], 1e-4, rounding=None if kind is None else Rounding(kind, 0))  # type: ignore[arg-type]
        for _ in range(500):
            muon.step({"w": gradient}, 1.0)
        reached[kind] = float(w.float().diagonal().mean())
    assert reached["nearest"] == 1.0
    assert reached[None] < 0.97
    assert reached["stochastic"] == pytest.approx(reached[None], abs=0.01)


def test_rounding_is_seeded_by_seed_step_and_name() -> None:
    value = torch.full((64,), 1.001)

    def drawn(seed: int, name: str, step: int) -> torch.Tensor:
        weight = torch.zeros(64, dtype=torch.bfloat16)
        Rounding("stochastic", seed).write(weight, value, name, step)
        return weight

    same = drawn(0, "a", 7)
    assert torch.equal(same, drawn(0, "a", 7))
    assert not any(torch.equal(same, drawn(*other)) for other in ((1, "a", 7), (0, "b", 7), (0, "a", 8)))
    wide = torch.zeros(64)
    Rounding("stochastic", 0).write(wide, value, "a", 7)
    assert torch.equal(wide, value)  # fp32 weights are not rounded


def test_bf16_weights_apply_to_block_matrices_only(tokens: Path) -> None:
    wanted = job(tokens, bf16_weights="stochastic")
    model = build_model(wanted)
    shared = allocate_shared(model, wanted)
    narrow = {n for n, t in shared.weights.items() if t.dtype == torch.bfloat16}
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2 and min(p.shape) > 1}
    assert narrow == {n for n in matrices if n.startswith("blocks.")}
    others = [*shared.gradients.values(), *shared.state.values()]
    assert narrow and all(t.dtype == torch.float32 for t in others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_weights_resume_is_exact_and_model_saves(tokens: Path, tmp_path: Path, dtype: str) -> None:
    wanted = job(tokens, steps=30, bf16_weights="stochastic", dtype=dtype)
    model = assert_resume_is_exact(wanted, tmp_path, stop=13)
    other = weights(train(wanted.model_copy(update={"bf16_weights": "nearest"}), tmp_path / "n"))
    assert any(not torch.equal(p, other[n]) for n, p in model.named_parameters())
    save_model(model, tmp_path / "model")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "model", model.dtype)(ids), model.eval()(ids))


def test_bf16_weights_replicas_match_up_to_rounding(tokens: Path, tmp_path: Path) -> None:
    """Gradients of bf16 weights are bf16, so two half batches sum to other last digits than the whole."""
    wanted = job(tokens, steps=4, bf16_weights="stochastic")
    two = train(wanted.model_copy(update={"replicas": 2}), tmp_path / "two")
    for name, weight in train(wanted, tmp_path / "one").named_parameters():
        if weight.dtype == torch.bfloat16:
            apart = (weight.float() - two.get_parameter(name).float()).norm() / weight.float().norm()
            assert apart < 0.06, name


def test_bf16_weights_ema_is_fp32(tokens: Path, tmp_path: Path) -> None:
    """The saved model of a run with EMA is the average."""
    wanted = job(tokens, steps=30, bf16_weights="stochastic", ema=0.9)
    model = assert_resume_is_exact(wanted, tmp_path, stop=13)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_bf16_weights_train_experts(tokens: Path, tmp_path: Path) -> None:
    notes = Notes()
    wanted = job(tokens, steps=30, bf16_weights="stochastic", model=shape(HEADS, experts=EXPERTS))
    model = train(wanted, tmp_path, notes)
    assert notes.evaluations[-1]["held_out_nll"] < notes.evaluations[0]["held_out_nll"]
    assert sum(p.dtype == torch.bfloat16 for p in model.parameters()) > 4


def test_rounding_invalid_settings_raise(tokens: Path) -> None:
    with pytest.raises(ConfigError, match="no parameter is trained by Muon"):
        make_rounding("stochastic", 0, {"a": ParamOptim("adamw", 0.1)})
    assert make_rounding(None, 0, {}) is None
    with pytest.raises(ValidationError, match="nearest"):
        PretrainTrainConfig.model_validate({"bf16_weights": "up"})
    with pytest.raises(ValidationError, match="bfloat16"):
        job(tokens, dtype="float61")
