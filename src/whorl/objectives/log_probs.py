"""How likely the tokens are that were said: the log-probability of each, one by one, and the entropy of where it was drawn.

    z_n = c tanh(W h_n / c) / temperature        (c: softcap; without, z_n = W h_n / temperature), -inf at forbidden ids
    log_prob_n = z_n[target_n] - lse(z_n)        entropy_n = - sum_v p_n(v) log p_n(v),   p_n = softmax(z_n)

`next_token` sums these, so it can finish its gradient before it knows who asks. A policy's objective weighs each token by
what came of it, and clips by the ratio to what it was, so here each is handed out and its weight g_n comes back:

    d z_n = g_n (onehot_n - p_n) - e_n p_n (log p_n + entropy_n)           g, e: gradients of log_prob and entropy
    d W h_n = d z_n (1 - tanh^2) / temperature,     d_h = d W h @ W,    d_W = (d W h)^T @ h

As there, a large [N, V] tensor is never held: the logits are made chunk by chunk, and made anew in the backward, which costs
one product in four. Up to `KEPT_LOGITS` they are kept instead, in the type that their product has, so that the gradient is
the same to the bit. Where the head learns nothing (adapters) and no entropy is asked there is a way cheaper still: the
gradient of h is then linear in g_n, row by row, so it is finished in the forward and only scaled later.

The subtle part is that a number is right only under the distribution that was sampled from. A sampler at temperature 0.9
that never draws `pad` did not draw from softmax(W h): scored like that, its ratio is off by a little in every token, always
in one direction. So temperature and the ids that are never drawn are arguments here, and a forbidden target is an error.

`token_log_probs_reference` is the definition, with all logits; tests hold values and gradients together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError, DataError
from whorl.objectives.next_token import CHUNK_LOGITS, MIN_CHUNK_TOKENS

MAX_SAVED_LOGITS = 1 << 24  # 32 MB in bf16


def token_log_probs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    banned_mask: Tensor | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of N tokens in nats, with gradients to `hidden` and `head`.

    Args:
        hidden: [N, d_model], the network's output, in its compute type; head: [vocab, d_model], fp32.
        targets: [N] the ids that were said.
        temperature: that they were sampled at; softcap: c above.
        forbidden: [vocab] bool, True for ids that the sampler never draws; they have no share of the normaliser.
        entropy: whether it is wanted too. Its gradient is only taken if something asks for it.

    Returns:
        (log_prob [N] fp32, entropy [N] fp32 or None); fp64 if `hidden` is.

    Raises:
        ConfigError: shapes that do not fit, or a temperature or softcap that is not above 0.
        DataError: a target that is forbidden.
    """
    _check(hidden, head, targets, temperature, softcap, banned_mask)
    learning = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    early = learning and not head.requires_grad and not entropy
    out: tuple[Tensor, Tensor | None] = _LogProbFunction.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, softcap, banned_mask, entropy, early, learning
    )
    return out


def token_log_probs_reference(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    banned_mask: Tensor | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The definition, with all logits. Arguments and results as in `token_log_probs`."""
    dtype = accumulate_dtype(hidden)
    z = F.linear(hidden.to(dtype), head.to(dtype))
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    never = torch.zeros_like(head[:, 0], dtype=torch.bool) if banned_mask is None else banned_mask
    log_p = z.masked_fill(never, float("-inf")).log_softmax(dim=-1)  # [N, V]
    log_prob = log_p.gather(1, targets[:, None]).squeeze(1)
    return log_prob, -(log_p.exp() * log_p.masked_fill(never, 0.0)).sum(dim=-1) if entropy else None


def _check(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    forbidden: Tensor | None,
) -> None:
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ConfigError(
            f"hidden is {list(hidden.shape)} and head {list(head.shape)}", expected="[N, d] and [V, d]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ConfigError(f"targets is {list(targets.shape)}", expected=f"[{len(hidden)}], one a position")
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature}",
            expected="above 0",
            do="sample what is to be learnt from, greedy draws have no log-probability",
        )
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap is {softcap}", expected="above 0, or None")
    if forbidden is None:
        return
    if forbidden.dtype != torch.bool or forbidden.shape != head.shape[:1]:
        raise ConfigError(
            f"forbidden is {forbidden.dtype} {list(forbidden.shape)}", expected=f"bool [{len(head)}]"
        )
    if bool(forbidden[targets].any()):
        row = int(forbidden[targets].nonzero()[0])
        raise DataError(
            f"target {row} is id {int(targets[row])}, which the sampler never draws",
            expected="only ids that were sampled",
            do="leave forced ids out by the loss mask",
        )


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """What sums over a vocabulary are taken in: fp32, or fp64 where that is what is given."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scale_logits(
    logits: Tensor, room: Tensor, temperature: float, softcap: float | None, out: Tensor | None
) -> Tensor:
    """What is sampled from, before the softmax: z [n, V] of logits [n, V], written into `room`; out: ids."""
    z = room[: len(logits)].copy_(logits)
    if softcap is not None:
        z.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        z.div_(temperature)
    return z if out is None else z.index_fill_(1, out, float("-inf"))


