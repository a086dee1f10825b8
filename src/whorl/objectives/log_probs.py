"""Log-probability of each target token, and optionally the entropy of its distribution.

    z_n = c tanh(W h_n / c) / temperature        (c: softcap; without, z_n = W h_n / temperature), -inf at banned ids
    log_prob_n = z_n[target_n] - lse(z_n)        entropy_n = - sum_v p_n(v) log p_n(v),   p_n = softmax(z_n)

`next_token` sums these and computes its gradient in the forward pass. A policy objective weights each token, so here
the backward pass receives the weights g_n (of log_prob) and e_n (of entropy):

    d z_n = g_n (onehot_n - p_n) - e_n p_n (log p_n + entropy_n)
    d W h_n = d z_n (1 - tanh^2) / temperature,     d_h = d W h @ W,    d_W = (d W h)^T @ h

A large [N, V] tensor is never held. Logits are computed by chunks and recomputed in the backward pass, which costs one
matrix product in four. Up to `MAX_SAVED_LOGITS` they are saved in their own dtype instead; the gradient has the same
bits. If the head is frozen (adapters) and no entropy is requested, the gradient of h is linear in g_n for each row.
It is then computed in the forward pass and only scaled later.

The subtle point: a log-probability is right only under the distribution that was sampled from. With another
temperature, or with ids that the sampler never draws, every ratio would be biased in one direction. So temperature
and banned ids are arguments, and a banned target is an error.

`token_log_probs_reference` is the definition, with all logits. Tests compare values and gradients. It is made of
`cross_entropy` and `token_entropy`, for logits that exist anyway.
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
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    grad_in_forward = needs_grad and not head.requires_grad and not entropy
    result: tuple[Tensor, Tensor | None] = _LogProbFunction.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, softcap, banned_mask, entropy, grad_in_forward, needs_grad
    )
    return result


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
    z = z if banned_mask is None else z.masked_fill(banned_mask, float("-inf"))  # [N, V]
    return -cross_entropy(z, targets), token_entropy(z) if entropy else None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-probability of each target in nats, [...], at least fp32.

    logits: [..., V], -inf for ids without probability. targets: [...] ids.
    """
    log_p = logits.to(accumulate_dtype(logits)).log_softmax(dim=-1)
    return -log_p.gather(-1, targets[..., None]).squeeze(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats, [...], at least fp32. logits: [..., V], may be -inf."""
    log_p = logits.to(accumulate_dtype(logits)).log_softmax(dim=-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(dim=-1)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of x where `mask` is True, over one dimension or all; NaN for an empty mask, as in torch.

    x: any shape. mask: bool or 0 and 1, broadcasts to it. Other values do not matter, and may be NaN.
    """
    kept = mask.bool().expand_as(x)
    return masked_normalize(x, mask, 1.0, dim) / (kept.sum() if dim is None else kept.sum(dim))


def masked_normalize(x: Tensor, mask: Tensor, constant: float, dim: int | None = None) -> Tensor:
    """Return the sum of x where `mask` is True, divided by a constant, over one dimension or all.

    With the maximum number of tokens as constant it is the aggregation of Dr. GRPO (arXiv:2503.20783), which
    `policy_loss` calls "constant".
    """
    kept = torch.where(mask.bool(), x, torch.zeros_like(x))
    return (kept.sum() if dim is None else kept.sum(dim)) / constant


def _check(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    banned_mask: Tensor | None,
) -> None:
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ConfigError(
            f"hidden is {list(hidden.shape)} and head {list(head.shape)}", expected="[N, d] and [V, d]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ConfigError(f"targets is {list(targets.shape)}", expected=f"[{len(hidden)}], one per position")
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature}",
            expected="above 0",
            do="sample at a temperature above 0: greedy decoding has no log-probability",
        )
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap is {softcap}", expected="above 0, or None")
    if banned_mask is None:
        return
    if banned_mask.dtype != torch.bool or banned_mask.shape != head.shape[:1]:
        raise ConfigError(
            f"banned_mask is {banned_mask.dtype} {list(banned_mask.shape)}", expected=f"bool [{len(head)}]"
        )
    if bool(banned_mask[targets].any()):
        row = int(banned_mask[targets].nonzero()[0])
        raise DataError(
            f"target {row} is id {int(targets[row])}, which the sampler never draws",
            expected="only ids that were sampled",
            do="exclude forced ids with the loss mask",
        )


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over a vocabulary: fp64 for fp64 input, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scale_logits(
    logits: Tensor, buffer: Tensor, temperature: float, softcap: float | None, banned: Tensor | None
) -> Tensor:
    """Return z [n, V], the logits of the sampled distribution before the softmax, written into `buffer`.

    banned: ids.
    """
    z = buffer[: len(logits)].copy_(logits)
    if softcap is not None:
        z.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        z.div_(temperature)
    return z if banned is None else z.index_fill_(1, banned, float("-inf"))


