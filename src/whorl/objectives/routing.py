"""What keeps a mixture of experts in shape: equal loads, and small logits. Both are added to a task's loss.

Load balance (Switch, Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6), over the N tokens of a batch and E experts:

    loss = E sum_e f_e P_e,    f_e = share of all choices that fell on e,    P_e = 1/N sum_n p_n(e)

It is 1 when all loads are equal. f comes from a choice and has no gradient; P has. Router z-loss (ST-MoE, Zoph et al.
2022, arXiv:2202.08906, eq. 5): the mean over tokens of (log sum_e exp z_n(e))^2.

The subtle part. As everywhere in the house a loss is summed over tokens and comes with its count. But the balance loss is a
product of two means, so cut into micro-batches it would ask for balance within each. Given f, it is linear in p: pass the
`loads` of the whole batch and any cut gives the same gradient; pass a micro-batch's own and it balances that.

Shapes: scores and logits [N, E], loads [E], mask [N], True = a real token: fields of `nn.experts.Routing`,
passed as tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss


def _weight(rows: Tensor, mask: Tensor | None) -> Tensor:
    """[N] fp32: 1 for the tokens that count."""
    if rows.dim() != 2:
        raise ConfigError(f"scores or logits have shape {tuple(rows.shape)}", expected="[tokens, experts]")
    if mask is None:
        return torch.ones(len(rows), device=rows.device)
    if mask.shape != rows.shape[:1]:
        raise ConfigError(f"mask has shape {tuple(mask.shape)}", expected=f"[{len(rows)}], one a token")
    return mask.float()


def load_balance(scores: Tensor, loads: Tensor, mask: Tensor | None = None) -> Loss:
    """Switch's balancing loss, summed over tokens.

    Args:
        scores: [N, E], softmax or sigmoid; each row is divided by its sum (DeepSeek-V3, arXiv:2412.19437, eq. 18), which
            leaves a softmax as it is.
        loads: [E], how often each expert was chosen, before any limit (`Routing.wished`); of this batch, or of a
            larger one that this is a part of.

    Returns:
        Loss: total [], count [] = tokens; metric `load_balance`, the summed loss without its graph.

    Raises:
        ConfigError: the shapes do not belong together.
    """
    weight = _weight(scores, mask)
    n_experts = scores.shape[1]
    if loads.shape != (n_experts,):
        raise ConfigError(f"loads has shape {tuple(loads.shape)}", expected=f"[{n_experts}], one an expert")
    p = scores.float()
    p = p / p.sum(dim=1, keepdim=True).clamp(min=1e-20)
    share = loads.detach().float()
    share = share / share.sum().clamp(min=1)  # f; all 0 if nothing was chosen
    total = n_experts * (p.t() @ weight) @ share
    return Loss(total, weight.sum(), {"load_balance": total.detach()})


def router_z(logits: Tensor, mask: Tensor | None = None) -> Loss:
    """ST-MoE's z-loss, summed over tokens: sum_n (logsumexp z_n)^2.

    logits: [N, E] -> Loss: total [], count [] = tokens; metric `router_z`.

    Raises:
        ConfigError: the shapes do not belong together.
    """
    weight = _weight(logits, mask)
    total = logits.float().logsumexp(dim=1).square() @ weight
    return Loss(total, weight.sum(), {"router_z": total.detach()})
