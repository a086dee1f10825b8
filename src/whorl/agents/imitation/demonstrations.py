"""Demonstrations: whole episodes of an expert, recorded, stored, and checked before a method learns from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from whorl.agents.environments.environment import Spaces, Transition
from whorl.agents.environments.registration import make_env
from whorl.agents.methods.method import MethodConfig
from whorl.agents.task import MAX_EVALUATION_STEPS, run_episodes
from whorl.errors import ConfigError

RANDOM_EPISODES = 20
FILE, RESULT = "episodes.safetensors", "result.json"
FIELDS = ("observation", "action", "reward", "terminated", "truncated", "final_observation")
Policy = Callable[[Tensor], Tensor]  # observations [B, d] -> actions [B] or [B, k]


@dataclass(frozen=True)
class Demonstrations:
    """Episodes one after another, N steps in all.

    environment: where they were recorded. lengths: steps of each episode.
    steps: of `FIELDS`: observations [N, d], actions [N] or, within their bounds, [N, k], and numbers and flags [N]. The
        last step of each episode has one of the flags.
    random_return: mean return of uniform random actions there.
    expert: the policy that was recorded, for labels of further observations; None if it is not available.
    """

    environment: str
    lengths: list[int]
    steps: Mapping[str, Tensor]
    random_return: float
    expert: Policy | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return sum(self.lengths)

    def __str__(self) -> str:
        mean = sum(self.returns) / max(1, len(self.lengths))
        return f"{len(self.lengths)} episodes, {len(self):,} steps, return {mean:.1f}"

    @property
    def returns(self) -> list[float]:
        """The undiscounted return of each episode."""
        return [float(part.sum()) for part in torch.split(self.steps["reward"], self.lengths)]

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return observation and action of n steps, drawn with replacement."""
        index = torch.randint(len(self), (n,), generator=generator)
        return {name: self.steps[name][index] for name in ("observation", "action")}

    def check(self, config: MethodConfig, spaces: Spaces) -> None:
        """Check that a method can learn from them in an environment with these spaces.

        Raises:
            ConfigError: there are none, they are of other spaces, or the expert is no better than random actions.
        """
        given, do = f"the demonstrations of {self.environment}", "whorl rl record AGENT --demos 10"
        if not len(self):
            raise ConfigError(f"{given} are empty", expected="at least one episode", do=do)
        (envs := make_env(self.environment, 1)).close()
        if (of := _describe(envs.spaces)) != (wanted := _describe(spaces)):
            what = f"{given} have {of}, and {config.environment} has {wanted}"
            raise ConfigError(what, expected=f"an expert in {config.environment}", do=do)
        if (best := max(self.returns)) <= self.random_return:
            what = f"the expert of {given} never succeeds: its best return of {len(self.lengths)} episodes is {best:.4g}"
            expected = f"more than the mean of random actions, {self.random_return:.4g}"
            raise ConfigError(what, expected=expected, do="train the expert longer, and record it again")

    def save(self, folder: Path) -> None:
        """Write the artifact's files."""
        from safetensors.torch import save_file

        save_file({name: t.contiguous() for name, t in self.steps.items()}, folder / FILE)
        facts = {"environment": self.environment, "random_return": self.random_return}
        facts |= {"lengths": self.lengths, "returns": self.returns}
        (folder / RESULT).write_text(json.dumps(facts) + "\n")


def _describe(spaces: Spaces) -> str:
    actions = f"{spaces.n_actions} actions" if spaces.n_actions else f"action vectors of {spaces.action_size}"
    return f"observations of shape {spaces.observation_shape} and {actions}"


def record_demonstrations(
    environment: str, expert: Policy, episodes: int, seed: int, *, max_steps: int = MAX_EVALUATION_STEPS
) -> Demonstrations:
    """Return episodes of a policy, each cut off after `max_steps`, and the mean return of random actions."""
    rows: list[tuple[Tensor, ...]] = []

    def keep(observation: Tensor, action: Tensor, found: Transition, running: Tensor) -> None:
        cut = found.truncated | (len(rows) == max_steps - 1) & ~found.terminated
        final = found.final_observation.flatten(1)
        rows.append((observation, action, found.reward, found.terminated, cut, final, running))

    envs, others = make_env(environment, episodes), make_env(environment, RANDOM_EPISODES)
    run_episodes(envs, expert, seed, max_steps=max_steps, keep=keep)
    act = partial(_random_actions, others.spaces, torch.Generator().manual_seed(seed))
    random = run_episodes(others, act, seed, max_steps=max_steps)
    envs.close()
    others.close()
    *columns, running = (torch.stack(column).transpose(0, 1) for column in zip(*rows, strict=True))
    steps = {
        name: column[running] for name, column in zip(FIELDS, columns, strict=True)
    }  # [episodes, T, ...] -> [N, ...]
    lengths = running.sum(1).tolist()
    return Demonstrations(environment, lengths, steps, sum(random) / len(random), expert)


def _random_actions(spaces: Spaces, generator: torch.Generator, observation: Tensor) -> Tensor:
    if spaces.n_actions is not None:
        return torch.randint(spaces.n_actions, (len(observation),), generator=generator)
    low, high = (torch.tensor(bound).clamp(-1e6, 1e6) for bound in (spaces.action_low, spaces.action_high))
    return low + (high - low) * torch.rand(len(observation), spaces.action_size, generator=generator)
