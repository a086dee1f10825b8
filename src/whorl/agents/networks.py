"""Policy and value networks for small problems: two separate multi-layer perceptrons.

They are separate because the value's gradients are larger and change sign less often; in a shared network they would
dominate. Initial weights are orthogonal. The policy's last layer is 100 times smaller than the others, so the first
policy is close to uniform (Andrychowicz et al. 2021, arXiv:2006.05990, sections 3.2 and 3.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from whorl.agents.environments.environment import Spaces


@dataclass(frozen=True)
class ActionEvaluation:
    """Log-probability, entropy and value of N steps; each [N]."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


def mlp(
    sizes: Sequence[int],
    output_gain: float,
    generator: torch.Generator,
    activation: type[nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for number, (n_in, n_out) in enumerate(pairwise(sizes)):
        last = number == len(sizes) - 2
        linear = nn.Linear(n_in, n_out)
        with torch.no_grad():
            nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2), generator=generator)
            linear.bias.zero_()
        layers += [linear] if last else [linear, activation()]
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    """A policy and a value function.

    Discrete actions have logits; vector actions have a Gaussian with a learned log-width.
    """

    def __init__(self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        n_in = math.prod(spaces.observation_shape)
        self.discrete = spaces.n_actions is not None
        n_out = spaces.n_actions or spaces.action_size
        self.policy = mlp([n_in, *hidden, n_out], 0.01, generator)
        self.value = mlp([n_in, *hidden, 1], 1.0, generator)
        self.log_width = None if self.discrete else nn.Parameter(torch.zeros(spaces.action_size))

    def values(self, observation: Tensor) -> Tensor:
        """Return values [...] for observations [..., d]."""
        out: Tensor = self.value(observation).squeeze(-1)
        return out

    def act(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions and distribution parameters (logits [B, A] or means [B, k]) for observations [B, d].

        noise: [B] uniform in [0, 1) for discrete actions, [B, k] standard normal for vectors.
        """
        output = self.policy(observation)
        if not self.discrete:
            assert self.log_width is not None
            return output + self.log_width.exp() * noise, output
        cumulative = output.softmax(dim=-1).cumsum(dim=-1)
        # The first action whose cumulative probability exceeds the draw. The last sum is always 1, up to rounding.
        return (cumulative[:, :-1] <= noise[:, None]).sum(dim=-1), output

    def greedy_action(self, observation: Tensor) -> Tensor:
        """Return the most likely action of each observation [B, d]."""
        output: Tensor = self.policy(observation)
        return output.argmax(dim=-1) if self.discrete else output

    def log_prob(self, distribution: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities [...]. distribution: [..., A] or [..., k], from `act`. action: [...] or [..., k]."""
        if self.discrete:
            return distribution.log_softmax(dim=-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        assert self.log_width is not None
        z = (action - distribution) / self.log_width.exp()
        total: Tensor = (-0.5 * z.square() - self.log_width - 0.5 * math.log(2 * math.pi)).sum(dim=-1)
        return total

    def evaluate_actions(self, observation: Tensor, action: Tensor) -> ActionEvaluation:
        """Evaluate actions [N] or [N, k] at observations [N, d]."""
        output = self.policy(observation)
        value = self.values(observation)
        if self.discrete:
            log_probs = output.log_softmax(dim=-1)
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
            return ActionEvaluation(log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, value)
        assert self.log_width is not None
        each = 0.5 + 0.5 * math.log(2 * math.pi) + self.log_width
        return ActionEvaluation(self.log_prob(output, action), each.sum().expand(len(value)), value)


class QNetworks(nn.Module):
    """Values of discrete actions: `q`, and `target`, which holds earlier weights of it."""

    def __init__(
        self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator, *, duelling: bool = False
    ) -> None:
        super().__init__()
        assert spaces.n_actions is not None
        n_in = math.prod(spaces.observation_shape)
        sizes = [n_in, *hidden, spaces.n_actions + duelling]
        self.q = nn.Sequential(mlp(sizes, 0.01, generator, nn.ReLU), *([Duelling()] if duelling else []))
        self.target = deepcopy(self.q).requires_grad_(False)


class Duelling(nn.Module):
    """Map a value and advantages [..., 1 + A] to values of actions [..., A]."""

    def forward(self, output: Tensor) -> Tensor:
        value, advantage = output[..., :1], output[..., 1:]
        return value + advantage - advantage.mean(dim=-1, keepdim=True)
