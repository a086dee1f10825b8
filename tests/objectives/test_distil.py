"""Distillation: each divergence by its definition, full vocabulary and top-k, chunked and whole."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_losses, randn, saved_sizes
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.distil import Divergence, distil_full_vocab, distil_top_k, divergence

KINDS: list[tuple[Divergence, float]] = [
    ("forward", 0.5), ("reverse", 0.5), ("jensen", 0.5), ("jensen", 0.1), ("jensen", 0.8),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["whorl.objectives.distil"]
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 4)


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden [6, 8], head [11, 8], the teacher's log-probabilities [6, 11])."""
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(6, 8, generator=g), torch.randn(11, 8, generator=g)
    teacher = (2 * torch.randn(6, 11, generator=g)).to(dtype).log_softmax(-1)
    return hidden.to(dtype), head.to(dtype), teacher


def by_definition(p: Tensor, q: Tensor, kind: Divergence, beta: float) -> Tensor:
    """Return the sum of D over rows of two distributions [N, K]."""
    if kind == "jensen":
        m = beta * p + (1 - beta) * q
        return beta * (p * torch.log(p / m)).sum() + (1 - beta) * (q * torch.log(q / m)).sum()
    return (p * torch.log(p / q)).sum() if kind == "forward" else (q * torch.log(q / p)).sum()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_distil_full_vocab_matches_definition(
    kind: Divergence, beta: float, softcap: float | None, temperature: float
) -> None:
    hidden, head, _ = drawn(dtype=torch.float64)
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    their_hidden, their_head, _ = drawn(1, torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 0, 1]).bool()

    def soft(h: Tensor, w: Tensor, cap: float | None) -> Tensor:
        z = h @ w.t()
        return ((z if cap is None else cap * torch.tanh(z / cap)) / temperature).softmax(-1)

    p, q = soft(their_hidden, their_head, 3.0), soft(hidden, head, softcap)
    wanted = by_definition(p[mask], q[mask], kind, beta)
    how: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": temperature, "softcap": softcap}
    found = [distil_full_vocab(hidden, head, their_hidden, their_head, mask, teacher_softcap=3.0, **how)]
    found.append(distil_top_k(hidden, head, p.log(), torch.arange(11).expand(6, -1), mask, **how))
    for loss in found:
        assert_same_losses(loss.total, wanted, (hidden, head), atol=1e-9, rtol=1e-9)
        assert loss.count == 4 and loss.metrics["kl"] == loss.total.detach()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_distil_top_k_matches_coarse_divergence(k: int, kind: Divergence, beta: float) -> None:
    hidden, head, teacher = drawn(dtype=torch.float64)
    hidden.requires_grad_()
    values, ids = teacher.topk(k)
    student = (hidden @ head.t()).softmax(-1).gather(1, ids)
    p, q = (torch.cat([t, 1 - t.sum(1, keepdim=True)], 1) for t in (values.exp(), student))
    wanted = by_definition(p, q, kind, beta)
    mask = torch.ones(6)
    found = distil_top_k(hidden, head, values, ids, mask, kind=kind, beta=beta).total
    assert_same_losses(found, wanted, [hidden], atol=1e-6, rtol=1e-6)
    everything = torch.arange(11).expand(6, -1)
    whole = distil_top_k(hidden, head, teacher, everything, mask, kind=kind, beta=beta).total
    assert 0 < found <= whole + 1e-9


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("k", [3, 11])
def test_distil_top_k_is_zero_for_exact_student(k: int, kind: Divergence, beta: float) -> None:
    hidden, head, _ = drawn()
    hidden.requires_grad_()
    values, ids = (hidden @ head.t()).detach().log_softmax(-1).topk(k)
    loss = distil_top_k(hidden, head, values, ids, torch.ones(6), kind=kind, beta=beta)
    assert abs(loss.total.item()) < 1e-5
    (gradient,) = torch.autograd.grad(loss.total, hidden)
    assert gradient.abs().max() < 1e-5


def test_distil_full_vocab_saves_no_logits() -> None:
    hidden, head, their_head = randn(50, 4, grad=True), randn(60, 4, seed=1), randn(60, 4, seed=2)
    with saved_sizes() as kept:
        loss = distil_full_vocab(hidden, head, hidden, their_head, torch.ones(50))
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and head.grad is None
    assert max(kept) < 50 * 60
    with torch.no_grad():
        assert not distil_full_vocab(hidden, head, hidden, their_head, torch.ones(50)).total.requires_grad


def test_distil_top_k_bf16_stays_within_noise() -> None:
    hidden, head, teacher = drawn()
    ids = torch.arange(11).expand(6, -1)
    low = hidden.bfloat16().requires_grad_()
    loss = distil_top_k(low, head, teacher, ids, torch.ones(6))
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert loss.total.dtype == torch.float32 and low.grad is not None and low.grad.dtype == torch.bfloat16
    want = F.kl_div((hidden @ head.t()).log_softmax(-1), teacher, log_target=True, reduction="sum")
    assert float(loss.total.detach()) == pytest.approx(float(want), rel=0.02)


def test_distil_top_k_without_positions_is_zero() -> None:
    hidden, head, teacher = drawn()
    ids = torch.arange(11).expand(6, -1)
    masked = distil_top_k(hidden, head, teacher, ids, torch.zeros(6))
    none = distil_top_k(hidden[:0], head, teacher[:0], ids[:0], torch.zeros(0))
    assert masked.total == masked.count == none.total == none.count == 0


def test_distil_rejects_invalid_arguments() -> None:
    hidden, head, teacher = drawn()
    with pytest.raises(ConfigError, match="vocabulary"):
        distil_full_vocab(hidden, head, hidden, head[:9], torch.ones(6))
    with pytest.raises(ConfigError, match="sideways"):
        divergence(teacher, teacher, "sideways")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="beta"):
        divergence(teacher, teacher, "jensen", 1.0)
