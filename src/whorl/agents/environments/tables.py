"""The tables of a finite environment: transition probabilities, expected rewards and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """A Markov decision process of S states and A actions. State s is observed as the s-th one-hot vector.

    transition: [S, A, S] probability of each next state; a terminal state leads to itself.
    reward: [S, A] expected reward of a step; 0 in terminal states.
    terminal: [S] bool, states that end an episode.
    initial: [S] probability of each first state.
    cost: [S, A] expected cost of a step; None without costs.
    max_episode_steps: steps after which an episode is truncated; None without a limit.
    rows, arrows: the map of a grid, with S cells in the order of reading; arrows[a][s] is the move of action a.
    """

    transition: Array
    reward: Array
    terminal: NDArray[np.bool_]
    initial: Array
    cost: Array | None = None
    max_episode_steps: int | None = None
    rows: tuple[str, ...] = ()
    arrows: Sequence[Sequence[str]] = ()

    @property
    def continuing(self) -> Array:
        """[S, A, S] probability of each next state that is not terminal."""
        return self.transition * ~self.terminal

    @property
    def reachable(self) -> NDArray[np.bool_]:
        """[S] bool, states that an episode can visit and that are not terminal."""
        leads = np.asarray(self.continuing.any(axis=1))
        found: NDArray[np.bool_] = np.asarray(self.initial > 0)
        for _ in range(len(found)):
            found = found | np.any(leads[found], axis=0)
        return found

    def policy(self, action: NDArray[np.int64]) -> Array:
        """Return the policy [S, A] that takes `action` [S]."""
        return np.eye(self.reward.shape[1])[action]


def tables_of_outcomes(
    outcomes: Mapping[int, Mapping[int, Sequence[Any]]], initial: Any, max_episode_steps: int | None
) -> Tables:
    """Return the tables of gymnasium's form P[state][action] = [(probability, next state, reward, terminated)]."""
    n_states, n_actions = len(outcomes), len(outcomes[0])
    transition = np.zeros((n_states, n_actions, n_states))
    reward, terminal = np.zeros((n_states, n_actions)), np.zeros(n_states, np.bool_)
    for state, actions in outcomes.items():
        for action, results in actions.items():
            for probability, next_state, gain, terminated in results:
                transition[state, action, next_state] += probability
                reward[state, action] += probability * gain
                terminal[next_state] |= terminated
    transition[terminal] = np.eye(n_states)[terminal][:, None]
    reward[terminal] = 0.0
    return Tables(transition, reward, terminal, np.asarray(initial, np.float64), None, max_episode_steps)
