"""Games of two players who take turns, as tensor operations over a batch of positions: rules, environments, random playouts.

A position is always seen by the player to move: own stones are 1, the other's -1, empty cells 0. One set of weights
therefore plays both sides, and the value of a position is minus that of the position before the opponent's move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from whorl.agents.environments.environment import NO_LIMIT, BatchedEnvironment, Spaces
from whorl.errors import ConfigError, one_of


@dataclass(frozen=True)
class Game:
    """A game in which `in_a_row` stones in a line win. A full board without a line is a draw.

    shape: rows and columns of the board. Cells are numbered in the order of reading.
    gravity: a stone falls to the lowest empty cell of a column, so actions are columns; otherwise they are cells.
    """

    name: str
    shape: tuple[int, int]
    in_a_row: int
    gravity: bool

    @property
    def n_cells(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def n_actions(self) -> int:
        return self.shape[1] if self.gravity else self.n_cells

    @cached_property
    def lines(self) -> Tensor:
        """[lines, in_a_row] the cells of each line."""
        cells, k = torch.arange(self.n_cells).view(self.shape), self.in_a_row
        rows, columns = cells.unfold(1, k, 1), cells.unfold(0, k, 1)
        squares = columns.unfold(1, k, 1)
        diagonals = (each.diagonal(0, 2, 3) for each in (squares, squares.flip(3)))
        return torch.cat([each.reshape(-1, k) for each in (rows, columns, *diagonals)])

    @cached_property
    def line_counts(self) -> Tensor:
        """[cells, lines] 1 where a line holds a cell: `state @ line_counts` counts the stones of every line."""
        return torch.zeros(self.n_cells, len(self.lines)).scatter_(0, self.lines.T, 1.0)

    def initial(self, n: int) -> Tensor:
        """Return n empty boards [n, cells] int8."""
        return torch.zeros(n, self.n_cells, dtype=torch.int8)

    def legal(self, state: Tensor, *, ended: bool = True) -> Tensor:
        """Return [n, actions] bool: which actions are legal; none in a position that is lost, which some may be."""
        open_actions = state[:, : self.n_actions] == 0  # of a column: its highest cell
        return open_actions & ~self.lost(state)[:, None] if ended else open_actions

    def lost(self, state: Tensor) -> Tensor:
        """Return [n] bool: the opponent of the player to move has a line."""
        counts = state.float() @ self.line_counts.to(state.device)
        return counts.amin(1) == -self.in_a_row

    def play(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Play legal actions [n] int64 in positions that have not ended.

        Returns: the positions as the opponent sees them, rewards [n] fp32 of the player who moved (1: has won, 0
            otherwise), and [n] bool whether the game has ended.
        """
        cell = action
        if self.gravity:
            rows, columns = self.shape
            column = state.view(-1, rows, columns).gather(2, action[:, None, None].expand(-1, rows, 1))
            cell = action + columns * ((column == 0).sum((1, 2)) - 1)
        next_state = state.neg().scatter_(1, cell[:, None], -1)
        won = self.lost(next_state)
        return next_state, won.float(), won | (next_state != 0).all(1)

    def check(self, state: Tensor, action: Tensor) -> None:
        """Raise ConfigError if an action [n] is not legal in its position."""
        legal = torch.zeros(
            len(state), self.n_actions + 1, dtype=torch.bool
        )  # the last: of no action's number
        legal[:, :-1] = self.legal(state)
        number = action.where((action >= 0) & (action < self.n_actions), self.n_actions)
        if len(bad := (~legal.gather(1, number[:, None])).nonzero()):
            first = int(bad[0, 0])
            move, moves = (
                str(int(action[first]) + 1),
                [str(i + 1) for i in legal[first].nonzero()[:, 0].tolist()],
            )
            raise ConfigError(
                f"{self.name}: the move {move} is illegal in\n{self.draw(state[first])}",
                expected=one_of(move, moves) if moves else "a position with a legal move",
                do="choose one of them" if moves else "start a new game: this one has ended",
            )  # fmt: skip

    def position(self, moves: Sequence[int]) -> Tensor:
        """Return the position [1, cells] after actions from the empty board. Raises ConfigError: one is illegal."""
        state = self.initial(1)
        for move in moves:
            self.check(state, torch.tensor([move]))
            state = self.play(state, torch.tensor([move]))[0]
        return state

    def draw(self, state: Tensor) -> str:
        """Return the board [cells] as lines of text: X began, O is second."""
        signs = ".XO" if int((state != 0).sum()) % 2 == 0 else ".OX"  # of 0, 1 and -1
        rows = [" ".join(signs[cell] for cell in row) for row in state.view(self.shape).tolist()]
        return "\n".join(
            [*rows, " ".join(str(1 + i) for i in range(self.shape[1]))] if self.gravity else rows
        )

    def parse(self, text: str) -> int:
        """Return the action of a move that a person writes: the number of a column or cell, from 1; else ConfigError."""
        if text.strip().isdecimal() and 1 <= int(text) <= self.n_actions:
            return int(text) - 1
        what = "column" if self.gravity else "cell, in the order of reading"
        expected = f"the number of a {what}, from 1 to {self.n_actions}"
        raise ConfigError(f"{self.name}: the move {text.strip()!r} is unknown", expected=expected)


