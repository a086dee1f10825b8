"""The fused loss against its reference, values and gradients."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.support.nn.checks import assert_same_losses, gen, randn
from torch.testing import assert_close

from whorl.objectives.next_token import next_token, next_token_reference


@pytest.mark.parametrize("n", [1, 511, 512, 513, 1300])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_next_token_matches_reference(
    n: int, z_loss: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 512 * 101  # several, with partial ones
    monkeypatch.setattr(sys.modules["whorl.objectives.next_token"], "CHUNK_LOGITS", chunks)
    hidden, head = randn(n, 24, seed=n, grad=True), randn(101, 24, seed=n + 1, grad=True)
    targets, mask = torch.randint(0, 101, (n,), generator=gen(n)), torch.rand(n, generator=gen(n)) > 0.3
    fast, slow = (f(hidden, head, targets, mask, z_loss, softcap) for f in (next_token, next_token_reference))
    assert_close((fast.total, fast.metrics["nll"]), (slow.total, slow.metrics["nll"]))
    assert fast.count == slow.count == mask.sum()
    assert_same_losses(fast.total, slow.total, (hidden, head), atol=1e-5, rtol=1e-4)


def test_next_token_without_targets_is_zero() -> None:
    hidden = torch.randn(7, 8, requires_grad=True)
    targets = torch.zeros(7, dtype=torch.int64)
    loss = next_token(hidden, torch.randn(11, 8), targets, targets.bool())
    loss.total.backward()
    assert loss.total == 0 and loss.count == 0 and not hidden.grad.any()


def test_next_token_bf16_stays_within_noise() -> None:
    hidden, head = randn(600, 32), randn(50, 32, seed=1) * 0.2
    targets, mask = torch.randint(0, 50, (600,), generator=gen()), torch.ones(600, dtype=torch.bool)
    exact, rounded = (float(next_token(h, head, targets, mask).total) for h in (hidden, hidden.bfloat16()))
    assert rounded == pytest.approx(exact, rel=5e-3)
