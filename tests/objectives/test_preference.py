"""Preference objectives against their equations, pair by pair in fp64: values, gradients, metrics, micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import pytest
import torch
from torch import Tensor

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


def pair(pairs: PairLogProbs, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    values = [getattr(pairs, f.name)[i] for f in fields(pairs)]
    return (*values[:4], int(values[4]), int(values[5]))  # type: ignore[return-value]


def dpo_equation(pairs: PairLogProbs, i: int, beta: float, e: float) -> Tensor:
    c, r, rc, rr, _, _ = pair(pairs, i)
    wins = sigma(beta * (c - rc) - beta * (r - rr))
    return -(1 - e) * torch.log(wins) - e * torch.log(1 - wins)


def ipo_equation(pairs: PairLogProbs, i: int, tau: float, per_token: bool) -> Tensor:
    c, r, rc, rr, m, n = pair(pairs, i)
    h = (c - rc) / m - (r - rr) / n if per_token else c - rc - (r - rr)
    return (h - 1 / (2 * tau)) ** 2


def simpo_equation(pairs: PairLogProbs, i: int, beta: float, gamma: float) -> Tensor:
    c, r, _, _, m, n = pair(pairs, i)
    return -torch.log(sigma(beta / m * c - beta / n * r - gamma))


def orpo_equation(pairs: PairLogProbs, i: int, weight: float) -> Tensor:
    c, r, _, _, m, n = pair(pairs, i)
    p, q = torch.exp(c / m), torch.exp(r / n)
    return -c / m - weight * torch.log(sigma(torch.log((p / (1 - p)) / (q / (1 - q)))))


CASES: list[tuple[Callable[[PairLogProbs], Loss], Callable[[PairLogProbs, int], Tensor]]] = [
    (dpo, partial(dpo_equation, beta=0.1, e=0.0)),
    (partial(dpo, beta=0.5, label_smoothing=0.2), partial(dpo_equation, beta=0.5, e=0.2)),
    (partial(ipo, beta=0.3), partial(ipo_equation, tau=0.3, per_token=False)),
    (partial(ipo, beta=0.3, length_normalized=True), partial(ipo_equation, tau=0.3, per_token=True)),
    (partial(simpo, beta=2.5, gamma=0.7), partial(simpo_equation, beta=2.5, gamma=0.7)),
    (partial(orpo, weight=0.4), partial(orpo_equation, weight=0.4)),
]


@pytest.mark.parametrize(("objective", "equation"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_preference_losses_match_papers(
    objective: Callable[[PairLogProbs], Loss], equation: Callable[[PairLogProbs, int], Tensor], seed: int
) -> None:
    pairs = drawn(seed)
    loss = objective(pairs)
    wanted = torch.stack([equation(pairs, i) for i in range(P)]).sum()
    assert loss.count == P
    torch.testing.assert_close(loss.total, wanted, atol=1e-9, rtol=1e-9)
    both = [torch.autograd.grad(x, (pairs.chosen, pairs.rejected)) for x in (loss.total, wanted)]
    for ours, desired in zip(*both, strict=True):
        torch.testing.assert_close(ours, desired, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("objective", "equation"), CASES)
def test_preference_losses_fp32_and_micro_batches(
    objective: Callable[[PairLogProbs], Loss], equation: Callable[[PairLogProbs, int], Tensor]
) -> None:
    pairs = drawn(7, torch.float32)
    whole = objective(pairs)
    wanted = sum(float(equation(drawn(7), i).detach()) for i in range(P))
    assert float(whole.total.detach()) == pytest.approx(wanted, rel=2e-6, abs=1e-6)
    parts = [
        objective(PairLogProbs(**{f.name: getattr(pairs, f.name)[s] for f in fields(pairs)}))
        for s in (slice(0, 1), slice(1, 6), slice(6, 9))
    ]
    torch.testing.assert_close(sum(p.total for p in parts), whole.total)
    assert sum(p.count for p in parts) == P
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name] for p in parts), value)


def test_dpo_metrics_use_implicit_rewards() -> None:
    pairs = PairLogProbs(*torch.tensor([[-1.0, -3, -2], [-2.0, -1, -2], [-2.0, -2, -2], [-2.0, -2, -2]]))
    metrics = dpo(pairs, beta=0.5).metrics
    found = {name: float(value) for name, value in metrics.items()}
    assert found == {
        "rewards/chosen": 0,
        "rewards/rejected": 0.5,
        "rewards/margin": -0.5,
        "rewards/accuracy": 1,
        "ties": 1,
    }


@pytest.mark.parametrize("objective", [dpo, simpo, partial(orpo, weight=1.0)])
def test_identical_pairs_have_no_gradient(objective: Callable[[PairLogProbs], Loss]) -> None:
    logits = torch.zeros(3, requires_grad=True)
    log_prob = logits.log_softmax(0)[:1]  # the same completion on both sides
    length = torch.ones(1)
    loss = objective(PairLogProbs(log_prob, log_prob, log_prob.detach(), log_prob.detach(), length, length))
    (gradient,) = torch.autograd.grad(loss.total, logits)
    sft = torch.autograd.grad(-logits.log_softmax(0)[0], logits)[0] if "sft" in loss.metrics else 0 * gradient
    torch.testing.assert_close(gradient, sft)
    assert loss.metrics["ties"] == 1 and loss.metrics["rewards/accuracy"] == 0


def test_orpo_odds_stay_finite() -> None:
    chosen = torch.tensor([0.0, -1e-9, -400.0, 0.0], requires_grad=True)
    lengths = torch.tensor([3.0, 2.0, 1.0, 0.0])
    loss = orpo(PairLogProbs(chosen, torch.tensor([-900.0, 0.0, -1e-7, 0.0]), None, None, lengths, lengths))
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert bool(loss.total.isfinite()) and bool(chosen.grad.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("z", [0.0, 0.6])
def test_kto_matches_equation(z: float) -> None:
    pairs = drawn(2)
    assert pairs.reference_chosen is not None
    good = torch.tensor([True, False, True, True, False, False])
    point = torch.tensor(z, requires_grad=True)
    loss = kto(
        pairs.chosen, pairs.reference_chosen, good, point, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5,
    )  # fmt: skip
    terms = []
    for i in range(P):
        h = pairs.chosen[i] - pairs.reference_chosen[i]
        weight = 1.5 if good[i] else 0.5
        value = weight * sigma(0.3 * (h - z)) if good[i] else weight * sigma(0.3 * (z - h))
        terms.append(weight - value)
    wanted = torch.stack(terms).sum()
    torch.testing.assert_close(loss.total, wanted, atol=1e-7, rtol=1e-7)
    assert loss.count == P and not loss.metrics["kl"].requires_grad
    assert float(loss.metrics["kl"] / loss.count) == pytest.approx(z)
    both = [torch.autograd.grad(x, pairs.chosen)[0] for x in (loss.total, wanted)]
    torch.testing.assert_close(*both, atol=1e-7, rtol=1e-7)
    h = (pairs.chosen - pairs.reference_chosen).detach()
    assert loss.metrics["rewards/accuracy"] == ((h > z) == good).sum()
    assert (loss.metrics["desirable"], loss.metrics["undesirable"]) == (3, 3)
    torch.testing.assert_close(loss.metrics["rewards/desirable"], 0.3 * h[good].sum())
    torch.testing.assert_close(loss.metrics["rewards/undesirable"], 0.3 * h[~good].sum())


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
