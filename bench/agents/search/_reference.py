"""Tree search as it is usually written: one game, one node at a time, nodes as objects, rules on integers.

The bench compares its speed with `whorl.agents.search.tree`, and a test compares visit counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from whorl.agents.search.game import Game
from whorl.agents.search.tree import halving_visits

Board = tuple[int, int]  # own stones and the other's, as bits of cells
# a board, in the form of the rules -> prior logits, value for the player to move
Evaluate = Callable[[Any], tuple[Sequence[float], float]]


class Rules:
    """A game on integers: bit i is cell i."""

    def __init__(self, game: Game) -> None:
        self.columns, self.cells, self.gravity = game.shape[1], game.n_cells, game.gravity
        self.n_actions, self.full = game.n_actions, (1 << game.n_cells) - 1
        lines = [sum(1 << cell for cell in line) for line in game.lines.tolist()]
        self.lines = [[line for line in lines if line >> cell & 1] for cell in range(self.cells)]

    def legal(self, board: Board) -> list[int]:
        taken = board[0] | board[1]
        return [action for action in range(self.n_actions) if not taken >> action & 1]

    def play(self, board: Board, action: int) -> tuple[Board, bool, bool]:
        """Return the board as the opponent sees it, whether the mover has won, and whether the game has ended."""
        own, other = board
        cell = action
        if self.gravity:
            taken, cell = own | other, action + self.cells - self.columns
            while taken >> cell & 1:
                cell -= self.columns
        own |= 1 << cell
        won = any(own & line == line for line in self.lines[cell])
        return (other, own), won, won or own | other == self.full

    def playout(self, board: Board, rng: random.Random) -> float:
        sign = 1.0
        while True:
            board, won, ended = self.play(board, rng.choice(self.legal(board)))
            if ended:
                return sign if won else 0.0
            sign = -sign


class Node:
    """A position with the statistics of its actions."""

    __slots__ = ("board", "children", "legal", "prior", "total", "value", "visits")

    def __init__(self, rules: Any, board: Any, evaluate: Evaluate, rule: str) -> None:
        self.board, self.legal = board, rules.legal(board)
        self.prior, self.value = evaluate(board)
        if rule == "puct":
            self.prior = softmax(self.prior, self.legal)
        self.visits, self.total = [0] * rules.n_actions, [0.0] * rules.n_actions
        self.children: dict[int, Node] = {}


def softmax(logits: Sequence[float], legal: Sequence[int]) -> list[float]:
    most = max(logits[a] for a in legal)
    powers = [0.0] * len(logits)
    for a in legal:
        powers[a] = math.exp(logits[a] - most)
    scale = 1 / sum(powers)
    return [power * scale for power in powers]


def improved(node: Node, c: float) -> list[float]:
    """logits + sigma(q) of Gumbel AlphaZero."""
    prior, n = softmax(node.prior, node.legal), sum(node.visits)
    seen = [a for a in node.legal if node.visits[a]]
    mixed = node.value
    if seen:
        weighted = sum(prior[a] * node.total[a] / node.visits[a] for a in seen) / sum(prior[a] for a in seen)
        mixed = (node.value + n * weighted) / (n + 1)
    q = [total / visits if visits else mixed for total, visits in zip(node.total, node.visits, strict=True)]
    return [p + (50 + max(node.visits)) * c * (x + 1) / 2 for p, x in zip(node.prior, q, strict=True)]


def choose(node: Node, rule: str, c: float) -> int:
    visits, total, prior, n = node.visits, node.total, node.prior, sum(node.visits)
    if rule == "gumbel":
        policy = softmax(improved(node, c), node.legal)
        return max(node.legal, key=lambda a: policy[a] - visits[a] / (n + 1))
    if rule == "puct":
        mean, scale = (node.value + sum(total)) / (n + 1), c * math.sqrt(n + 1)
        return max(
            node.legal,
            key=lambda a: (total[a] / visits[a] if visits[a] else mean) + scale * prior[a] / (visits[a] + 1),
        )
    fresh = [a for a in node.legal if not visits[a]]
    if fresh:
        return max(fresh, key=lambda a: prior[a])
    scale = c * math.sqrt(math.log(n))
    return max(node.legal, key=lambda a: total[a] / visits[a] + scale / math.sqrt(visits[a]))


def search(
    rules: Any, board: Any, evaluate: Evaluate, simulations: int, rule: str, c: float,
    noise: Sequence[float] = (),
) -> Node:  # fmt: skip
    """Return the root after a search."""
    root = Node(rules, board, evaluate, rule)
    wanted = halving_visits(len(root.legal), simulations)
    for simulation in range(simulations):
        node, path = root, []
        while True:
            if rule == "gumbel" and node is root:
                rank = improved(root, c)
                those = [a for a in root.legal if root.visits[a] == wanted[simulation]]
                action = max(those, key=lambda a: rank[a] + (noise[a] if noise else 0.0))
            else:
                action = choose(node, rule, c)
            path.append((node, action))
            if action not in node.children:
                break
            node = node.children[action]
        after, won, ended = rules.play(node.board, action)
        if ended:
            result = float(won)
        else:
            child = node.children[action] = Node(rules, after, evaluate, rule)
            result = -child.value
        for node, action in reversed(path):
            node.visits[action] += 1
            node.total[action] += result
            result = -result
    return root
