"""Distillation: each divergence by its definition, full vocabulary and top-k, chunked and whole."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
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


def by_loops(p: Tensor, q: Tensor, kind: Divergence, beta: float) -> Tensor:
    """Return D of two distributions [K], outcome by outcome."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(p, q, strict=True):
        m = beta * a + (1 - beta) * b
        forward, reverse = a * torch.log(a / b), b * torch.log(b / a)
        mixed = beta * a * torch.log(a / m) + (1 - beta) * b * torch.log(b / m)
        total = total + {"forward": forward, "reverse": reverse, "jensen": mixed}[kind]
    return total


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
    wanted = torch.stack([by_loops(p[n], q[n], kind, beta) for n in range(6) if mask[n]]).sum()
    how: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": temperature, "softcap": softcap}
    found = [distil_full_vocab(hidden, head, their_hidden, their_head, mask, teacher_softcap=3.0, **how)]
    found.append(distil_top_k(hidden, head, p.log(), torch.arange(11).expand(6, -1), mask, **how))
    desired = torch.autograd.grad(0.5 * wanted, (hidden, head))
    for loss in found:
        torch.testing.assert_close(loss.total, wanted, atol=1e-9, rtol=1e-9)
        assert loss.count == 4 and loss.metrics["kl"] == loss.total.detach()
        for ours, other in zip(torch.autograd.grad(0.5 * loss.total, (hidden, head)), desired, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_distil_top_k_matches_coarse_divergence(k: int, kind: Divergence, beta: float) -> None:
    hidden, head, teacher = drawn(dtype=torch.float64)
    hidden.requires_grad_()
    values, ids = teacher.topk(k)
    student = (hidden @ head.t()).softmax(-1).gather(1, ids)
    p, q = (torch.cat([t, 1 - t.sum(1, keepdim=True)], 1) for t in (values.exp(), student))
    wanted = torch.stack([by_loops(p[n], q[n], kind, beta) for n in range(6)]).sum()
    mask = torch.ones(6)
    found = distil_top_k(hidden, head, values, ids, mask, kind=kind, beta=beta).total
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, hidden)[0] for x in (found, wanted)), atol=1e-6, rtol=1e-6
    )
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


def test_jensen_approaches_both_kl_limits() -> None:
    _, _, teacher = drawn(dtype=torch.float64)
    student = teacher.roll(1, 0)
    for beta, kind, scale in ((1e-6, "forward", 1e-6), (1 - 1e-6, "reverse", 1e-6)):
        found = divergence(teacher, student, "jensen", beta) / scale  # D / beta has a limit
        torch.testing.assert_close(found, divergence(teacher, student, kind), rtol=1e-3, atol=1e-4)  # type: ignore[arg-type]


def test_forward_covers_modes_and_reverse_seeks_one() -> None:
    places = torch.arange(41) - 20.0
    teacher = torch.logaddexp(-((places - 8) ** 2) / 4, -((places + 8) ** 2) / 4 - 0.5).log_softmax(0)
    found = {}
    for kind in ("forward", "reverse"):
        mean, width = torch.tensor(2.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
        optimizer = torch.optim.Adam([mean, width], lr=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            student = (-((places - mean) ** 2) / (2 * width.exp() ** 2)).log_softmax(0)
            divergence(teacher[None], student[None], kind).sum().backward()  # type: ignore[arg-type, no-untyped-call]
            optimizer.step()
        found[kind] = (float(mean.detach()), float(width.detach().exp()))
    assert abs(found["forward"][0]) < 4 and found["forward"][1] > 6
    assert abs(found["reverse"][0] - 8) < 0.5 and found["reverse"][1] < 2


def test_distil_top_k_student_learns_teacher() -> None:
    teacher = drawn()[2]
    values, ids = teacher.topk(8)
    learned = torch.nn.Parameter(torch.randn(11, 6, generator=torch.Generator().manual_seed(3)))
    optimizer = torch.optim.Adam([learned], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        distil_top_k(torch.eye(6), learned, values, ids, torch.ones(6)).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.allclose(learned.t().softmax(-1).gather(1, ids), values.exp(), atol=0.01)


def test_distil_full_vocab_saves_no_logits() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 4, generator=g, requires_grad=True)
    head, their_head = torch.randn(2, 60, 4, generator=g)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
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
