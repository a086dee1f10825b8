"""Log-probability of each target token, and optionally the entropy of its distribution.

    z_n = c tanh(W h_n / c) / temperature        (c: softcap; without, z_n = W h_n / temperature), -inf at banned ids
    log_prob_n = z_n[target_n] - lse(z_n)        entropy_n = - sum_v p_n(v) log p_n(v),   p_n = softmax(z_n)

`next_token` sums these and computes its gradient in the forward pass. A policy objective weights each token, so here the
backward pass receives the weights g_n (of log_prob) and e_n (of entropy):

    d z_n = g_n (onehot_n - p_n) - e_n p_n (log p_n + entropy_n)
    d W h_n = d z_n (1 - tanh^2) / temperature,     d_h = d W h @ W,    d_W = (d W h)^T @ h

A large [N, V] tensor is never held. Logits are computed by chunks and recomputed in the backward pass, which costs one
matrix product in four. Up to `MAX_SAVED_LOGITS` they are saved in their own dtype instead; the gradient has the same
bits. If the head is frozen (adapters) and no entropy is requested, the gradient of h is linear in g_n for each row. It is
then computed in the forward pass and only scaled later.

The subtle point: a log-probability is right only under the distribution that was sampled from. With another temperature,
or with ids that the sampler never draws, every ratio would be biased in one direction. So temperature and banned ids are
arguments, and a banned target is an error.

`token_log_probs_reference` is the definition, with all logits. Tests compare values and gradients.
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
    """Return the log-probabilities of N tokens in nats, with gradients to `hidden` and `head`.

    Args:
        hidden: [N, d_model], output of the network, in its compute dtype. head: [vocab, d_model], fp32.
        targets: [N] token ids.
        temperature: of the sampler. softcap: c above.
        banned_mask: [vocab] bool, True for ids that the sampler never draws; they have no probability.
        entropy: return the entropy too. Its gradient is computed only if it is used.

    Returns:
        (log_prob [N] fp32, entropy [N] fp32 or None); fp64 if `hidden` is fp64.

    Raises:
        ConfigError: shapes do not fit, or temperature or softcap is not above 0.
        DataError: a target is banned.
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
    """Return the definition, with all logits. Arguments and results as in `token_log_probs`."""
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
    """Return the dtype of sums over a vocabulary: fp64 for fp64 input, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scale_logits(
    logits: Tensor, room: Tensor, temperature: float, softcap: float | None, out: Tensor | None
) -> Tensor:
    """Return z [n, V], the logits of the sampled distribution before the softmax, written into `buffer`. banned: ids."""
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
    """Return the gradient [n, V] of the logits, written into `buffer` in few passes.

    log_normalizer: [n, 1] of z. g: [n] gradient of log_prob. e: [n] gradient of the entropy, and the entropy.
    """
    log_p = torch.sub(z, log_normaliser, out=room[: len(z)])
    pull = g[:, None]  # coefficient of -p; the onehot has the opposite sign
    if e is not None:
        pull = pull + e[0][:, None] * (_zero_banned_(log_p.clone(), out) + e[1][:, None])
    d = log_p.exp_().mul_(-pull).scatter_add_(1, targets[:, None], g[:, None])
    if softcap is not None:
        d = _zero_banned_(d.mul_(1.0 - (z * (temperature / softcap)).square()), out)  # 0 times -inf
    return d if temperature == 1.0 else d.div_(temperature)


def _zero_banned_(x: Tensor, out: Tensor | None) -> Tensor:
    """Set x [n, V] to 0 at banned ids, in place: p log p is 0 at p = 0, not 0 times -inf."""
    return x if out is None else x.index_fill_(1, out, 0.0)


class _LogProbFunction(torch.autograd.Function):
    """Compute (log_prob [N], entropy [N] or None) by chunks of positions; see the top of this file."""

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
            p = torch.exp(below, out=z) if entropy else below.exp_()  # unnormalized
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
    """Return two [chunk, V] buffers in the accumulation dtype for all chunks: new memory costs more than the computation."""
    shape = min(chunk, len(hidden)), len(head)
    return hidden.new_empty(shape, dtype=accumulate_dtype(hidden)), hidden.new_empty(
        shape, dtype=accumulate_dtype(hidden)
    )
