"""Trials: environments whose task is hidden and drawn for each trial, so that an agent has to learn it within the trial.

All copies have trials of equal length, which begin together: a rollout of `spaces.trial_steps` steps holds whole trials. A
trial has several episodes. Its end is the only end that a transition has. The last numbers of an observation are the last
action (one-hot), its reward, and whether it ended an episode (Duan et al. 2016, arXiv:1611.02779, section 2.2).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from whorl.agents.environments.environment import NO_LIMIT, BatchedEnvironment, Spaces
from whorl.errors import ConfigError

HELD_OUT = (1, 8, 10, 17, 19, 21)  # of 5 x 5 cells: every row and every column of the grid has others
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up
START = (
    0.0,
    -1.0,
    0.0,
    0.0,
)  # step of the trial, last action (none), its reward, whether it ended an episode


class TrialEnvironment(BatchedEnvironment):
    """An environment of trials. phases: of a trial. The last four rows of a state are those of `START`."""

    default_max_episode_steps = NO_LIMIT
    phases: ClassVar[tuple[str, ...]]

    @abstractmethod
    def episodes(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return phase and number of the episode that each copy is in [B], from 0; -1 if the trial's end may cut it."""

    def begin(self, task: Tensor) -> Tensor:
        """Return the state of n trials before their first step, with the rows of a task [k, n]."""
        return torch.cat((task, task.new_tensor(START)[:, None].expand(-1, task.shape[1])))

    def result(
        self, task: Tensor, state: Tensor, action: Tensor, seen: Tensor, ended: Tensor, reward: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `transition` does. task: first rows of the next state [k, B]. seen: the reward that is observed."""
        rows = (state[-4] + 1, action.double(), seen.double(), ended.double())
        return torch.cat((task, torch.stack(rows))), reward, rows[0] >= self.spaces.trial_steps

    def observe(self, state: Tensor) -> Tensor:
        n, (action, reward, ended) = self.spaces.n_actions or 0, state[-3:]
        last = one_hot(action.long() + 1, n + 1)[:, 1:]
        return torch.cat((last, reward[:, None], ended[:, None]), 1).float()


class Bandits(TrialEnvironment):
    """Pull one of five arms, ten times. Reward: 1 with the arm's probability, which is uniform in each trial.

    The task is the arms' probabilities, and an episode is one pull. Source: Duan et al. 2016, section 3.1.
    """

    phases, spaces = ("pulls",), Spaces((7,), n_actions=5, trial_steps=10)

    def initial_state(self, n: int) -> Tensor:
        return self.begin(self.uniform(0.0, 1.0, 5, n))

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reward = (self.uniform(0.0, 1.0, self.num_envs) < state.gather(0, action[None])[0]).float()
        return self.result(state[:5], state, action, reward, torch.ones_like(reward), reward)

    def episodes(self, state: Tensor) -> tuple[Tensor, Tensor]:
        number = state[-4].long()
        return torch.zeros_like(number), number


class GoalGrid(TrialEnvironment):
    """Find a hidden goal in a grid of 4 x 4 cells, again and again; it moves once. Reward: 1 at it, -0.05 per other step.

    An episode begins in a random cell. It ends at the goal, or after `limit` steps, and one step without effect leads to
    the next one. The goal moves, unseen, between two episodes, before the middle of the trial. The observation has the row
    and the column (one-hot). Rows of a task: cell, index of the goal, step of the episode, first step at which the goal may
    move, phase, episode of the phase.

    goals: cells that it may have, by default all; only one never moves. shown: the goal stays, and in the first episode of
    the trial a demonstrator acts for the agent, without reward.
    """

    phases: ClassVar[tuple[str, ...]] = ("first goal", "after the goal has moved")
    side: ClassVar[int] = 4
    default_goals: ClassVar[tuple[int, ...]] = ()
    trial_steps: ClassVar[int] = 128
    limit: ClassVar[int] = 30
    shown: ClassVar[bool] = False

    def __init__(
        self, num_envs: int, *, goals: tuple[int, ...] = (), max_episode_steps: int | None = None, device: str = "cpu"
    ) -> None:  # fmt: skip
        super().__init__(num_envs, max_episode_steps=max_episode_steps, device=device)
        side, cell = self.side, torch.arange(self.side**2, device=self.device)
        if not set(goals) <= set(range(side**2)):
            raise ConfigError(f"the goals of GoalGrid are {goals}", expected=f"cells from 0 to {side**2 - 1}")
        self.goals = torch.tensor(goals or self.default_goals or range(side**2), device=self.device)
        self.spaces = Spaces((2 * side + 6,), n_actions=4, trial_steps=self.trial_steps)
        moves = torch.tensor(MOVES, device=self.device)
        row, column = cell // side + moves[:, :1], cell % side + moves[:, 1:]
        self.next_cell = row.clamp(0, side - 1) * side + column.clamp(0, side - 1)  # [actions, cells]

    def other(self, number: Tensor, n: int) -> Tensor:
        """Draw numbers from 0 to n - 1 that differ from `number`, of which there are n > 1."""
        return (number + 1 + (self.uniform(0.0, n - 1.0, len(number))).long()) % n

    def initial_state(self, n: int) -> Tensor:
        goal = self.uniform(0.0, len(self.goals), n).long()
        move_at = self.uniform(self.trial_steps / 3, self.trial_steps / 2, n)
        cell, none = self.other(self.goals[goal], self.side**2), torch.zeros(n, device=self.device)
        return self.begin(torch.stack((cell, goal, none, move_at, none, none)))

    def demonstrator(self, state: Tensor) -> Tensor:
        """Return actions [B] of a shortest path to the goal, first along the column."""
        cell, goal = state[0].long(), self.goals[state[1].long()]
        down, right = goal // self.side - cell // self.side, goal % self.side - cell % self.side
        return torch.where(down != 0, torch.where(down > 0, 1, 3), torch.where(right > 0, 2, 0))

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cell, goal, age, move_at, phase, number = state[:6].long()
        rests, demonstrated = state[-1] > 0, (phase + number == 0) & self.shown
        action = torch.where(demonstrated, self.demonstrator(state), action)
        reached = self.next_cell[action, cell]
        arrived = ~rests & (reached == self.goals[goal])
        ended = ~rests & (arrived | (age + 1 >= self.limit))
        reward = torch.where(arrived, 1.0, -0.05) * ~rests
        # After an end: the next episode, with another goal once its time has come
        if len(self.goals) > 1 and not self.shown:
            moves = rests & (phase == 0) & (state[-4] >= move_at)
            goal = torch.where(moves, self.other(goal, len(self.goals)), goal)
            phase, number = phase + moves, torch.where(moves, -1, number)
        cell = torch.where(rests, self.other(self.goals[goal], self.side**2), reached)
        age = torch.where(rests, 0, age + 1)
        task = torch.stack((cell, goal, age, move_at, phase, number + rests.long())).double()
        return self.result(task, state, action, reward, ended, reward * ~demonstrated)

    def observe(self, state: Tensor) -> Tensor:
        cell = state[0].long()
        place = one_hot(cell // self.side, self.side), one_hot(cell % self.side, self.side)
        return torch.cat((*place, super().observe(state)), 1)

    def episodes(self, state: Tensor) -> tuple[Tensor, Tensor]:
        complete = state[-4] - state[2] <= self.trial_steps - self.limit
        return state[4].long(), torch.where(complete, state[5], -1.0).long()


class DemonstratedGoalGrid(GoalGrid):
    """Repeat what a demonstrator does in the first episode of a trial. Goals are those for training: 19 of 25 cells."""

    phases = ("goal",)
    side, trial_steps, limit, shown = 5, 26, 8, True
    default_goals = tuple(sorted(set(range(25)) - set(HELD_OUT)))


class HeldOutGoalGrid(DemonstratedGoalGrid):
    """Repeat a demonstration with a goal that no trial of `GoalGridDemo-v0` has: six cells."""

    default_goals = HELD_OUT