def playout(game: Game, states: Tensor, generator: torch.Generator) -> Tensor:
    """Return results [n] (1, 0 or -1 for the player to move) of games [n, cells] continued with uniform legal moves.

    Every empty cell gets a random time at which it is filled. Without gravity the times are uniform, so their order is a
    random permutation. With gravity the cells of a column are filled from below at the times of a Poisson process. All
    processes have one rate and no memory, so that the next stone falls into each column that is not full with equal
    probability. The order of the times gives each stone its player, and the first full line of one player wins.
    """
    n, board = len(states), states.T.float()  # cells come first: lines are then rows
    empty = board == 0
    times = torch.rand(board.shape, generator=generator).to(board.device)
    if game.gravity:
        waits = times.log_().mul_(empty).view(*game.shape, n)  # negative: later cells have lower sums
        times = waits.flip(0).cumsum(0).flip(0).neg_().view(board.shape)
    order = times.masked_fill_(~empty, -1.0).T.contiguous().argsort(1)
    turn = (
        torch.arange(game.n_cells, device=board.device) - (~empty).sum(0)[:, None]
    )  # negative: stones on the board
    rank, player = (
        torch.empty_like(board.T).scatter_(1, order, x).T for x in (turn.float(), 1.0 - 2 * (turn & 1))
    )
    lines, owner = game.lines.T.flatten().to(board.device), torch.where(empty, player, board)
    stones = (x.index_select(0, lines).view(game.in_a_row, -1, n) for x in (rank.contiguous(), owner))
    full, counts = (
        next(stones).amax(0),
        next(stones).sum(0),
    )  # [lines, n] when a line is full, and whose stones it has
    first = [full.masked_fill(counts != side * game.in_a_row, game.n_cells).amin(0) for side in (1, -1)]
    return (first[1] - first[0]).sign()


TICTACTOE = Game("tictactoe", (3, 3), 3, gravity=False)
CONNECT4 = Game("connect4", (6, 7), 4, gravity=True)
GAMES = {game.name: game for game in (TICTACTOE, CONNECT4)}


class GameEnvironment(BatchedEnvironment):
    """Play a game; the observation is the position [cells]. An illegal action raises ConfigError."""

    game: ClassVar[Game]
    default_max_episode_steps = NO_LIMIT

    def initial_state(self, n: int) -> Tensor:
        return self.game.initial(n).to(self.device).T

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.game.check(state.T, action)
        next_state, reward, ended = self.game.play(state.T.contiguous(), action)
        return next_state.T, reward, ended

    def observe(self, state: Tensor) -> Tensor:
        return state.T.to(torch.float32, memory_format=torch.contiguous_format)


class TicTacToe(GameEnvironment):
    """Set stones on a board of 3 x 3; three in a row win. Both players act in turn."""

    game, spaces = TICTACTOE, Spaces((9,), n_actions=9, players=2)


class ConnectFour(GameEnvironment):
    """Drop stones into 7 columns of 6 cells; four in a row win. Both players act in turn."""

    game, spaces = CONNECT4, Spaces((42,), n_actions=7, players=2)
