"""Load balance and router z-loss against their formulas, for any split of a batch."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import assert_same_losses, randn
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.objectives.routing import load_balance, router_z


def logits(n: int = 12) -> torch.Tensor:
    return randn(n, 4, grad=True)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_load_balance_matches_switch_equation_4(scoring: str) -> None:
    z = logits()
    scores = z.softmax(-1) if scoring == "softmax" else z.sigmoid()
    loads = torch.tensor([9, 1, 1, 1])
    loss = load_balance(scores, loads)
    shares = scores / scores.sum(-1, keepdim=True)  # rows of sigmoids do not sum to 1
    want = 4 * (loads / 12 * shares.mean(0)).sum()
    assert_same_losses(loss.total / loss.count, want, [z], atol=1e-6, rtol=1e-5)
    assert float(loss.count) == 12
    assert not loss.metrics["load_balance"].requires_grad


def test_router_z_matches_definition() -> None:
    z = logits()
    loss = router_z(z)
    want = sum(float(row.exp().sum().log()) ** 2 for row in z.detach())
    assert float(loss.total.detach()) == pytest.approx(want, rel=1e-5) and float(loss.count) == 12
    (gradient,) = torch.autograd.grad(loss.total, z)
    assert_close(gradient, 2 * z.detach().logsumexp(-1, keepdim=True) * z.detach().softmax(-1))


def test_routing_losses_independent_of_micro_batches() -> None:
    z = logits()
    loads = torch.bincount(z.detach().argmax(-1), minlength=4)

    def both(part: torch.Tensor) -> torch.Tensor:
        return load_balance(part.softmax(-1), loads).total + router_z(part).total

    (whole,) = torch.autograd.grad(both(z), z)
    (cut,) = torch.autograd.grad(sum(both(part) for part in z.split([5, 1, 6])), z)
    assert_close(cut, whole)


def test_routing_losses_ignore_padding() -> None:
    z = logits()
    mask = torch.arange(12) < 7
    loads = torch.tensor([4, 1, 1, 1])
    for loss, want in (
        (router_z(z, mask), router_z(z[:7])),
        (load_balance(z.softmax(-1), loads, mask), load_balance(z[:7].softmax(-1), loads)),
    ):
        assert_close(loss.total, want.total)
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
