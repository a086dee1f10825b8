"""Load balance and router z-loss against their formulas, for any split of a batch."""

from __future__ import annotations

import pytest
import torch

from whorl.errors import ConfigError
from whorl.objectives.routing import load_balance, router_z


def logits(n: int = 12, e: int = 4, seed: int = 0) -> torch.Tensor:
    made = torch.randn(n, e, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def test_load_balance_matches_switch_equation_4() -> None:
    scores = logits().detach().softmax(-1)
    loads = torch.bincount(scores.argmax(-1), minlength=4)
    loss = load_balance(scores, loads)
    want = 0.0
    for e in range(4):
        want += float(loads[e]) / 12 * float(scores[:, e].mean())
    assert float(loss.total / loss.count) == pytest.approx(4 * want, rel=1e-5)
    assert float(loss.count) == 12
    assert not load_balance(logits().softmax(-1), loads).metrics["load_balance"].requires_grad


def test_load_balance_limits_even_and_collapsed() -> None:
    even = load_balance(torch.full((8, 4), 0.25), torch.tensor([2, 2, 2, 2]))
    assert float(even.total / even.count) == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0, 0, 0]] * 8)
    fallen = load_balance(one, torch.tensor([8, 0, 0, 0]))
    assert float(fallen.total / fallen.count) == pytest.approx(4.0)
    sigmoids = load_balance(
        torch.full((8, 4), 0.9), torch.tensor([2, 2, 2, 2])
    )  # rows are divided by their sum
    assert float(sigmoids.total / sigmoids.count) == pytest.approx(1.0)


def test_load_balance_gradient_lowers_busy_expert() -> None:
    z = logits()
    load_balance(z.softmax(-1), torch.tensor([9, 1, 1, 1])).total.backward()
    assert z.grad is not None
    assert (z.grad[:, 0] > 0).all() and (z.grad[:, 1:] < 0).all()


def test_router_z_matches_definition() -> None:
    z = logits()
    loss = router_z(z)
    want = sum(float(row.exp().sum().log()) ** 2 for row in z.detach())
    assert float(loss.total.detach()) == pytest.approx(want, rel=1e-5) and float(loss.count) == 12
    (gradient,) = torch.autograd.grad(loss.total, z)
    log_normaliser = z.detach().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(gradient, 2 * log_normaliser * z.detach().softmax(-1))


def test_routing_losses_independent_of_micro_batches() -> None:
    z = logits()
    loads = torch.bincount(z.detach().argmax(-1), minlength=4)

    def both(part: torch.Tensor) -> torch.Tensor:
        return load_balance(part.softmax(-1), loads).total + router_z(part).total

    (whole,) = torch.autograd.grad(both(z), z)
    (cut,) = torch.autograd.grad(sum(both(part) for part in z.split([5, 1, 6])), z)
    torch.testing.assert_close(cut, whole)


def test_routing_losses_ignore_padding() -> None:
    z = logits()
    mask = torch.arange(12) < 7
    loads = torch.tensor([4, 1, 1, 1])
    for loss, want in (
        (router_z(z, mask), router_z(z[:7])),
        (load_balance(z.softmax(-1), loads, mask), load_balance(z[:7].softmax(-1), loads)),
    ):
        torch.testing.assert_close(loss.total, want.total)
        assert float(loss.count) == 7
        assert int(torch.autograd.grad(loss.total, z)[0][7:].count_nonzero()) == 0


def test_routing_losses_without_tokens_are_zero() -> None:
    for loss in (router_z(logits(0)), load_balance(logits(0).softmax(-1), torch.zeros(4))):
        assert float(loss.total.detach()) == 0 and float(loss.count) == 0


def test_routing_losses_reject_invalid_shapes() -> None:
    with pytest.raises(ConfigError, match="loads"):
        load_balance(logits(), torch.zeros(5))
    with pytest.raises(ConfigError, match="mask"):
        router_z(logits(), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ConfigError, match="scores or logits"):
        router_z(torch.zeros(3))
