"""Length bias of loss aggregation: the exact expected gradient.

A policy with one parameter: after a wrong answer it continues with probability 1 - h, or ends with h. Length earns
nothing, so an unbiased objective must not change h (arXiv:2503.20783, section 3.1).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from whorl.objectives.llm_policy import PRESETS, CompletionTokens, policy_loss

LONGEST = 120


def push(algorithm: str, advantage: float) -> float:
    """Return the descent direction of the expected loss for the end logit, over all lengths by their probability."""
    logit = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    end, go_on = torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)
    method = replace(PRESETS[algorithm], kl_coef=0.0, constant=float(LONGEST))
    total = torch.zeros((), dtype=torch.float64)
    for length in range(1, LONGEST):
        log_prob = torch.cat([go_on.expand(length - 1), end[None]])
        chance = log_prob.detach().sum().exp()
        sequence, earned = torch.zeros(length, dtype=torch.int64), torch.full((length,), advantage).double()
        tokens = CompletionTokens(log_prob, log_prob.detach(), earned, sequence)
        loss = policy_loss(tokens, method)
        total = total + chance * loss.total / loss.count
    (gradient,) = torch.autograd.grad(total, logit)
    return -float(gradient)


def test_grpo_lengthens_wrong_and_shortens_right_answers() -> None:
    assert push("grpo", -1.0) < -0.01
    assert push("grpo", 1.0) > 0.01


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_dr_grpo_has_no_length_bias(advantage: float) -> None:
    assert abs(push("dr_grpo", advantage)) < 1e-9
