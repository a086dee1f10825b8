"""Importance weights against loops, and the corrected expectation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.advantages.importance import importance_weights


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log_prob, behaviour_log_prob, sequence), each [10] in fp64; sequence 1 is empty."""
    g = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([0, 0, 2, 0, 3, 2, 2, 3, 0, 3])
    log_prob, noise = torch.randn(2, 10, generator=g, dtype=torch.float64)
    return log_prob - 2, log_prob - 2 + 0.7 * noise, sequence


RULES = [*itertools.product(["truncate", "mask"], ["token", "sequence", "mean"]), ("trace", "token")]


@pytest.mark.parametrize("rule, level", RULES)
def test_importance_weights_match_definition(rule: Any, level: Any) -> None:
    log_prob, behaviour, sequence = drawn()
    low, high = 0.8, 1.2
    how = {"rule": rule, "level": level, "low": low, "high": high}
    weight, ratios = importance_weights(log_prob.clone().requires_grad_(), behaviour, sequence, **how)
    assert not weight.requires_grad
    raw = []
    for n in range(10):
        here = [m for m in range(10) if sequence[m] == sequence[n]]
        d = [float(log_prob[m] - behaviour[m]) for m in here]
        own = float(log_prob[n] - behaviour[n])
        r = math.exp({"token": own, "sequence": sum(d), "mean": sum(d) / len(d)}[level])
        before = math.prod(min(1.0, math.exp(x)) for m, x in zip(here, d, strict=True) if m < n)
        cut = min(max(r, low), high)
        wanted = {"truncate": cut, "mask": r if low <= r <= high else 0.0, "trace": cut * before}[rule]
        assert float(weight[n]) == pytest.approx(wanted)
        raw.append(r)
    assert ratios.ratio_mean == pytest.approx(sum(raw) / 10)
    assert (ratios.ratio_min, ratios.ratio_max) == pytest.approx((min(raw), max(raw)))
    assert ratios.effective_sample_size == pytest.approx(sum(raw) ** 2 / (10 * sum(r * r for r in raw)))
    assert 0 < ratios.clip_fraction <= 1


def test_importance_weights_are_one_on_policy() -> None:
    log_prob, _, sequence = drawn()
    for rule in ("truncate", "mask", "trace"):
        weight, ratios = importance_weights(log_prob, log_prob, sequence, rule=rule)  # type: ignore[arg-type]
        assert weight.tolist() == [1.0] * 10
        assert ratios.ratio_mean == ratios.effective_sample_size == 1
        assert ratios.log_ratio_abs == ratios.clip_fraction == 0


def test_importance_weights_stay_finite() -> None:
    behaviour, sequence = torch.tensor([-1e4, 1e4]), torch.tensor([0, 0])
    weight, ratios = importance_weights(torch.zeros(2), behaviour, sequence, rule="mask", high=5.0)
    assert bool(weight.isfinite().all()) and weight[0] == 0 and math.isfinite(ratios.ratio_max)
    empty = torch.zeros(0)
    weight, ratios = importance_weights(empty, empty, empty.long(), level="sequence")
    assert weight.shape == (0,) and ratios.ratio_mean == 1


WRONG = [{"low": 2.0, "high": 1.0}, {"low": -1.0}, {"rule": "trace", "level": "sequence"}]


@pytest.mark.parametrize("wrong", WRONG)
def test_importance_weights_reject_invalid_bounds(wrong: dict[str, Any]) -> None:
    log_prob, behaviour, sequence = drawn()
    with pytest.raises(ConfigError):
        importance_weights(log_prob, behaviour, sequence, **wrong)
    with pytest.raises(ConfigError):
        importance_weights(log_prob, behaviour[:3], sequence)
