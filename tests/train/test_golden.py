"""Tiny models learn as they did when their curves were checked in (`golden.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden import CURVES, SHAPES, STEPS, TOLERANCE, golden_job, losses
from tiny import make_tokens

from whorl.nn.experts import experts

GOLDEN: dict[str, list[float]] = json.loads(CURVES.read_text())
CHANGED = {
    "a rate by 1 %": {"optim": {"matrix_rate": 0.0202}},
    "Muon's momentum": {"optim": {"momentum": 0.945}},
    "the end of the plateau": {"schedule": {"decay": 0.49}},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def distance(name: str, curve: list[float]) -> float:
    """The largest relative difference from the curve that is checked in."""
    assert len(curve) == len(GOLDEN[name]) == STEPS
    return max(abs(ours / golden - 1) for ours, golden in zip(curve, GOLDEN[name], strict=True))


@pytest.mark.parametrize("name", [*SHAPES])
def test_the_first_losses_are_those_that_are_checked_in(name: str, tokens: Path) -> None:
    found = losses(golden_job(name, tokens))
    assert distance(name, found) < TOLERANCE, (
        f"{name} learns differently: {found}. If that is meant: python {CURVES.with_name('golden.py')} --write, and say why"
    )


@pytest.mark.parametrize("name", [*SHAPES])
def test_other_sums_stay_within_a_hundredth_of_the_tolerance(
    name: str, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another library and micro-batches (which for experts are another loss: see test_accumulation.py)."""
    monkeypatch.setattr(experts, "_onednn_is_faster", lambda: True)
    change = {} if name == "experts" else {"micro_rows": 2}
    found = losses(golden_job(name, tokens, deterministic=False, **change))
    assert distance(name, found) < TOLERANCE / 100


@pytest.mark.parametrize("name", [*SHAPES])
def test_a_slightly_changed_constant_is_seen(name: str, tokens: Path) -> None:
    for what, change in CHANGED.items():
        assert distance(name, losses(golden_job(name, tokens, **change))) > TOLERANCE, what
