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


class Critics(nn.Module):
    """K networks of equal shape, evaluated as one batched product per layer.

    forward: inputs [N, d] or [K, N, d] -> [K, N, n_out].
    """

    def __init__(self, k: int, sizes: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for number, (n_in, n_out) in enumerate(pairwise(sizes)):
            weight = torch.empty(k, n_out, n_in)
            for each in weight:
                gain = math.sqrt(2) if number < len(sizes) - 2 else 1.0
                nn.init.orthogonal_(each, gain, generator=generator)
            self.weights.append(nn.Parameter(weight.transpose(1, 2).contiguous()))
            self.biases.append(nn.Parameter(torch.zeros(k, 1, n_out)))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x.expand(len(self.weights[0]), *x.shape)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if number == 0 else x.relu(), weight)
        return x


class QNetworks(nn.Module):
    """Values of discrete actions by K members: `q`, `target` with earlier weights of it, and `prior`, never trained.

    A member's value is q + prior_scale x prior: where there are no data, members differ.
    """

    def __init__(
        self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator, members: int = 1, *,
        duelling: bool = False, prior_scale: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        assert spaces.n_actions is not None
        self.duelling, self.prior_scale = duelling, prior_scale
        sizes = [math.prod(spaces.observation_shape), *hidden, spaces.n_actions + duelling]
        self.q = Critics(members, sizes, generator)
        self.target = deepcopy(self.q).requires_grad_(False)
        self.prior = Critics(members, sizes, generator).requires_grad_(False) if prior_scale else None

    def values(self, network: nn.Module, observation: Tensor) -> Tensor:
        """Return values [K, N, A] by `q` or `target`, of observations [N, d]."""
        output: Tensor = network(observation)
        if self.prior is not None:
            output = output + self.prior_scale * self.prior(observation)
        if not self.duelling:
            return output
        value, advantage = output[..., :1], output[..., 1:]
        return value + advantage - advantage.mean(dim=-1, keepdim=True)


class PolicyAndCritics(nn.Module):
    """A policy, critics with targets, and a temperature: the networks of DDPG and SAC.

    Vector actions lie within their bounds: the policy's numbers pass through tanh. Critics see actions scaled to [-1, 1].

    Args:
        n_out: numbers of the policy per state. target_policy: keep earlier weights of the policy too.
        temperature: of the entropy, at first; None: without.
    """

    def __init__(
        self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator, *, n_out: int, n_critics: int,
        target_policy: bool = False, temperature: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        n_in, discrete = math.prod(spaces.observation_shape), spaces.n_actions is not None
        self.policy = mlp([n_in, *hidden, n_out], 0.01, generator, nn.ReLU)
        sizes = (
            [n_in, *hidden, spaces.n_actions or 0] if discrete else [n_in + spaces.action_size, *hidden, 1]
        )
        self.critics = Critics(n_critics, sizes, generator)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        if target_policy:
            self.target_policy = deepcopy(self.policy).requires_grad_(False)
        if temperature is not None:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
        self.register_buffer("middle", (low + high) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)
        self.middle: Tensor
        self.half_range: Tensor

    def squash(self, output: Tensor) -> Tensor:
        """Map numbers [..., k] to actions within the bounds."""
        return self.middle + self.half_range * output.tanh()

    def values(self, critics: nn.Module, observation: Tensor, action: Tensor) -> Tensor:
        """Return values [K, N] of vector actions [N, k]."""
        out: Tensor = critics(torch.cat((observation, (action - self.middle) / self.half_range), dim=-1))
        return out.squeeze(-1)