def _grad_logits(
    z: Tensor,
    log_normaliser: Tensor,
    room: Tensor,
    targets: Tensor,
    g: Tensor,
    e: tuple[Tensor, Tensor] | None,
    temperature: float,
    softcap: float | None,
    out: Tensor | None,
) -> Tensor:
    """[n, V] gradient of the logits, in few passes over them, written into `room`.

    log_normaliser: [n, 1] of z; g: [n] gradient of log_prob; e: [n] that of the entropy, and the entropy itself.
    """
    log_p = torch.sub(z, log_normaliser, out=room[: len(z)])
    pull = g[:, None]  # on p, and the target's onehot pulls the other way
    if e is not None:
        pull = pull + e[0][:, None] * (_zero_banned_(log_p.clone(), out) + e[1][:, None])
    d = log_p.exp_().mul_(-pull).scatter_add_(1, targets[:, None], g[:, None])
    if softcap is not None:
        d = _zero_banned_(d.mul_(1.0 - (z * (temperature / softcap)).square()), out)  # 0 times -inf
    return d if temperature == 1.0 else d.div_(temperature)


def _zero_banned_(x: Tensor, out: Tensor | None) -> Tensor:
    """x [n, V], in place, with 0 at the ids that are never drawn: p log p is 0 where p is, not 0 times -inf."""
    return x if out is None else x.index_fill_(1, out, 0.0)


class _LogProbFunction(torch.autograd.Function):
    """(log_prob [N], entropy [N] or None), by chunks of positions; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        forbidden: Tensor | None,
        entropy: bool,
        early: bool,
        learning: bool,
    ) -> tuple[Tensor, Tensor | None]:
        weight = head.to(hidden.dtype)
        # Not masked_fill: on a CPU it costs as much as the exponentials.
        out = None if forbidden is None else forbidden.nonzero()[:, 0]
        ctx.how = temperature, softcap, out
        ctx.chunk = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // max(1, len(head)))
        keep = learning and not early and len(hidden) * len(head) <= MAX_SAVED_LOGITS
        log_probs, normalisers, entropies, d_hidden, kept = [], [], [], [], []
        room, spare = _scratch_buffers(hidden, head, ctx.chunk)
        for h, target in zip(torch.split(hidden, ctx.chunk), torch.split(targets, ctx.chunk), strict=True):
            logits = F.linear(h, weight)
            if keep:
                kept.append(logits)
            z = _scale_logits(logits, room, *ctx.how)
            top = z.amax(dim=-1, keepdim=True)
            below = torch.sub(z, top, out=spare[: len(z)])
            said = below.gather(1, target[:, None])
            p = torch.exp(below, out=z) if entropy else below.exp_()  # times the sum behind it
            total = p.sum(dim=-1, keepdim=True)
            log_probs.append((said - total.log()).squeeze(1))
            normalisers.append(top + total.log())
            if entropy:
                mean = _zero_banned_(below, out).mul_(p).sum(dim=-1, keepdim=True) / total
                entropies.append((total.log() - mean).squeeze(1))
            if early:
                ones = torch.ones_like(log_probs[-1])
                d = _grad_logits(z, normalisers[-1], spare, target, ones, None, *ctx.how)
                d_hidden.append(d.to(h.dtype) @ weight)
        entropies_ = torch.cat(entropies) if entropy else None
        ctx.early = early
        first = torch.cat(d_hidden) if early else hidden
        ctx.save_for_backward(first, head, targets, torch.cat(normalisers), entropies_, *kept)
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs), entropies_

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        g, e = gradients
        first, head, targets, normaliser, entropies, *kept = ctx.saved_tensors
        nothing = (None,) * 8
        if g is None and e is None:
            return None, *nothing
        if ctx.early:
            assert g is not None
            return first * g[:, None].to(first.dtype), *nothing
        if g is None:
            g = torch.zeros_like(normaliser[:, 0])
        hidden, weight = first, head.to(first.dtype)
        to_hidden, to_head = ctx.needs_input_grad[:2]
        d_hidden, d_head = [], torch.zeros_like(head) if to_head else None
        room, spare = _scratch_buffers(hidden, head, ctx.chunk)
        for n, begin in enumerate(range(0, len(hidden), ctx.chunk)):
            part = slice(begin, begin + ctx.chunk)
            h = hidden[part]
            z = _scale_logits(kept[n] if kept else F.linear(h, weight), room, *ctx.how)
            both = None if e is None else (e[part], entropies[part])
            d = _grad_logits(z, normaliser[part], spare, targets[part], g[part], both, *ctx.how).to(h.dtype)
            if to_hidden:
                d_hidden.append(d @ weight)
            if d_head is not None:
                d_head += d.t() @ h
        given = (torch.cat(d_hidden) if d_hidden else torch.zeros_like(hidden)) if to_hidden else None
        return given, d_head, *nothing[1:]


def _scratch_buffers(hidden: Tensor, head: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Two of [chunk, V] in the wide type, that all chunks are worked out in: memory that is new costs more than the work."""
    shape = min(chunk, len(hidden)), len(head)
    return hidden.new_empty(shape, dtype=accumulate_dtype(hidden)), hidden.new_empty(
        shape, dtype=accumulate_dtype(hidden)
    )
