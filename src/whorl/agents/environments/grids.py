"""Grid worlds, written as tensor operations over all copies, with their tables of transitions."""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.agents.environments.environment import BatchedEnvironment, Spaces
from whorl.errors import ConfigError

FROZEN_LAKE_MAP = ("SFFF", "FHFH", "FFFH", "HFFG")


class GridWorld(BatchedEnvironment):
    """Walk over a grid (left 0, down 1, right 2, up 3) from S to the goal G (reward 1). A hole H ends the episode.

    The defaults are the map and rules of gymnasium's FrozenLake. The observation is the one-hot cell.

    Args:
        rows: the map, strings of equal length.
        slip_probability: probability of slipping to each side of the chosen direction (1/3 in FrozenLake).
    """

    default_max_episode_steps = 100

    def __init__(
        self,
        num_envs: int,
        *,
        rows: tuple[str, ...] = FROZEN_LAKE_MAP,
        slip_probability: float = 1 / 3,
        max_episode_steps: int | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(num_envs, max_episode_steps=max_episode_steps, device=device)
        text = "".join(rows)
        if len({len(row) for row in rows}) != 1 or text.count("S") != 1 or set(text) - set("SFHG"):
            raise ConfigError(
                f"invalid grid world map {list(rows)}",
                expected="rows of equal length, made of one S and any number of F, H and G",
            )
        self.slip_probability, self.start_cell = slip_probability, text.index("S")
        self.spaces = Spaces((len(text),), n_actions=4)
        cells = torch.arange(len(text), device=self.device)
        row, column = cells // len(rows[0]), cells % len(rows[0])
        moves = []
        for down, right in ((0, -1), (1, 0), (0, 1), (-1, 0)):
            r = (row + down).clamp(0, len(rows) - 1)
            c = (column + right).clamp(0, len(rows[0]) - 1)
            moves.append(r * len(rows[0]) + c)
        self.next_cell = torch.stack(moves)  # [4, cells] the cell that each action leads to
        self.goal_cells = torch.tensor([c == "G" for c in text], device=self.device)
        self.terminal_cells = torch.tensor([c in "GH" for c in text], device=self.device)
        self.one_hot = torch.eye(len(text), device=self.device)

    def initial_state(self, n: int) -> Tensor:
        return torch.full((1, n), self.start_cell, dtype=torch.int64, device=self.device)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.slip_probability:
            draw = self.uniform(0.0, 1.0, self.num_envs)
            action = (
                action + (draw < self.slip_probability).long() - (draw >= 1 - self.slip_probability).long()
            ) % 4
        next_state = self.next_cell[action, state[0]]
        return next_state[None], self.goal_cells[next_state].float(), self.terminal_cells[next_state]

    def observe(self, state: Tensor) -> Tensor:
        return self.one_hot[state[0]]
