"""Demonstrations of hand-written experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from whorl.agents.environments.registration import make_tables
from whorl.agents.imitation.demonstrations import Demonstrations, record_demonstrations
from whorl.agents.imitation.inverse import soft_policy
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import METHODS


def balance(observation: Tensor) -> Tensor:
    """Push the cart of CartPole-v1 under its pole: return 500."""
    weights = torch.tensor([0.1, 0.3, 1.0, 0.5])
    return (observation @ weights > 0).long()


def swing(observation: Tensor) -> Tensor:
    """Swing the pendulum of Pendulum-v1 up, and hold it there."""
    up, side, speed = observation.unbind(-1)
    hold = -16 * torch.atan2(side, up) - 4 * speed
    return torch.where(up > 0.8, hold, 2 * speed.sign()).clamp(-2, 2)[:, None]


class GoalExpert:
    """Read the demonstration of GoalGridDemo-v0: walk to the cell of its reward, first along the column."""

    def __init__(self) -> None:
        self.goal = torch.zeros(0, 2, dtype=torch.int64)

    def __call__(self, observation: Tensor) -> Tensor:
        cell = torch.stack((observation[:, :5].argmax(1), observation[:, 5:10].argmax(1)), 1)
        if len(self.goal) != len(cell):
            self.goal = cell.clone()
        rewarded = observation[:, -2] > 0
        self.goal[rewarded] = cell[rewarded]
        down, right = (self.goal - cell).unbind(1)
        return torch.where(down != 0, torch.where(down > 0, 1, 3), torch.where(right > 0, 2, 0))


class LakeExpert:
    """Draw actions from the soft policy of a lake's true reward, at temperature 0.1. policy: [S, A]."""

    def __init__(self, environment: str = "DryLake-v0") -> None:
        self.tables = make_tables(environment)
        self.policy, _ = soft_policy(self.tables, self.tables.reward / 0.1, 0.99)

    def __call__(self, observation: Tensor) -> Tensor:
        return torch.multinomial(observation.double() @ torch.from_numpy(self.policy), 1)[:, 0]


EXPERTS = {
    "CartPole-v1": balance, "Pendulum-v1": swing, "GoalGridDemo-v0": GoalExpert(), "DryLake-v0": LakeExpert()
}  # fmt: skip


def demonstrations_for(config: MethodConfig, episodes: int = 2, seed: int = 0) -> Demonstrations | None:
    """Return episodes that `config.method` can learn from; None if it needs none."""
    if not METHODS[config.method].needs_demonstrations:
        return None
    torch.manual_seed(seed)
    found = record_demonstrations(config.environment, EXPERTS[config.environment], episodes, seed)
    return replace(found, random_return=float("-inf"))
