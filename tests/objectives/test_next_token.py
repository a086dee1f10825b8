"""The fused loss against its reference, values and gradients."""

from __future__ import annotations

import sys

import pytest
import torch

from whorl.objectives.next_token import next_token, next_token_reference


@pytest.mark.parametrize("n", [1, 511, 512, 513, 1300])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_next_token_matches_reference(
    n: int, z_loss: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["whorl.objectives.next_token"], "CHUNK_LOGITS", 512 * 101
    )  # several chunks with partial ones
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 24, generator=g, requires_grad=True)
    head = torch.randn(101, 24, generator=g, requires_grad=True)
    targets = torch.randint(0, 101, (n,), generator=g)
    mask = torch.rand(n, generator=g) > 0.3
    fast, slow = (f(hidden, head, targets, mask, z_loss, softcap) for f in (next_token, next_token_reference))
    torch.testing.assert_close(fast.total, slow.total)
    torch.testing.assert_close(fast.metrics["nll"], slow.metrics["nll"])
    assert fast.count == slow.count == mask.sum()
    # Scaled, as by a learner that divides.
    for ours, desired in zip(
        torch.autograd.grad(fast.total * 0.5, (hidden, head)),
        torch.autograd.grad(slow.total * 0.5, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(ours, desired, atol=1e-5, rtol=1e-4)


def test_next_token_without_targets_is_zero() -> None:
    hidden = torch.randn(7, 8, requires_grad=True)
    loss = next_token(
        hidden, torch.randn(11, 8), torch.zeros(7, dtype=torch.int64), torch.zeros(7, dtype=torch.bool)
    )
    loss.total.backward()
    assert loss.total == 0 and loss.count == 0 and not hidden.grad.any()


def test_next_token_bf16_stays_within_noise() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(600, 32, generator=g), torch.randn(50, 32, generator=g) * 0.2
    targets, mask = torch.randint(0, 50, (600,), generator=g), torch.ones(600, dtype=torch.bool)
    exact = next_token(hidden, head, targets, mask).total
    assert float(next_token(hidden.bfloat16(), head, targets, mask).total) == pytest.approx(
        float(exact), rel=5e-3
    )
