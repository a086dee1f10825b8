"""Policy and value networks for small problems: multi-layer perceptrons, after two convolutions for pixels.

Policy and value are separate because the value's gradients are larger and change sign less often; in a shared network
they would dominate. Initial weights are orthogonal. The last layer of the policy is 100 times smaller, so the first
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
from whorl.errors import ConfigError


@dataclass(frozen=True)
class ActionEvaluation:
    """Log-probability, entropy and value of N steps; each [N]."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class Pixels(nn.Module):
    """Map flattened images [..., C H W] uint8 to features [..., n_out]: two convolutions of stride 2 or more."""

    def __init__(self, shape: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.shape, side = tuple(shape), min(shape[1:])
        if side < 5:
            raise ConfigError(f"images of {shape[1]} x {shape[2]} pixels", expected="at least 5 x 5")
        size, stride = (8, 4) if side >= 36 else (3, 2)
        first = nn.Conv2d(shape[0], 16, size, stride)
        second = nn.Conv2d(16, 32, size // 2 + size % 2, 2 if side >= 9 else 1)
        for convolution in (first, second):
            initialize(convolution, math.sqrt(2), generator)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())
        self.n_out: int = self.layers(torch.zeros(1, *shape)).shape[1]

    def forward(self, observation: Tensor) -> Tensor:
        images = observation.reshape(-1, *self.shape).float() / 255
        out: Tensor = self.layers(images)
        return out.view(*observation.shape[:-1], self.n_out)


def initialize(layer: nn.Conv2d | nn.Linear, gain: float, generator: torch.Generator) -> None:
    """Set orthogonal weights and a bias of 0."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def make_network(
    spaces: Spaces, hidden: Sequence[int], n_out: int, output_gain: float, generator: torch.Generator,
    activation: type[nn.Module] = nn.Tanh,
) -> nn.Sequential:  # fmt: skip
    """Return a network of observations: layers with an activation between them, after convolutions for pixels."""
    pixels = [Pixels(spaces.observation_shape, generator)] if spaces.observation_dtype == torch.uint8 else []
    n_in = pixels[0].n_out if pixels else math.prod(spaces.observation_shape)
    layers: list[nn.Module] = [*pixels]
    for width in hidden:
        initialize(linear := nn.Linear(n_in, width), math.sqrt(2), generator)
        layers += [linear, activation()]
        n_in = width
    initialize(last := nn.Linear(n_in, n_out), output_gain, generator)
    return nn.Sequential(*layers, last)


def draw_action(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return actions [B] of the distributions with logits [B, A], by draws [B] from [0, 1)."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # The first action whose cumulative probability exceeds the draw. The last sum is always 1, up to rounding.
    return (cumulative[:, :-1] <= uniform[:, None]).sum(dim=-1)


class ActorCritic(nn.Module):
    """A policy and a value function.

    Discrete actions have logits; vector actions have a Gaussian with a learned log-width.
    """

    def __init__(self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.discrete = spaces.n_actions is not None
        n_out = spaces.n_actions or spaces.action_size
        self.policy = make_network(spaces, hidden, n_out, 0.01, generator)
        self.value = make_network(spaces, hidden, 1, 1.0, generator)
        self.cost_value: nn.Module | None = None
        self.log_width = None if self.discrete else nn.Parameter(torch.zeros(spaces.action_size))

    def values(self, observation: Tensor) -> Tensor:
        """Return values [...] for observations [..., d]."""
        out: Tensor = self.value(observation).squeeze(-1)
        return out

    def act(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions and distribution parameters (logits [B, A] or means [B, k]); see `Method.act`."""
        output = self.policy(observation)
        if not self.discrete:
            assert self.log_width is not None
            return output + self.log_width.exp() * noise, output
        return draw_action(output, noise), output

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

    def kl(self, old: Tensor, old_log_width: Tensor | None, observation: Tensor) -> Tensor:
        """Return the mean KL divergence from earlier distributions to the current ones at observations [N, d].

        old: [N, A] logits or [N, k] means; old_log_width: [k] of the means.
        """
        output = self.policy(observation)
        if self.discrete:
            log_old = old.log_softmax(dim=-1)
            each: Tensor = (log_old.exp() * (log_old - output.log_softmax(dim=-1))).sum(-1)
            return each.mean()
        assert self.log_width is not None and old_log_width is not None
        ratio = (2 * (old_log_width - self.log_width)).exp()
        squares = ((old - output) / self.log_width.exp()).square()
        each = (self.log_width - old_log_width + 0.5 * (ratio + squares - 1)).sum(-1)
        return each.mean()

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

    forward: observations [N, d] and, with `action_size`, action vectors [N, k] -> [K, N, n_out]. Or each network has its
        own rows: [K, N, d] and [K, N, k].
    """

    def __init__(
        self, k: int, spaces: Spaces, hidden: Sequence[int], n_out: int, generator: torch.Generator, *, action_size: int = 0
    ) -> None:  # fmt: skip
        super().__init__()
        pixels = spaces.observation_dtype == torch.uint8
        encoders = [Pixels(spaces.observation_shape, generator) for _ in range(k if pixels else 0)]
        self.encoders = nn.ModuleList(encoders)
        n_in = encoders[0].n_out if pixels else math.prod(spaces.observation_shape)
        sizes = [n_in + action_size, *hidden, n_out]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for number, (n_in, n_out) in enumerate(pairwise(sizes)):
            weight = torch.empty(k, n_out, n_in)
            for each in weight:
                gain = math.sqrt(2) if number < len(sizes) - 2 else 1.0
                nn.init.orthogonal_(each, gain, generator=generator)
            self.weights.append(nn.Parameter(weight.transpose(1, 2).contiguous()))
            self.biases.append(nn.Parameter(torch.zeros(k, 1, n_out)))

    def forward(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        k = len(self.weights[0])
        if self.encoders:
            x = torch.stack([encode(observation) for encode in self.encoders])
        else:
            x = observation.expand(k, -1, -1)
        if action is not None:
            x = torch.cat((x, action.expand(k, -1, -1)), dim=-1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if number == 0 else x.relu(), weight)
        return x


def action_bounds(spaces: Spaces) -> tuple[Tensor, Tensor]:
    """Return middle and half range [k] of action vectors. Raises ConfigError: a bound is infinite."""
    if any(map(math.isinf, (*spaces.action_low, *spaces.action_high))):
        raise ConfigError(
            f"the bounds of the actions are {spaces.action_low} and {spaces.action_high}", expected="finite bounds",
            do="use ppo or trpo, or bound the actions of the environment",
        )  # fmt: skip
    low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
    return (low + high) / 2, (high - low) / 2


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
        shape = (members, spaces, hidden, spaces.n_actions + duelling, generator)
        self.q = Critics(*shape)
        self.target = deepcopy(self.q).requires_grad_(False)
        self.prior = Critics(*shape).requires_grad_(False) if prior_scale else None

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
        self.policy = make_network(spaces, hidden, n_out, 0.01, generator, nn.ReLU)
        vectors = spaces.action_size if spaces.n_actions is None else 0
        per_state = spaces.n_actions or 1
        self.critics = Critics(n_critics, spaces, hidden, per_state, generator, action_size=vectors)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        if target_policy:
            self.target_policy = deepcopy(self.policy).requires_grad_(False)
        if temperature is not None:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.middle: Tensor
        self.half_range: Tensor
        for name, bound in zip(("middle", "half_range"), action_bounds(spaces), strict=True):
            self.register_buffer(name, bound, persistent=False)

    def squash(self, output: Tensor) -> Tensor:
        """Map numbers [..., k] to actions within the bounds."""
        return self.middle + self.half_range * output.tanh()

    def values(self, critics: nn.Module, observation: Tensor, action: Tensor) -> Tensor:
        """Return values [K, N] of vector actions [N, k]."""
        out: Tensor = critics(observation, (action - self.middle) / self.half_range)
        return out.squeeze(-1)
