"""Distillation: the KL by its definition, and what few ids of a teacher still say."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from whorl.objectives.distil import distil


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [6, 8], head [11, 8], the teacher's log-probabilities [6, 11])."""
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(6, 8, generator=g), torch.randn(11, 8, generator=g)
    return hidden, head, (2 * torch.randn(6, 11, generator=g)).log_softmax(-1)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_it_is_the_divergence_of_the_whole_distributions(softcap: float | None) -> None:
    hidden, head, teacher = drawn()
    mask = torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    logits = hidden @ head.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    want = F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(-1)[mask].sum()
    everything = torch.arange(11).expand(6, -1)
    found = distil(hidden, head, teacher, everything, mask, softcap)
    assert torch.allclose(found.total, want, atol=1e-5) and found.count == 4
    assert torch.allclose(found.metrics["kl"], want, atol=1e-5)


@pytest.mark.parametrize("k", [1, 4, 10])
def test_with_few_ids_it_is_the_divergence_of_the_coarser_distributions(k: int) -> None:
    hidden, head, teacher = drawn()
    values, ids = teacher.topk(k)
    student = (hidden @ head.t()).softmax(-1).gather(1, ids)
    p, q = (torch.cat([t, 1 - t.sum(1, keepdim=True)], 1) for t in (values.exp(), student))
    mask = torch.ones(6)
    found = distil(hidden, head, values, ids, mask).total
    assert torch.allclose(found, (p * (p / q).log()).sum(), atol=1e-4)
    whole = distil(hidden, head, teacher, torch.arange(11).expand(6, -1), mask).total
    assert found <= whole + 1e-5


@pytest.mark.parametrize("k", [3, 11])
def test_the_right_student_costs_nothing_and_has_no_gradient(k: int) -> None:
    hidden, head, _ = drawn()
    hidden.requires_grad_()
    values, ids = (hidden @ head.t()).detach().log_softmax(-1).topk(k)
    loss = distil(hidden, head, values, ids, torch.ones(6))
    assert abs(loss.total.item()) < 1e-5
    (gradient,) = torch.autograd.grad(loss.total, hidden)
    assert gradient.abs().max() < 1e-5


def test_a_student_learns_its_teacher_from_a_few_ids() -> None:
    teacher = drawn()[2]
    values, ids = teacher.topk(8)
    learned = torch.nn.Parameter(torch.randn(11, 6, generator=torch.Generator().manual_seed(3)))
    optimiser = torch.optim.Adam([learned], lr=0.1)
    for _ in range(400):
        optimiser.zero_grad()
        distil(torch.eye(6), learned, values, ids, torch.ones(6)).total.backward()
        optimiser.step()
    assert torch.allclose(learned.t().softmax(-1).gather(1, ids), values.exp(), atol=0.01)
