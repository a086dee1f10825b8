"""Grid worlds, written as tensor operations over all copies, with their tables of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from whorl.agents.environments.environment import NO_LIMIT, BatchedEnvironment, Spaces
from whorl.agents.environments.tables import Tables
from whorl.errors import ConfigError


class GridWorld(BatchedEnvironment):
    """Walk over a slippery frozen lake to the goal. A hole ends the episode.

    The map and rules are those of gymnasium's FrozenLake. The observation is the one-hot cell. A map has one start S and
    free cells F. A hole H and a goal G end the episode, a cliff C leads back to the start, and a step to X costs 1.

    Args:
        rows: the map, strings of equal length.
        slip_probability: probability of slipping to each side of the chosen direction (1/3 in FrozenLake).
    """

    default_max_episode_steps = 100
    default_rows: ClassVar[tuple[str, ...]] = ("SFFF", "FHFH", "FFFH", "HFFG")
    default_slip: ClassVar[float] = 1 / 3
    moves: ClassVar[Mapping[str, tuple[int, int]]] = {"←": (0, -1), "↓": (1, 0), "→": (0, 1), "↑": (-1, 0)}
    cell_rewards: ClassVar[Mapping[str, float]] = {"G": 1.0}

    def __init__(
        self, num_envs: int, *, rows: tuple[str, ...] | None = None, slip_probability: float | None = None,
        max_episode_steps: int | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(num_envs, max_episode_steps=max_episode_steps, device=device)
        self.rows = self.default_rows if rows is None else rows
        self.slip_probability = self.default_slip if slip_probability is None else slip_probability
        text = "".join(self.rows)
        if len({len(row) for row in self.rows}) != 1 or text.count("S") != 1 or set(text) - set("SFHGCX"):
            expected = "rows of equal length, made of one S and any number of F, H, G, C and X"
            raise ConfigError(f"invalid grid world map {list(self.rows)}", expected=expected)
        self.start_cell = text.index("S")
        self.spaces = Spaces((len(text),), n_actions=len(self.moves), has_costs="X" in text)
        height, width = len(self.rows), len(self.rows[0])
        cells = torch.arange(len(text), device=self.device)
        down, right = torch.tensor([*self.moves.values()], device=self.device).T[..., None]  # each [moves, 1]
        row, column = (
            (cells // width + down).clamp(0, height - 1),
            (cells % width + right).clamp(0, width - 1),
        )
        self.move_of = self.moves_of_actions(len(text))
        aimed = (row * width + column).gather(0, self.move_of)
        rewards = torch.tensor([self.cell_rewards.get(c, 0.0) for c in text], device=self.device)
        cliff = torch.tensor([c == "C" for c in text], device=self.device)
        # [actions, cells] what an action without a slip gains, and the cell that it leads to
        self.rewards = rewards[aimed] + self.move_rewards()[self.move_of]
        self.next_cell = aimed.masked_fill(cliff[aimed], self.start_cell)
        self.terminal_cells = torch.tensor([c in "GH" for c in text], device=self.device)
        self.costs = torch.tensor([float(c == "X") for c in text], device=self.device)
        self.one_hot = torch.eye(len(text), device=self.device)

    def moves_of_actions(self, n_cells: int) -> Tensor:
        """Return [actions, cells] the number of the move that each action makes."""
        return torch.arange(len(self.moves), device=self.device)[:, None].repeat(1, n_cells)

    def move_rewards(self) -> Tensor:
        """Return the reward of each move, added to that of the cell."""
        return torch.zeros(len(self.moves), device=self.device)

    def initial_state(self, n: int) -> Tensor:
        return torch.full((1, n), self.start_cell, dtype=torch.int64, device=self.device)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.slip_probability:
            draw = self.uniform(0.0, 1.0, self.num_envs)
            slip = (draw < self.slip_probability).long() - (draw >= 1 - self.slip_probability).long()
            action = (action + slip) % len(self.moves)
        next_state = self.next_cell[action, state[0]]
        return next_state[None], self.rewards[action, state[0]], self.terminal_cells[next_state]

    def observe(self, state: Tensor) -> Tensor:
        return self.one_hot[state[0]]

    def cost(self, state: Tensor) -> Tensor | None:
        return self.costs[state[0]] if self.spaces.has_costs else None

    def tables(self) -> Tables:
        n_actions, n_states = self.next_cell.shape
        terminal = self.terminal_cells.cpu().numpy()
        stay, slip = np.eye(n_actions), self.slip_probability
        mixed = (1 - 2 * slip) * stay + slip * (np.roll(stay, 1, axis=1) + np.roll(stay, -1, axis=1))
        transition = np.einsum("ab,bst->sat", mixed, np.eye(n_states)[self.next_cell.cpu().numpy()])
        transition[terminal] = np.eye(n_states)[terminal][:, None]
        reward = np.einsum("ab,bs->sa", mixed, self.rewards.double().cpu().numpy())
        reward[terminal] = 0.0
        cost = transition @ self.costs.double().cpu().numpy() if self.spaces.has_costs else None
        names = list(self.moves)
        return Tables(
            transition, reward, terminal, np.eye(n_states)[self.start_cell], cost,
            self.max_episode_steps if self.max_episode_steps < NO_LIMIT else None, self.rows,
            [[names[move] for move in moves] for moves in self.move_of.tolist()],
        )  # fmt: skip


class DryLake(GridWorld):
    """Walk over the frozen lake on a floor that does not slip."""

    default_slip = 0.0


class DiagonalLake(DryLake):
    """Walk over the dry lake by diagonal moves. At a wall only the other half of a move is made."""

    moves: ClassVar[Mapping[str, tuple[int, int]]] = {"↖": (-1, -1), "↙": (1, -1), "↘": (1, 1), "↗": (-1, 1)}


class FrozenLake8x8(GridWorld):
    """Walk over a larger frozen lake, as in gymnasium's FrozenLake8x8."""

    default_max_episode_steps = 200
    default_rows = (
        "SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG",
    )  # fmt: skip


