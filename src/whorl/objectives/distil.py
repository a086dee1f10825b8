"""Distillation: a student learns what a teacher says, not only what came next.

    total = sum over t with mask[t] of  KL(p_t || q_t) = sum over ids i of p_t(i) (log p_t(i) - log q_t(i))

(Hinton et al. 2015, arXiv:1503.02531, at temperature 1: the forward KL, in nats.) It is told as the difference from
`next_token.py`: there p is all on one id. A teacher's distribution over thousands of ids tells far more about a position
than one draw from it, so a student needs fewer positions.

The subtle part is a teacher of whom only the K likeliest ids were kept. Leaving the others out, or spreading 1 over the K,
both teach that the rest is impossible. Here the rest is one more outcome, whose probability the student is to have too:

    p_rest (log p_rest - log q_rest),      p_rest = 1 - sum of the K

which is the KL of the coarser distributions: never above the whole one, and 0 for the right student (a test).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.objectives.next_token import Loss

LEAST_REST = 1e-6  # of a probability: below that there is no rest to speak of


def distil(
    hidden: Tensor,
    head: Tensor,
    teacher: Tensor,
    ids: Tensor,
    mask: Tensor,
    softcap: float | None = None,
) -> Loss:
    """Summed KL from a teacher to the student, in nats.

    Args:
        hidden: [N, d_model], the student's output; head: [vocab, d_model].
        teacher: [N, K] log-probabilities of its likeliest ids; ids: [N, K] which they are, each once.
        mask: [N], True where a position counts.
        softcap: of the student's logits.

    Returns:
        Loss: `total` [] fp32, `count` [] = number of positions, metrics `kl` (the total).
    """
    logits = F.linear(hidden, head.to(hidden.dtype)).float()  # [N, V]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    student = logits.log_softmax(-1).gather(-1, ids)  # [N, K]
    p = teacher.exp()
    kl = (p * (teacher - student)).sum(-1)
    p_rest = 1.0 - p.sum(-1)
    if ids.shape[-1] < head.shape[0]:
        q_rest = (1.0 - student.exp().sum(-1)).clamp(min=LEAST_REST)
        rest = p_rest.clamp(min=LEAST_REST)
        kl = kl + torch.where(p_rest > LEAST_REST, rest * (rest.log() - q_rest.log()), 0.0)
    keep = mask.float()
    total = (kl * keep).sum()
    return Loss(total, keep.sum(), {"kl": total.detach()})
