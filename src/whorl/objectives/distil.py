"""Distillation: a divergence between the next-token distributions of a teacher and a student.

    total = sum over t with mask[t] of  D(p_t, q_t),     p the teacher, q the student, in nats

    forward    KL(p || q)                                    mode covering
    reverse    KL(q || p)                                    mode seeking
    jensen     b KL(p || m) + (1 - b) KL(q || m),            generalized Jensen-Shannon
               m = b p + (1 - b) q

Sources: Hinton et al. 2015, arXiv:1503.02531 (forward); Agarwal et al. 2024, arXiv:2306.13649, eq. 1 and section 3 (all
three, also on completions of the student). Both sides use one temperature. The loss is not multiplied by its square, so
the metric is a divergence. `next_token` is the special case in which p is one-hot.

`distil_top_k` takes the log-probabilities of the teacher's K most likely ids, from a cache or an engine. The subtle
point
is the remaining probability: dropping it, or renormalizing over K ids, drives other ids to probability 0. Here the
rest is one more outcome, so D is a divergence between coarser distributions. It never exceeds the full one and is 0 for
the exact student. `distil_full_vocab` takes a live teacher, by its hidden states and head.

The loss is computed over chunks of tokens, as in `next_token.py`. Autograd runs inside a chunk, so neither [N, V]
matrix of logits is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError, one_of
from whorl.objectives.log_probs import accumulate_dtype
from whorl.objectives.next_token import CHUNK_LOGITS, MIN_CHUNK_TOKENS, Loss

Divergence = Literal["forward", "reverse", "jensen"]
MIN_TAIL_PROB = 1e-6  # of a probability: a smaller tail counts as this

# (the student's logits of a chunk [n, V] fp32, its positions) -> summed divergence []
ChunkLoss = Callable[[Tensor, slice], Tensor]


def divergence(teacher: Tensor, student: Tensor, kind: Divergence = "forward", beta: float = 0.5) -> Tensor:
    """Return D [n] of log-probabilities [n, K] over all K outcomes; the definition.

    Raises:
        ConfigError: unknown divergence, or beta is not between 0 and 1.
    """
    if kind == "forward":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if kind == "reverse":
        return (student.exp() * (student - teacher)).sum(-1)
    if kind != "jensen":
        raise ConfigError(f"unknown divergence {kind!r}", expected=one_of(kind, get_args(Divergence)))
    if not 0 < beta < 1:
        raise ConfigError(
            f"beta is {beta}", expected="between 0 and 1", do='use "forward" or "reverse" for the limits'
        )
    middle = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    from_teacher = (teacher.exp() * (teacher - middle)).sum(-1)
    return beta * from_teacher + (1 - beta) * (student.exp() * (student - middle)).sum(-1)


def distil_top_k(
    hidden: Tensor,
    head: Tensor,
    teacher: Tensor,
    ids: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    *,
    kind: Divergence = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Loss:
    """Return the summed divergence between a student and the teacher's K most likely ids.

    Args:
        hidden: [N, d_model], output of the student; head: [vocab, d_model].
        teacher: [N, K] log-probabilities at the same temperature; ids: [N, K] their distinct ids.
        mask: [N], True where a position counts.
        softcap: of the student's logits.

    Returns:
        Loss: `total` [] fp32, `count` [] = number of positions, metric `kl` (the total, for every divergence).
    """
    keep = mask.to(accumulate_dtype(hidden))

    def chunk(raw: Tensor, part: slice) -> Tensor:
        z = _scale_logits(raw, softcap, temperature)
        top_ids, p = ids[part], teacher[part].to(raw.dtype)
        normalizer = z.logsumexp(-1, keepdim=True)
        q = z.gather(-1, top_ids) - normalizer
        if top_ids.shape[1] < z.shape[1]:
            student_tail = z.scatter(-1, top_ids, float("-inf")).logsumexp(-1, keepdim=True) - normalizer
            tail = (1 - p.exp().sum(-1, keepdim=True)).clamp(min=MIN_TAIL_PROB).log()
            p, q = torch.cat([p, tail], -1), torch.cat([q, student_tail], -1)
        return (divergence(p, q, kind, beta) * keep[part]).sum()

    return _chunked_loss(hidden, head, chunk, keep)


def distil_full_vocab(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    *,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    kind: Divergence = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Loss:
    """Return the summed divergence over the whole vocabulary.

    Args:
        hidden: [N, d_model] of the student; head: [vocab, d_model].
        teacher_hidden: [N, d_teacher]; teacher_head: [vocab, d_teacher]; both without gradient.
        mask: [N]; the other arguments are those of `distil_top_k`.

    Raises:
        ConfigError: the two vocabularies differ in size.
    """
    if len(head) != len(teacher_head):
        raise ConfigError(
            f"the student has a vocabulary of {len(head):,} ids, the teacher of {len(teacher_head):,}",
            expected="one vocabulary",
            do="distil from a teacher with the same tokenizer, or fine-tune on its texts",
        )
    keep = mask.to(accumulate_dtype(hidden))
    teacher_states, weight = teacher_hidden.detach(), teacher_head.detach().to(teacher_hidden.dtype)

    def chunk(raw: Tensor, part: slice) -> Tensor:
        p = _scale_logits(
            F.linear(teacher_states[part], weight).to(raw.dtype), teacher_softcap, temperature
        ).log_softmax(-1)
        q = _scale_logits(raw, softcap, temperature).log_softmax(-1)
        return (divergence(p, q, kind, beta) * keep[part]).sum()

    return _chunked_loss(hidden, head, chunk, keep)


def _scale_logits(raw: Tensor, softcap: float | None, temperature: float) -> Tensor:
    z = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    return z if temperature == 1.0 else z / temperature


def _chunked_loss(hidden: Tensor, head: Tensor, chunk: ChunkLoss, keep: Tensor) -> Loss:
    total = _ChunkedLoss.apply(hidden, head, chunk)  # type: ignore[no-untyped-call]
    return Loss(total, keep.sum(), {"kl": total.detach()})


class _ChunkedLoss(torch.autograd.Function):
    """Sum `chunk` over all positions and compute its gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, chunk: ChunkLoss) -> Tensor:
        to_hidden, to_head = ctx.needs_input_grad[:2]
        weight = head.to(hidden.dtype)
        size = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // max(1, len(head)))
        totals = [torch.zeros((), dtype=accumulate_dtype(hidden), device=hidden.device)]
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_head = torch.zeros_like(head) if to_head else None
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            h = hidden[part]
            raw = F.linear(h, weight).to(accumulate_dtype(h)).requires_grad_(to_hidden or to_head)
            with torch.set_grad_enabled(to_hidden or to_head):
                total = chunk(raw, part)
            totals.append(total.detach())
            if not raw.requires_grad:
                continue
            d = torch.autograd.grad(total, raw)[0].to(h.dtype)
            if d_hidden is not None:
                d_hidden[part] = d @ weight
            if d_head is not None:
                d_head += (d.t() @ h).to(d_head.dtype)
        ctx.to_hidden, ctx.to_head = to_hidden, to_head
        ctx.save_for_backward(*(g for g in (d_hidden, d_head) if g is not None))
        return torch.stack(totals).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        scale = gradients[0]
        d_hidden = next(saved) * scale if ctx.to_hidden else None
        d_head = next(saved) * scale if ctx.to_head else None
        return d_hidden, d_head, None