class CliffWalking(GridWorld):
    """Walk along a cliff. Reward: -1 per step, -100 for a step off it, which leads back to the start.

    Rules are those of gymnasium's CliffWalking. Source: Sutton & Barto 2018, example 6.6.
    """

    default_max_episode_steps = NO_LIMIT
    default_rows = ("F" * 12, "F" * 12, "F" * 12, "S" + "C" * 10 + "G")
    default_slip = 0.0
    moves: ClassVar[Mapping[str, tuple[int, int]]] = {"↑": (-1, 0), "→": (0, 1), "↓": (1, 0), "←": (0, -1)}
    cell_rewards: ClassVar[Mapping[str, float]] = {"S": -1.0, "F": -1.0, "G": -1.0, "C": -100.0}


class CostlyGrid(GridWorld):
    """Walk to the goal: 5 steps through costly cells, or 11 around them. Reward: 1 at the goal, -0.05 per other step."""

    default_rows = ("SXXXXG", "FXXXXF", "FXXXXF", "FFFFFF")
    default_slip = 0.02
    cell_rewards: ClassVar[Mapping[str, float]] = {"S": -0.05, "F": -0.05, "X": -0.05, "G": 1.0}


class DeepSea(GridWorld):
    """Dive one row per step, left or right. Only a dive to the right at every step finds the treasure (reward 1).

    A move to the right costs 0.01 / size, so that rewards lead away from the treasure. Which action moves to the right
    differs from cell to cell, so that a network cannot generalize. A uniform policy finds the treasure with probability
    2 ** -size. Source: Osband et al. 2019, arXiv:1703.07608, section 5.1.

    Args:
        size: number of steps of an episode. The map has one more row, where episodes end, and one more column.
    """

    default_slip = 0.0
    moves: ClassVar[Mapping[str, tuple[int, int]]] = {"↙": (1, -1), "↘": (1, 1)}

    def __init__(
        self, num_envs: int, *, size: int = 20, max_episode_steps: int | None = None, device: str = "cpu"
    ) -> None:
        if size < 2:
            raise ConfigError(f"the size of DeepSea is {size}", expected="at least 2")
        free = "F" * (size + 1)
        rows = ("S" + free[1:], *[free] * (size - 1), "H" * size + "G")
        self.size = size
        super().__init__(num_envs, rows=rows, max_episode_steps=max_episode_steps, device=device)

    def moves_of_actions(self, n_cells: int) -> Tensor:
        swapped = torch.rand(n_cells, generator=torch.Generator().manual_seed(self.size)) < 0.5
        return torch.stack([swapped, ~swapped]).long().to(self.device)

    def move_rewards(self) -> Tensor:
        return torch.tensor([0.0, -0.01 / self.size], device=self.device)
