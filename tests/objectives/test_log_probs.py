"""Log-probabilities by chunks against the reference with all logits: values, gradients, errors."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whorl.errors import ConfigError, DataError
from whorl.objectives.log_probs import token_log_probs, token_log_probs_reference
from whorl.objectives.next_token import next_token


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["whorl.objectives.log_probs"]
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 5)
    monkeypatch.setattr(module, "MAX_SAVED_LOGITS", 200)  # so that both branches run


def drawn(n: int, vocab: int, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (hidden [n, d], head [vocab, d], banned mask [vocab], allowed targets [n]), in fp64."""
    g = torch.Generator().manual_seed(seed)
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
    for ours, desired in zip(*results, strict=True):
        assert (ours is None) == (desired is None)
        if ours is not None:
            torch.testing.assert_close(ours, desired, atol=1e-6, rtol=1e-6)


@settings(max_examples=60, deadline=None)
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
    n: int,
    vocab: int,
    temperature: float,
    softcap: float | None,
    masked: bool,
    entropy: bool,
    learns: str,
    single: bool,
) -> None:
    hidden, head, forbidden, targets = drawn(n, vocab, seed=n * 31 + vocab)
    if single:
        hidden, head = (t.detach().float() / 2 for t in (hidden, head))
    hidden, head = (
        t.detach().requires_grad_(name in (learns, "both") or learns == "both")
        for t, name in ((hidden, "hidden"), (head, "head"))
    )
    weights = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(hidden.dtype)
    how = {"temperature": temperature, "softcap": softcap, "entropy": entropy}
    held_together(hidden, head, targets, weights, banned_mask=forbidden if masked else None, **how)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_token_log_probs_pass_gradcheck(softcap: float | None, entropy: bool) -> None:
    hidden, head, forbidden, targets = drawn(7, 9)

    def results(hidden: Tensor, head: Tensor) -> Any:
        found = token_log_probs(
            hidden, head, targets, temperature=0.8, softcap=softcap, banned_mask=forbidden, entropy=entropy
        )
        return tuple(x for x in found if x is not None)

    assert torch.autograd.gradcheck(results, (hidden, head))
    assert torch.autograd.gradcheck(lambda h: results(h, head.detach()), (hidden,))


def test_token_log_probs_sum_to_next_token_loss() -> None:
    hidden, head, _, targets = drawn(12, 15)
    hidden, head = (t.detach().float() for t in (hidden, head))
    loss = next_token(hidden, head, targets, torch.ones(12, dtype=torch.bool))
    torch.testing.assert_close(token_log_probs(hidden, head, targets)[0].sum(), -loss.total)


def test_banned_ids_have_no_probability() -> None:
    hidden, head, forbidden, _ = drawn(4, 11)
    allowed = (~forbidden).nonzero().squeeze(1)
    whole = torch.stack(
        [token_log_probs(hidden, head, i.expand(4), banned_mask=forbidden)[0].exp() for i in allowed]
    )
    torch.testing.assert_close(whole.sum(0), torch.ones(4, dtype=torch.float64))


def test_unused_entropy_leaves_gradient_unchanged() -> None:
    hidden, head, _, targets = drawn(9, 8)
    plain = token_log_probs(hidden, head, targets)[0]
    beside, entropy = token_log_probs(hidden, head, targets, entropy=True)
    assert entropy is not None and entropy.requires_grad
    for ours, desired in zip(
        *(torch.autograd.grad(x.square().sum(), (hidden, head)) for x in (plain, beside)), strict=True
    ):
        torch.testing.assert_close(ours, desired)
    (only,) = torch.autograd.grad(token_log_probs(hidden, head, targets, entropy=True)[1].sum(), hidden)  # type: ignore[union-attr]
    assert only.abs().max() > 0


def test_token_log_probs_saves_no_logits() -> None:
    hidden, head, _, targets = drawn(40, 50)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
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
        log_prob, entropy = token_log_probs(
            *leaves, targets, banned_mask=forbidden, entropy=True, temperature=0.9
        )
        assert entropy is not None
        found.append([log_prob, entropy, *torch.autograd.grad(log_prob.sum() + entropy.sum(), leaves)])
    assert all(map(torch.equal, *found))


def test_token_log_probs_bf16_stays_within_noise() -> None:
    hidden, head, _, targets = drawn(30, 20)
    low = hidden.detach().bfloat16().requires_grad_()
    single = head.detach().float().requires_grad_()
    log_prob, entropy = token_log_probs(low, single, targets, entropy=True)
    assert log_prob.dtype == torch.float32 and entropy is not None and entropy.dtype == torch.float32
    torch.testing.assert_close(
        log_prob, token_log_probs(hidden.float(), single, targets)[0], atol=0.1, rtol=0.02
    )
    log_prob.sum().backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
    assert single.grad is not None and single.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"softcap": 0.0},
        {"banned_mask": torch.zeros(3, dtype=torch.bool)},
        {"banned_mask": torch.zeros(8)},
    ],
)
def test_token_log_probs_rejects_invalid_settings(change: dict[str, Any]) -> None:
    hidden, head, _, targets = drawn(4, 8)
    with pytest.raises(ConfigError):
        token_log_probs(hidden, head, targets, **change)


def test_token_log_probs_rejects_invalid_shapes() -> None:
    hidden, head, _, targets = drawn(4, 8)
    for wrong in ((hidden[:, :3], head, targets), (hidden, head, targets[:2]), (hidden[0], head, targets)):
        with pytest.raises(ConfigError):
            token_log_probs(*wrong)


def test_token_log_probs_rejects_banned_target() -> None:
    hidden, head, _, targets = drawn(4, 8)
    forbidden = torch.zeros(8, dtype=torch.bool)
    forbidden[targets[2]] = True
    first = int((targets == targets[2]).nonzero()[0])
    with pytest.raises(DataError, match=f"target {first} is id {int(targets[2])}"):
        token_log_probs(hidden, head, targets, banned_mask=forbidden)
