"""Every golden case reproduces its stored result, on any machine; and a slightly changed constant is detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from cases_pretrain import STEPS, golden_job, losses
from cases_surface import names
from golden_case import TOLERANCE, Result, fixed
from golden_inputs import SHAPES
from tests.support.train.tiny import make_tokens
from write import NAMES, STORED

from whorl.engine.cpu import build
from whorl.nn.experts import experts

GOLDEN: dict[str, Any] = json.loads(STORED.read_text())
FAST = [name for name, one in CASES.items() if not one.slow]
AGREE = 0.9  # least share of requests whose token ids are the stored ones
CHANGED = {
    "a rate by 1 %": {"optim": {"lr_muon": 0.0202}},
    "Muon's momentum": {"optim": {"momentum": 0.945}},
    "the end of the plateau": {"schedule": {"decay_ratio": 0.49}},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def distance(curve: list[float], golden: list[float]) -> float:
    """The largest relative difference of a step; values below 1 % of the curve's largest count as that."""
    least = max(map(abs, golden)) / 100
    pairs = zip(curve, golden, strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), least) for ours, theirs in pairs)


def agreement(result: Result, golden: dict[str, str]) -> float:
    """Share of the requests whose token ids are the stored ones."""
    pairs = [
        (ours, theirs)
        for kind, text in golden.items()
        for ours, theirs in zip(result.ids[kind], text.split(), strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def test_every_case_has_a_stored_result() -> None:
    portable = {name for name in FAST if name != "initial-weights"}
    assert set(GOLDEN) == portable, "python tests/golden/write.py --store, and say why"


@pytest.mark.parametrize("name", FAST)
def test_case_reproduces_its_stored_result(name: str) -> None:
    if name.endswith("/native") and build.library() is None:
        pytest.skip("no C++ compiler")
    if name.startswith("engine/"):
        pytest.importorskip("llguidance")
    result, golden = CASES[name](), GOLDEN.get(name, {})
    hint = f"{name} differs. If that is intended: python {STORED.with_name('write.py')} --store, and say why"
    assert result.exact == golden.get("exact", {}), hint
    if "ids" in golden:
        assert agreement(result, golden["ids"]) >= AGREE, hint
    if "curve" in golden:
        assert distance(result.curve, golden["curve"]) < CASES[name].tolerance, hint


def test_parameter_names_equal_the_stored_ones() -> None:
    assert names() == json.loads(NAMES.read_text())


@pytest.mark.parametrize("shape", [*SHAPES])
def test_other_sums_stay_within_tolerance(shape: str, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another matrix library and micro-batches move a curve by a hundredth of the tolerance at most.

    Micro-batches of experts minimise another loss: see test_accumulation.py.
    """
    monkeypatch.setattr(experts, "_onednn_is_faster", lambda: True)
    change = {} if shape == "experts" else {"micro_batch_size": 2}
    found = losses(golden_job(shape, tokens, deterministic=False, **change))
    assert distance(found, GOLDEN[f"pretrain/{shape}"]["curve"]) < TOLERANCE / 100


@pytest.mark.parametrize("shape", [*SHAPES])
def test_slightly_changed_constant_is_detected(shape: str, tokens: Path) -> None:
    golden = GOLDEN[f"pretrain/{shape}"]["curve"]
    assert len(golden) == STEPS
    for what, change in CHANGED.items():
        with fixed():
            found = losses(golden_job(shape, tokens, **change))
        assert distance(found, golden) > TOLERANCE, what
