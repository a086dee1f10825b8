"""Auxiliary losses of mixtures of experts: load balance and router z-loss. Both are added to the loss of a task.

Load balance (Switch, Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6), over the N tokens of a batch and E experts:

    loss = E sum_e f_e P_e,    f_e = share of all choices that selected e,    P_e = 1/N sum_n p_n(e)

It is 1 when all loads are equal. f comes from a discrete choice and has no gradient; P has one. Router z-loss (ST-MoE,
Zoph et al. 2022, arXiv:2202.08906, eq. 5): the mean over tokens of (log sum_e exp z_n(e))^2.

Both losses are summed over tokens and come with a count. The subtle point: the balance loss is a product of two means,
so the `loads` of a micro-batch would balance each micro-batch on its own. For fixed f it is linear in p. With the
`loads` of the whole batch, every split into micro-batches gives the same gradient.

Shapes: scores and logits [N, E], loads [E], mask [N], True = a real token. They are fields of `nn.experts.Routing`,
passed as tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss


def _weight(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return [N] fp32 weights: 1 for tokens that count, else 0."""
    if rows.dim() != 2:
        raise ConfigError(f"scores or logits have shape {tuple(rows.shape)}", expected="[tokens, experts]")
    if mask is None:
        return torch.ones(len(rows), device=rows.device)
    if mask.shape != rows.shape[:1]:
        raise ConfigError(f"mask has shape {tuple(mask.shape)}", expected=f"[{len(rows)}], one per token")
    return mask.float()


def load_balance(scores: Tensor, loads: Tensor, mask: Tensor | None = None) -> Loss:
    """Return the Switch load-balancing loss, summed over tokens.

    Args:
        scores: [N, E], softmax or sigmoid. Each row is divided by its sum (DeepSeek-V3, arXiv:2412.19437, eq. 18),
            which leaves a softmax unchanged.
        loads: [E], how often each expert was chosen, before any capacity limit (`Routing.requested`). Of this batch,
            or of a larger one that contains it.

    Returns:
        Loss: total [], count [] = tokens; metric `load_balance`, the summed loss without its graph.

    Raises:
        ConfigError: the shapes do not match.
    """
    weight = _weight(scores, mask)
    n_experts = scores.shape[1]
    if loads.shape != (n_experts,):
        raise ConfigError(f"loads has shape {tuple(loads.shape)}", expected=f"[{n_experts}], one per expert")
    p = scores.float()
    p = p / p.sum(dim=1, keepdim=True).clamp(min=1e-20)
    share = loads.detach().float()
    share = share / share.sum().clamp(min=1)  # f; all 0 if nothing was chosen
    total = n_experts * (p.t() @ weight) @ share
    return Loss(total, weight.sum(), {"load_balance": total.detach()})


def router_z(logits: Tensor, mask: Tensor | None = None) -> Loss:
    """Return the ST-MoE router z-loss, summed over tokens: sum_n (logsumexp z_n)^2.

    logits: [N, E] -> Loss: total [], count [] = tokens; metric `router_z`.

    Raises:
        ConfigError: the shapes do not match.
    """
    weight = _weight(logits, mask)
    total = logits.float().logsumexp(dim=1).square() @ weight
    return Loss(total, weight.sum(), {"router_z": total.detach()})
