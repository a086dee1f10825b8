"""Learning-rate schedules: shape, limits, validation, and use by a run."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.train.pretraining import train_notes
from tests.support.train.tiny import job

from whorl.errors import ConfigError
from whorl.recipes.recipe import load_recipe
from whorl.train.config import ScheduleConfig
from whorl.train.optim.lr_schedule import check_warmup, lr_scale, warmup_steps

KINDS = ("wsd", "cosine", "linear", "constant")


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    kind = draw(st.sampled_from(KINDS))
    values: dict[str, object] = {"kind": kind, "warmup_ratio": draw(st.floats(0, 0.9))}
    if kind == "wsd":
        values["decay_ratio"] = draw(st.floats(0.01, 1.0)) * (1 - float(values["warmup_ratio"]))  # type: ignore[arg-type]
    if kind != "constant":
        values["min_lr_ratio"] = draw(st.floats(0, 1))
    return ScheduleConfig.model_validate(values)


def test_cosine_with_warmup_matches_torch() -> None:
    """The warm-up of torch's `LinearLR` from 1 / warm to 1, then `CosineAnnealingLR`."""
    warm, total, minimum = 7, 40, 0.1
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warm, total_iters=warm - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warm, eta_min=minimum)
    expected = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warm])
    config = ScheduleConfig(kind="cosine", warmup_steps=warm, min_lr_ratio=minimum)
    for step in range(total):
        assert lr_scale(step, total, config) == pytest.approx(expected.get_last_lr()[0], abs=1e-9), step
        optimizer.step()
        expected.step()


@given(schedules(), st.integers(1, 3000))
def test_lr_scale_rises_then_falls_to_minimum(c: ScheduleConfig, total: int) -> None:
    factors = [lr_scale(step, total, c) for step in range(total)]
    assert all(0 < f <= 1 for f in factors)
    warm = warmup_steps(total, c)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert top <= max(0.0, math.ceil(warm))  # the peak is at the end of the warm-up
    end = [*factors[top:], lr_scale(total, total, c)]
    assert end == sorted(end, reverse=True)
    constant = min(1.0, (total + 1) / max(1.0, warm))
    assert end[-1] == pytest.approx(constant if c.kind == "constant" else c.min_lr_ratio)
    # Continuous: no step exceeds the steepest slope. A cosine's is pi / 2 times a line's.
    falling = max(1.0, c.decay_ratio * total if c.kind == "wsd" else total - warm)
    slope = max(1 / max(1.0, warm), math.pi / 2 / falling)
    assert all(abs(a - b) <= slope + 1e-9 for a, b in pairwise(factors))


@given(st.integers(1, 5000))
def test_lr_scale_default_matches_closed_form(total: int) -> None:
    for step in range(total):
        rising = (step + 1) / max(1.0, 0.02 * total)
        falling = 0.02 + (1 - 0.02) * (total - step) / max(1.0, 0.5 * total)
        wanted = min(1.0, rising, falling)
        assert lr_scale(step, total, ScheduleConfig()) == wanted


def test_lr_scale_kinds_match_their_formulas() -> None:
    def at(step: int, kind: str, **more: float) -> float:
        return lr_scale(step, 1000, ScheduleConfig.model_validate({"kind": kind, **more}))

    assert at(510, "linear", min_lr_ratio=0.0) == pytest.approx(0.5)  # halfway from 20 to 1000
    assert at(510, "cosine", min_lr_ratio=0.0) == pytest.approx(0.5)
    assert at(265, "cosine", min_lr_ratio=0.0) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert at(265, "cosine", min_lr_ratio=0.2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert at(510, "wsd") == pytest.approx(0.02 + 0.98 * 490 / 500) and at(999, "constant") == 1.0
    assert at(3, "constant", warmup_steps=40) == 0.1 and at(39, "constant", warmup_steps=40) == 1.0
    for step in range(0, 1000, 37):  # linear equals a wsd decay without a plateau
        wsd = at(step, "wsd", warmup_ratio=0.25, decay_ratio=0.75)
        assert at(step, "linear", warmup_ratio=0.25) == pytest.approx(wsd, rel=1e-12)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("warmup_ratio=0.7", r"warmup_ratio \(0.7\) \+ decay_ratio \(0.5\) is above 1: together at most 1"),
        ("kind=cosine decay_ratio=0.3", r"decay_ratio \(0.3\) belongs to kind = 'wsd'; 'cosine' falls from"),
        ("kind=constant min_lr_ratio=0.1", r"min_lr_ratio \(0.1\) belongs to a schedule that falls"),
        ("warmup_ratio=0.1 warmup_steps=10", r"both warmup_ratio \(0.1\) and warmup_steps \(10\) are set"),
        ("kind=cosin", r"pretrain.train.schedule.kind cannot be 'cosin'.*'cosine'"),
        ("min_lr_ratio=-1", r"pretrain.train.schedule.min_lr_ratio cannot be '-1'.*greater than or equal to 0"),
        ("rise=1", "no setting 'rise'"),
    ],
)  # fmt: skip
def test_schedule_config_invalid_raises(sets: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        load_recipe("quickstart", sets=[f"pretrain.train.schedule.{s}" for s in sets.split()])


def test_check_warmup_rejects_warmup_steps_too_long() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps is 51, in a run of 100 steps with decay_ratio 0.5"):
        check_warmup(100, ScheduleConfig(warmup_steps=51))
    check_warmup(100, ScheduleConfig(warmup_steps=50))
    check_warmup(100, ScheduleConfig(warmup_steps=99, kind="cosine"))


def test_pretrain_logs_scheduled_learning_rates(tokens: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        wanted = job(tokens, steps=6, schedule={"kind": kind, "warmup_ratio": 0.4})
        rates = [m["learning_rate"] for m in train_notes(wanted, tmp_path / kind).steps]
        assert rates == [pytest.approx(0.02 * lr_scale(n, 6, wanted.schedule)) for n in range(6)]
    with pytest.raises(ConfigError, match="warmup_steps is 9"):
        train_notes(job(tokens, steps=6, schedule={"warmup_steps": 9}), tmp_path / "no")


def test_train_config_imports_no_torch() -> None:
    code = "import sys, whorl.train.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
