"""Objectives and algorithms outside of the package, right and wrong ones."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from whorl.objectives.llm_policy import REINFORCE, CompletionTokens, PolicyLossConfig, policy_loss
from whorl.objectives.next_token import Loss


def smoothed(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss:
    total = F.cross_entropy(logits[mask], targets[mask], label_smoothing=0.2, reduction="sum")
    return Loss(total, mask.sum(), {"smoothed": total.detach()})


def counts_rows(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss:
    return Loss(logits[mask].sum(), mask.any(1).sum())


def detached(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss:
    return Loss(logits[mask].detach().sum(), mask.sum())


def each_token(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss:
    return Loss(logits[mask].sum(-1), mask.sum())


def bare(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return logits[mask].sum()


def of_pairs(chosen: Tensor, rejected: Tensor) -> Loss:
    return Loss(chosen - rejected, chosen)


LEAVE_ONE_OUT = replace(REINFORCE, baseline="leave_one_out", kl_estimator="k1", kl_apply_to="reward")


def doubled(tokens: CompletionTokens, config: PolicyLossConfig) -> Loss:
    loss = policy_loss(tokens, config)
    return Loss(2 * loss.total, loss.count, {"doubled": 2 * loss.total.detach()})


def counts_tokens(tokens: CompletionTokens, config: PolicyLossConfig) -> Loss:
    loss = policy_loss(tokens, config)
    return Loss(loss.total, loss.count + 1)
