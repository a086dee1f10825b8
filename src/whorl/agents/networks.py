"""Policies and value functions for the small problems: two perceptrons, apart.

Apart, because the value's gradients, which are larger and change sign less, would otherwise decide what the policy sees.
Initial weights are orthogonal, the policy's last layer a hundred times smaller than the others: it starts by choosing all
actions alike (Andrychowicz et al. 2021, arXiv:2006.05990, sections 3.2 and 3.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from whorl.agents.environments import Environment


@dataclass(frozen=True)
class ActionEvaluation:
    """What the networks say about N steps; each [N]."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


def mlp(sizes: Sequence[int], output_gain: float, generator: torch.Generator) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for number, (inside, outside) in enumerate(pairwise(sizes)):
        last = number == len(sizes) - 2
        linear = nn.Linear(inside, outside)
        with torch.no_grad():
            nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2), generator=generator)
            linear.bias.zero_()
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    """A policy over discrete actions (logits) or vectors (a Gaussian with a learned width), and a value."""

    def __init__(self, environment: Environment, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        inside = math.prod(environment.observation_shape)
        self.discrete = environment.n_actions is not None
        outside = environment.n_actions or environment.action_size
        self.policy = mlp([inside, *hidden, outside], 0.01, generator)
        self.value = mlp([inside, *hidden, 1], 1.0, generator)
        self.log_width = None if self.discrete else nn.Parameter(torch.zeros(environment.action_size))
        self.action_low, self.action_high = environment.action_low, environment.action_high

    def values(self, observation: Tensor) -> Tensor:
        """[..., *observation] flattened to [..., d] -> [...]."""
        out: Tensor = self.value(observation).squeeze(-1)
        return out

    def act(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """[B, d] -> (action, what the policy said: logits [B, A] or means [B, k]).

        noise: [B] uniform in [0, 1) for discrete actions, [B, k] standard normal for vectors.
        """
        said = self.policy(observation)
        if not self.discrete:
            assert self.log_width is not None
            return said + self.log_width.exp() * noise, said
        reached = said.softmax(dim=-1).cumsum(dim=-1)
        # The first action whose cumulative probability exceeds the draw; the last one has it all, up to rounding.
        return (reached[:, :-1] <= noise[:, None]).sum(dim=-1), said

    def greedy_action(self, observation: Tensor) -> Tensor:
        """[B, d] -> the likeliest action of each."""
        said: Tensor = self.policy(observation)
        return said.argmax(dim=-1) if self.discrete else said

    def log_prob(self, distribution: Tensor, action: Tensor) -> Tensor:
        """said: [..., A] or [..., k], as `act` returned; action: [...] or [..., k] -> [...]."""
        if self.discrete:
            return distribution.log_softmax(dim=-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        assert self.log_width is not None
        standard = (action - distribution) / self.log_width.exp()
        found: Tensor = (-0.5 * standard.square() - self.log_width - 0.5 * math.log(2 * math.pi)).sum(dim=-1)
        return found

    def evaluate_actions(self, observation: Tensor, action: Tensor) -> ActionEvaluation:
        """observation: [N, d]; action: [N] or [N, k]."""
        said = self.policy(observation)
        value = self.values(observation)
        if self.discrete:
            log_probs = said.log_softmax(dim=-1)
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
            return ActionEvaluation(log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, value)
        assert self.log_width is not None
        each = 0.5 + 0.5 * math.log(2 * math.pi) + self.log_width
        return ActionEvaluation(self.log_prob(said, action), each.sum().expand(len(value)), value)
