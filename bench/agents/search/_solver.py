"""Exact values of late Connect 4 positions: alpha-beta search on bits, with a table of positions.

Bits are those of Tromp and Pons: 7 for each column, the highest of them always empty. A window of one value decides
between two of win, draw and loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.agents.search.game import CONNECT4

BOTTOM = sum(1 << 7 * column for column in range(7))
BOARD = BOTTOM * 63
COLUMNS = [63 << 7 * column for column in (3, 2, 4, 1, 5, 0, 6)]  # the centre first


def wins(stones: int) -> bool:
    """Whether there are four in a row."""
    for step in (1, 6, 7, 8):
        pairs = stones & stones >> step
        if pairs & pairs >> 2 * step:
            return True
    return False


class Solver:
    """value(own, taken): 1, 0 or -1 with the best play of both, for the player to move, whose stones are `own`."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], int] = {}
        self.nodes = 0

    def value(self, own: int, taken: int) -> int:
        if taken == BOARD:
            return 0
        key = (own, taken)
        if key in self.known:
            return self.known[key]
        self.nodes += 1
        moves = [(taken + BOTTOM) & column for column in COLUMNS]
        moves = [move & -move for move in moves if move & BOARD]
        best = 1 if any(wins(own | move) for move in moves) else -1
        if best < 1:
            other = own ^ taken
            threats = [move for move in moves if wins(other | move)]
            for move in threats or moves:  # a threat of the opponent's must be blocked
                best = max(best, -self.value(other, taken | move))
                if best == 1:
                    break
        self.known[key] = best
        return best

    def action_values(self, state: Tensor) -> list[int | None]:
        """Return the value of each column of a position [cells]; None where it is full."""
        own, taken = bits(state)
        found: list[int | None] = []
        for column in range(7):
            move = (taken + (1 << 7 * column)) & 63 << 7 * column
            if not move:
                found.append(None)
            else:
                found.append(1 if wins(own | move) else -self.value(own ^ taken, taken | move))
        return found


def bits(state: Tensor) -> tuple[int, int]:
    """Return the own stones and all stones of a position [cells]."""
    own = taken = 0
    for cell, stone in enumerate(state.tolist()):
        bit = 1 << 7 * (cell % 7) + 5 - cell // 7
        taken |= bit * (stone != 0)
        own |= bit * (stone == 1)
    return own, taken


def late_positions(n: int, seed: int, stones: tuple[int, int] = (26, 34)) -> tuple[Tensor, Tensor]:
    """Return n positions [n, cells] of random games, and [n, 7] bool which moves keep their exact value.

    Positions have a number of stones in a range, and a legal move that loses value.
    """
    generator, solver = torch.Generator().manual_seed(seed), Solver()
    states, optimal = list[Tensor](), list[Tensor]()
    while len(states) < n:
        state = CONNECT4.initial(256)
        wanted = int(torch.randint(*stones, (1,), generator=generator))
        for _ in range(wanted):
            state = state[CONNECT4.legal(state).any(1)]
            action = torch.multinomial(CONNECT4.legal(state).float(), 1, generator=generator)[:, 0]
            state = CONNECT4.play(state, action)[0]
        for position in state[CONNECT4.legal(state).any(1)][:8]:
            values = solver.action_values(position)
            best = max(value for value in values if value is not None)
            if any(value is not None and value < best for value in values):
                states.append(position)
                optimal.append(torch.tensor([value == best for value in values]))
    return torch.stack(states[:n]), torch.stack(optimal[:n])
