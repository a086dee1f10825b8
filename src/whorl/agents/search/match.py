"""Matches: two players, all games of a batch at once, both colours, points with an interval.

Deterministic players would repeat one game, so the first moves of a game are random. Each opening is played twice, and the
players change sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.agents.search.game import Game, playout
from whorl.agents.search.tree import search
from whorl.evals.statistics.intervals import Interval, mean_interval

OPENING_MOVES = 2
# positions [N, cells] and a generator -> actions [N]
Player = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Match:
    """points: [N] of the first player: 1 for a win, 1/2 for a draw. moves: [N][plies] actions."""

    points: Tensor
    moves: list[list[int]]

    @property
    def interval(self) -> Interval:
        """Mean points with their 95 % interval; the two games of an opening are one cluster."""
        pairs = [str(i // 2) for i in range(len(self.points))]
        return mean_interval(self.points.double().numpy(), pairs)

    def __str__(self) -> str:
        won, drawn, lost = (int((self.points == points).sum()) for points in (1, 0.5, 0))
        share = self.interval
        ends = f"{100 * max(0, share.low):.1f} to {100 * min(1, share.high):.1f}"
        return f"{100 * share.mean:.1f} % of the points ({ends}): {won} won, {drawn} drawn, {lost} lost"


def random_player(game: Game) -> Player:
    """Return a player of uniform legal moves."""
    return lambda states, generator: torch.multinomial(game.legal(states).float(), 1, generator=generator)[
        :, 0
    ]


def uct_player(game: Game, simulations: int) -> Player:
    """Return a player by UCT with random playouts."""

    def act(states: Tensor, generator: torch.Generator) -> Tensor:
        def evaluate(leaves: Tensor) -> tuple[Tensor, Tensor]:
            order = torch.rand(len(leaves), game.n_actions, generator=generator)  # of actions without visits
            return order, playout(game, leaves, generator)

        return search(game, states, evaluate, simulations=simulations, rule="uct").tree.action

    return act


@torch.no_grad()
def play_match(
    game: Game, players: Sequence[Player], n_games: int, seed: int, *,
    observe: Callable[[int], object] = lambda ended: None,
) -> Match:  # fmt: skip
    """Play `n_games` games between two players. The first begins in every second game.

    observe: called after each move with the number of games that have ended.

    Raises:
        ConfigError: a player chose an illegal move.
    """
    generator, number = torch.Generator().manual_seed(seed), torch.arange(n_games)
    states, points, running = game.initial(n_games), torch.full((n_games,), 0.5), number >= 0
    moves: list[list[int]] = [[] for _ in range(n_games)]
    opening = random_player(game)
    ply = 0
    while running.any():
        action = torch.zeros(n_games, dtype=torch.int64)
        if ply < OPENING_MOVES:
            action = opening(states[::2], generator).repeat_interleave(2)[:n_games]
        else:
            for side, player in enumerate(players):
                if len(turn := (running & ((number + ply) % 2 == side)).nonzero()[:, 0]):
                    action[turn] = player(states[turn], generator)
        left = running.nonzero()[:, 0]
        game.check(states[left], action[left])
        states[left], reward, ended = game.play(states[left], action[left])
        first = ((left + ply) % 2 == 0).float()
        points[left] = torch.where(reward > 0, first, points[left])
        for i, move in zip(left.tolist(), action[left].tolist(), strict=True):
            moves[i].append(move)
        running[left] = ~ended
        observe(n_games - int(running.sum()))
        ply += 1
    return Match(points, moves)