def _grad_logits(
    z: Tensor,
    log_normalizer: Tensor,
    buffer: Tensor,
    targets: Tensor,
    g: Tensor,
    e: tuple[Tensor, Tensor] | None,
    temperature: float,
    softcap: float | None,
    banned: Tensor | None,
) -> Tensor:
    """Return the gradient [n, V] of the logits, written into `buffer` in few passes.

    log_normalizer: [n, 1] of z. g: [n] gradient of log_prob. e: [n] gradient of the entropy, and the entropy.
    """
    log_p = torch.sub(z, log_normalizer, out=buffer[: len(z)])
    coefficient = g[:, None]  # coefficient of -p; the onehot has the opposite sign
    if e is not None:
        coefficient = coefficient + e[0][:, None] * (_zero_banned_(log_p.clone(), banned) + e[1][:, None])
    grad = log_p.exp_().mul_(-coefficient).scatter_add_(1, targets[:, None], g[:, None])
    if softcap is not None:
        grad = _zero_banned_(grad.mul_(1.0 - (z * (temperature / softcap)).square()), banned)  # 0 times -inf
    return grad if temperature == 1.0 else grad.div_(temperature)


def _zero_banned_(x: Tensor, banned: Tensor | None) -> Tensor:
    """Set x [n, V] to 0 at banned ids, in place: p log p is 0 at p = 0, not 0 times -inf."""
    return x if banned is None else x.index_fill_(1, banned, 0.0)


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
        banned_mask: Tensor | None,
        entropy: bool,
        grad_in_forward: bool,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        weight = head.to(hidden.dtype)
        # Not masked_fill: on a CPU it costs as much as the exponentials.
        banned = None if banned_mask is None else banned_mask.nonzero()[:, 0]
        ctx.settings = temperature, softcap, banned
        ctx.chunk = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // max(1, len(head)))
        save_logits = needs_grad and not grad_in_forward and len(hidden) * len(head) <= MAX_SAVED_LOGITS
        log_probs, normalizers, entropies, d_hidden, saved = [], [], [], [], []
        buffer, spare_buffer = _scratch_buffers(hidden, head, ctx.chunk)
        for h, target in zip(torch.split(hidden, ctx.chunk), torch.split(targets, ctx.chunk), strict=True):
            logits = F.linear(h, weight)
            if save_logits:
                saved.append(logits)
            z = _scale_logits(logits, buffer, *ctx.settings)
            top = z.amax(dim=-1, keepdim=True)
            shifted = torch.sub(z, top, out=spare_buffer[: len(z)])
            target_logit = shifted.gather(1, target[:, None])
            p = torch.exp(shifted, out=z) if entropy else shifted.exp_()  # unnormalized
            total = p.sum(dim=-1, keepdim=True)
            log_probs.append((target_logit - total.log()).squeeze(1))
            normalizers.append(top + total.log())
            if entropy:
                mean = _zero_banned_(shifted, banned).mul_(p).sum(dim=-1, keepdim=True) / total
                entropies.append((total.log() - mean).squeeze(1))
            if grad_in_forward:
                ones = torch.ones_like(log_probs[-1])
                d = _grad_logits(z, normalizers[-1], spare_buffer, target, ones, None, *ctx.settings)
                d_hidden.append(d.to(h.dtype) @ weight)
        entropies_ = torch.cat(entropies) if entropy else None
        ctx.grad_in_forward = grad_in_forward
        first = torch.cat(d_hidden) if grad_in_forward else hidden
        ctx.save_for_backward(first, head, targets, torch.cat(normalizers), entropies_, *saved)
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs), entropies_

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        g, e = gradients
        first, head, targets, normalizer, entropies, *saved = ctx.saved_tensors
        no_grads = (None,) * 8
        if g is None and e is None:
            return None, *no_grads
        if ctx.grad_in_forward:
            assert g is not None
            return first * g[:, None].to(first.dtype), *no_grads
        if g is None:
            g = torch.zeros_like(normalizer[:, 0])
        hidden, weight = first, head.to(first.dtype)
        to_hidden, to_head = ctx.needs_input_grad[:2]
        d_hidden, d_head = [], torch.zeros_like(head) if to_head else None
        buffer, spare_buffer = _scratch_buffers(hidden, head, ctx.chunk)
        for n, begin in enumerate(range(0, len(hidden), ctx.chunk)):
            part = slice(begin, begin + ctx.chunk)
            h = hidden[part]
            z = _scale_logits(saved[n] if saved else F.linear(h, weight), buffer, *ctx.settings)
            entropy_grads = None if e is None else (e[part], entropies[part])
            d = _grad_logits(
                z, normalizer[part], spare_buffer, targets[part], g[part], entropy_grads, *ctx.settings
            ).to(h.dtype)
            if to_hidden:
                d_hidden.append(d @ weight)
            if d_head is not None:
                d_head += d.t() @ h
        grad_hidden = (torch.cat(d_hidden) if d_hidden else torch.zeros_like(hidden)) if to_hidden else None
        return grad_hidden, d_head, *no_grads[1:]


def _scratch_buffers(hidden: Tensor, head: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return two [chunk, V] buffers in the accumulation dtype, shared by all chunks: allocation is expensive."""
    shape = min(chunk, len(hidden)), len(head)
    return hidden.new_empty(shape, dtype=accumulate_dtype(hidden)), hidden.new_empty(
        shape, dtype=accumulate_dtype(hidden)
    )
