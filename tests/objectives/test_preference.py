"""Preference objectives against their equations, pair by pair in fp64: values, gradients, metrics, micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import pytest
import torch
from tests.support.nn.checks import assert_same_losses
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss
from whorl.objectives.preference import PairLogProbs, dpo, ipo, kto, kto_kl, orpo, simpo

P = 6


def drawn(seed: int = 0, dtype: torch.dtype = torch.float64) -> PairLogProbs:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (2, P), generator=g)
    a, b, c, d = (-torch.rand(4, P, generator=g, dtype=torch.float64) * lengths.repeat(2, 1)).to(dtype)
    return PairLogProbs(a.requires_grad_(), b.requires_grad_(), c, d, *lengths)


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def dpo_equation(p: PairLogProbs, beta: float, e: float) -> Tensor:
    wins = sigma(beta * (p.chosen - p.reference_chosen) - beta * (p.rejected - p.reference_rejected))
    return -(1 - e) * torch.log(wins) - e * torch.log(1 - wins)


def ipo_equation(p: PairLogProbs, tau: float, per_token: bool) -> Tensor:
    m, n = (p.chosen_length, p.rejected_length) if per_token else (1, 1)
    h = (p.chosen - p.reference_chosen) / m - (p.rejected - p.reference_rejected) / n
    return (h - 1 / (2 * tau)) ** 2


def simpo_equation(p: PairLogProbs, beta: float, gamma: float) -> Tensor:
    means = p.chosen / p.chosen_length, p.rejected / p.rejected_length
    return -torch.log(sigma(beta * means[0] - beta * means[1] - gamma))


def orpo_equation(pairs: PairLogProbs, weight: float) -> Tensor:
    mean = pairs.chosen / pairs.chosen_length
    p, q = torch.exp(mean), torch.exp(pairs.rejected / pairs.rejected_length)
    return -mean - weight * torch.log(sigma(torch.log((p / (1 - p)) / (q / (1 - q)))))


Objective, Equation = Callable[[PairLogProbs], Loss], Callable[[PairLogProbs], Tensor]
CASES: list[tuple[Objective, Equation]] = [
    (dpo, partial(dpo_equation, beta=0.1, e=0.0)),
    (partial(dpo, beta=0.5, label_smoothing=0.2), partial(dpo_equation, beta=0.5, e=0.2)),
    (partial(ipo, beta=0.3), partial(ipo_equation, tau=0.3, per_token=False)),
    (partial(ipo, beta=0.3, length_normalized=True), partial(ipo_equation, tau=0.3, per_token=True)),
    (partial(simpo, beta=2.5, gamma=0.7), partial(simpo_equation, beta=2.5, gamma=0.7)),
    (partial(orpo, weight=0.4), partial(orpo_equation, weight=0.4)),
]


@pytest.mark.parametrize(("objective", "equation"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_preference_losses_match_papers(objective: Objective, equation: Equation, seed: int) -> None:
    pairs = drawn(seed)
    loss = objective(pairs)
    assert loss.count == P
    wanted = equation(pairs).sum()
    assert_same_losses(loss.total, wanted, (pairs.chosen, pairs.rejected), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("objective", "equation"), CASES)
def test_preference_losses_fp32_and_micro_batches(objective: Objective, equation: Equation) -> None:
    pairs = drawn(7, torch.float32)
    whole = objective(pairs)
    wanted = float(equation(drawn(7)).sum().detach())
    assert float(whole.total.detach()) == pytest.approx(wanted, rel=2e-6, abs=1e-6)
    cuts = [[getattr(pairs, f.name)[a:b] for f in fields(pairs)] for a, b in ((0, 1), (1, 6), (6, 9))]
    parts = [objective(PairLogProbs(*cut)) for cut in cuts]
    assert_close(sum(p.total for p in parts), whole.total)
    assert sum(p.count for p in parts) == P
    for name, value in whole.metrics.items():
        assert_close(sum(p.metrics[name] for p in parts), value)


def test_dpo_metrics_use_implicit_rewards() -> None:
    pairs = PairLogProbs(*torch.tensor([[-1.0, -3, -2], [-2.0, -1, -2], [-2.0, -2, -2], [-2.0, -2, -2]]))
    found = {name: float(value) for name, value in dpo(pairs, beta=0.5).metrics.items()}
    rewards = {"rewards/chosen": 0, "rewards/rejected": 0.5, "rewards/margin": -0.5, "rewards/accuracy": 1}
    assert found == {**rewards, "ties": 1}


def test_orpo_odds_stay_finite() -> None:
    chosen = torch.tensor([0.0, -1e-9, -400.0, 0.0], requires_grad=True)
    lengths = torch.tensor([3.0, 2.0, 1.0, 0.0])
    loss = orpo(PairLogProbs(chosen, torch.tensor([-900.0, 0.0, -1e-7, 0.0]), None, None, lengths, lengths))
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert bool(loss.total.isfinite()) and bool(chosen.grad.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("z", [0.0, 0.6])
def test_kto_matches_equation(z: float) -> None:
    pairs = drawn(2)
    good = torch.tensor([True, False, True, True, False, False])
    point = torch.tensor(z, requires_grad=True)
    h, options = pairs.chosen - pairs.reference_chosen, {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss = kto(pairs.chosen, pairs.reference_chosen, good, point, beta=0.3, **options)
    value = torch.where(good, 1.5 * sigma(0.3 * (h - z)), 0.5 * sigma(0.3 * (z - h)))
    wanted = (torch.where(good, 1.5, 0.5) - value).sum()
    assert_same_losses(loss.total, wanted, [pairs.chosen], atol=1e-7, rtol=1e-7)
    assert loss.count == P and not loss.metrics["kl"].requires_grad
    assert float(loss.metrics["kl"] / loss.count) == pytest.approx(z)
    assert loss.metrics["rewards/accuracy"] == ((h > z) == good).sum()
    assert (loss.metrics["desirable"], loss.metrics["undesirable"]) == (3, 3)
    assert_close(loss.metrics["rewards/desirable"], 0.3 * h.detach()[good].sum())
    assert_close(loss.metrics["rewards/undesirable"], 0.3 * h.detach()[~good].sum())


def test_kto_kl_is_clamped_mean() -> None:
    reference = torch.tensor([-1.0, -2.0])
    assert kto_kl(torch.tensor([-0.5, -1.0]), reference) == 0.75
    assert kto_kl(torch.tensor([-3.0, -2.0]), reference) == 0  # negative estimates become 0
    assert kto_kl(torch.zeros(0), torch.zeros(0)) == 0


def test_preference_losses_reject_missing_input() -> None:
    pairs = drawn()
    alone = PairLogProbs(pairs.chosen, pairs.rejected)
    for objective, missing in ((dpo, "reference"), (ipo, "reference"), (simpo, "lengths"), (orpo, "lengths")):
        with pytest.raises(ConfigError, match=missing):
            objective(alone)
    with pytest.raises(ConfigError, match="rejected is"):
        PairLogProbs(pairs.chosen, pairs.rejected[:2])
    with pytest.raises(ConfigError, match="smoothing"):
        dpo(pairs, label_smoothing=0.5)
    with pytest.raises(ConfigError):
        kto(pairs.chosen, pairs.rejected[:2], torch.ones(P, dtype=torch.bool), 0.0)
