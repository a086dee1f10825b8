"""Log-probabilities by chunks against the reference with all logits: values, gradients, errors."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.nn.checks import assert_same_gradients, gen, randn, saved_sizes
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.errors import ConfigError, DataError
from whorl.objectives.log_probs import (
    cross_entropy,
    masked_mean,
    masked_normalize,
    token_entropy,
    token_log_probs,
    token_log_probs_reference,
)
from whorl.objectives.next_token import next_token


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["whorl.objectives.log_probs"]
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 5)
    monkeypatch.setattr(module, "MAX_SAVED_LOGITS", 200)  # so that both branches run


def drawn(n: int, vocab: int, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (hidden [n, d], head [vocab, d], banned mask [vocab], allowed targets [n]), in fp64."""
    g = gen(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(vocab, d, generator=g, dtype=torch.float64, requires_grad=True)
    forbidden = torch.rand(vocab, generator=g) < 0.3
    forbidden[0] = False
    allowed = (~forbidden).nonzero().squeeze(1)
    return hidden, head, forbidden, allowed[torch.randint(0, len(allowed), (n,), generator=g)]


def held_together(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, **how: Any) -> None:
    """Compare values, and gradients of a weighted sum of both results, to 1e-6."""
    results = []
    for function in (token_log_probs, token_log_probs_reference):
        log_prob, entropy = function(hidden, head, targets, **how)
        total = (weights * log_prob).sum()
        if entropy is not None:
            total = total + (weights.flip(0) * entropy).sum()
        leaves = [t for t in (hidden, head) if t.requires_grad]
        results.append([log_prob, entropy, *torch.autograd.grad(total, leaves)])
    assert_close(*results, atol=1e-6, rtol=1e-6)


@given(
    n=st.integers(0, 23),
    vocab=st.integers(1, 17),
    temperature=st.sampled_from([1.0, 0.7, 2.5]),
    softcap=st.sampled_from([None, 1.5]),
    masked=st.booleans(),
    entropy=st.booleans(),
    learns=st.sampled_from(["both", "hidden", "head"]),
    single=st.booleans(),
)
def test_token_log_probs_match_reference(
    n: int, vocab: int, masked: bool, learns: str, single: bool, **how: Any
) -> None:
    hidden, head, forbidden, targets = drawn(n, vocab, seed=n * 31 + vocab)
    if single:
        hidden, head = (t.detach().float() / 2 for t in (hidden, head))
    hidden = hidden.detach().requires_grad_(learns != "head")
    head = head.detach().requires_grad_(learns != "hidden")
    weights = randn(n, seed=n).to(hidden.dtype)
    held_together(hidden, head, targets, weights, banned_mask=forbidden if masked else None, **how)


def test_token_log_probs_sum_to_next_token_loss() -> None:
    hidden, head, _, targets = drawn(12, 15)
    hidden, head = (t.detach().float() for t in (hidden, head))
    loss = next_token(hidden, head, targets, torch.ones(12, dtype=torch.bool))
    assert_close(token_log_probs(hidden, head, targets)[0].sum(), -loss.total)


def test_banned_ids_have_no_probability() -> None:
    hidden, head, forbidden, _ = drawn(4, 11)
    allowed = (~forbidden).nonzero().squeeze(1)
    log_probs = [token_log_probs(hidden, head, i.expand(4), banned_mask=forbidden)[0] for i in allowed]
    assert_close(torch.stack(log_probs).exp().sum(0), torch.ones(4, dtype=torch.float64))


def test_unused_entropy_leaves_gradient_unchanged() -> None:
    hidden, head, _, targets = drawn(9, 8)
    plain = token_log_probs(hidden, head, targets)[0]
    beside, entropy = token_log_probs(hidden, head, targets, entropy=True)
    assert entropy is not None and entropy.requires_grad
    assert_same_gradients(plain.square().sum(), beside.square().sum(), (hidden, head))
    (only,) = torch.autograd.grad(entropy.sum(), hidden)
    assert only.abs().max() > 0


def test_token_log_probs_saves_no_logits() -> None:
    hidden, head, _, targets = drawn(40, 50)
    with saved_sizes() as kept:
        log_prob, _ = token_log_probs(hidden, head, targets, entropy=True)
    assert log_prob.shape == (40,) and sum(kept) < 40 * 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_recomputed_logits_give_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, forbidden, targets = drawn(40, 50)
    found = []
    for kept in (0, 40 * 50):
        monkeypatch.setattr(sys.modules["whorl.objectives.log_probs"], "MAX_SAVED_LOGITS", kept)
        leaves = [hidden.detach().to(dtype).requires_grad_(), head.detach().float().requires_grad_()]
        how: dict[str, Any] = {"banned_mask": forbidden, "entropy": True, "temperature": 0.9}
        log_prob, entropy = token_log_probs(*leaves, targets, **how)
        found.append([log_prob, entropy, *torch.autograd.grad(log_prob.sum() + entropy.sum(), leaves)])
    assert all(map(torch.equal, *found))


def test_token_log_probs_bf16_stays_within_noise() -> None:
    hidden, head, _, targets = drawn(30, 20)
    low = hidden.detach().bfloat16().requires_grad_()
    single = head.detach().float().requires_grad_()
    log_prob, entropy = token_log_probs(low, single, targets, entropy=True)
    assert log_prob.dtype == torch.float32 and entropy is not None and entropy.dtype == torch.float32
    assert_close(log_prob, token_log_probs(hidden.float(), single, targets)[0], atol=0.1, rtol=0.02)
    log_prob.sum().backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
    assert single.grad is not None and single.grad.dtype == torch.float32


INVALID: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": float("nan")},
    {"softcap": 0.0},
    {"banned_mask": torch.zeros(3, dtype=torch.bool)},
    {"banned_mask": torch.zeros(8)},
    {"hidden": torch.zeros(4, 3)},
    {"hidden": torch.zeros(6)},
    {"targets": torch.zeros(2, dtype=torch.int64)},
]


@pytest.mark.parametrize("change", INVALID, ids=str)
def test_token_log_probs_rejects_invalid_arguments(change: dict[str, Any]) -> None:
    hidden, head, _, targets = drawn(4, 8)
    with pytest.raises(ConfigError):
        token_log_probs(**{"hidden": hidden, "head": head, "targets": targets, **change})


def test_token_log_probs_rejects_banned_target() -> None:
    hidden, head, _, targets = drawn(4, 8)
    forbidden = torch.zeros(8, dtype=torch.bool)
    forbidden[targets[2]] = True
    first = int((targets == targets[2]).nonzero()[0])
    with pytest.raises(DataError, match=f"target {first} is id {int(targets[2])}"):
        token_log_probs(hidden, head, targets, banned_mask=forbidden)


def test_cross_entropy_and_entropy_match_torch() -> None:
    logits = (randn(2, 5, 7, seed=1) * 50).requires_grad_()
    targets = torch.randint(0, 7, (2, 5), generator=gen(2))
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    assert_close(cross_entropy(logits, targets), want)
    assert_same_gradients(cross_entropy(logits, targets).sum(), want.sum(), (logits,))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(token_entropy(logits), entropy, atol=1e-5, rtol=1e-5)
    assert_same_gradients(token_entropy(logits).sum(), entropy.sum(), (logits,))
    banned = logits.masked_fill(torch.arange(7) == 3, float("-inf"))
    (gradient,) = torch.autograd.grad(token_entropy(banned).sum(), logits)
    assert gradient.isfinite().all() and (gradient[..., 3] == 0).all()
    assert token_entropy(banned.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_masked_mean_and_normalize_match_torch(dim: int | None) -> None:
    x, mask = randn(4, 6, seed=3), torch.rand(4, 6, generator=gen(4)) > 0.5
    mask[2], mask[:, 5] = False, False
    x[0, 5] = float("nan")  # not in the mask
    x.requires_grad_()
    want = torch.where(mask, x, 0.0)
    total = want.sum() if dim is None else want.sum(dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    expected = torch.masked.mean(x, dim=dim, mask=mask)
    assert_close(masked_mean(x, mask, dim), expected, equal_nan=True)
    assert_close(masked_mean(x, mask, dim), total / count, equal_nan=True)
    assert_close(masked_normalize(x, mask.float(), 8.0, dim), total / 8)
    (gradient,) = torch.autograd.grad(masked_normalize(x, mask, 2.0, dim).sum(), x)
    assert torch.equal(gradient, mask / 2)
