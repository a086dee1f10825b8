"""Monte Carlo tree search of many positions at once, by UCT, PUCT or Gumbel: trees are arrays, and a simulation adds a
node to each of them.

Node k of tree g is row k N + g. Row 0 is a node that means "none": its edges lead to itself. The edge of an action is
action * rows + row. The subtle part is selection. The score of an action changes only if a simulation passes its node. The
best edge of each node is therefore kept, and after a simulation the nodes of all paths are scored again, in one
operation. A step down the tree is two look-ups.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from whorl.agents.search.game import Game
from whorl.errors import ConfigError, one_of

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
FIRST = 1000.0  # score of actions without visits in UCT
GUMBEL_VISITS = 50.0  # c_visit of Danihelka et al. 2022
FIRST_NODES = 64  # of a tree whose budget is a time
NOISE_WEIGHT = 0.25  # of Dirichlet noise in the prior of a root (Silver et al. 2018)


class Edges(NamedTuple):
    """Statistics of the actions of K nodes. Actions come first, so that reductions over them are vectorised.

    visits, total: [A, K] simulations through each action, and the sum of their results for the player to move.
    prior: [A, K] probabilities for puct, else logits; -inf for illegal actions. value: [K] of the node, as evaluated.
    """

    visits: Tensor
    total: Tensor
    prior: Tensor
    value: Tensor

    @property
    def means(self) -> Tensor:
        """[A, K] mean result of each action; 0 without visits."""
        return self.total / self.visits.clamp(min=1)

    @property
    def node_value(self) -> Tensor:
        """[K] mean result of all simulations through a node, its own evaluation included."""
        return (self.value + self.total.sum(0)) / (self.visits.sum(0) + 1)


def uct(edges: Edges, c: float) -> Tensor:
    """Return Q + c sqrt(ln N / n); actions without visits first, in the order of their logits.

    Source: Kocsis & Szepesvari 2006, with the constant 2 C_p = c.
    """
    bonus = c * (edges.visits.sum(0).clamp(min=1).log() / edges.visits.clamp(min=1)).sqrt()
    return torch.where(edges.visits > 0, edges.means + bonus, FIRST + edges.prior)


def puct(edges: Edges, c: float) -> Tensor:
    """Return Q + c P sqrt(N) / (1 + n), where N counts the node's own evaluation.

    Q of an action without visits is the mean result of its node. Source: Silver et al. 2018 (AlphaZero).
    """
    bonus = edges.prior * (c * (edges.visits.sum(0) + 1).sqrt()) / (edges.visits + 1)
    return torch.where(edges.visits > 0, edges.means, edges.node_value) + bonus


def improved_logits(edges: Edges, c: float) -> Tensor:
    """Return logits + sigma(q) [A, K] of Danihelka et al. 2022, equations 8, 10 and 33.

    q is the mean result, scaled to [0, 1], and sigma(q) = (50 + max n) c q. An action without visits has the mixed value:
    the node's evaluation, and the mean of visited actions weighted by the prior.
    """
    visited, means, n = edges.visits > 0, edges.means, edges.visits.sum(0)
    weights = edges.prior.softmax(0) * visited
    weighted = (weights * means).sum(0) / weights.sum(0).clamp(min=1e-12)
    q = torch.where(visited, means, (edges.value + n * weighted) / (n + 1))
    return edges.prior + (GUMBEL_VISITS + edges.visits.amax(0)) * (c / 2) * (q + 1)


def gumbel(edges: Edges, c: float) -> Tensor:
    """Return pi' - n / (1 + N), so that visits follow the improved policy pi' = softmax(logits + sigma(q)).

    The rule of Gumbel AlphaZero below the root. Source: Danihelka et al. 2022, equation 14.
    """
    score = improved_logits(edges, c).softmax(0) - edges.visits / (edges.visits.sum(0) + 1)
    return score.masked_fill(edges.prior == -torch.inf, -torch.inf)


def halving_visits(n_actions: int, simulations: int) -> list[int]:
    """Return, for each simulation, how many visits an action has that sequential halving takes next.

    It visits all actions equally often, then the better half of them, and so on to the last two.
    Source: Karnin et al. 2013; Danihelka et al. 2022, figure 1. A root whose budget is a time has the rule of other nodes.
    """
    rounds = max(1, (n_actions - 1).bit_length())
    found, visits, candidates = list[int](), 0, n_actions
    while len(found) < simulations:
        for _ in range(max(1, simulations // (rounds * candidates))):
            found += [visits] * candidates
            visits += 1
        candidates = max(2, candidates // 2) if n_actions > 1 else 1
    return found[:simulations]


Rule = Callable[[Edges, float], Tensor]
RULES: dict[str, tuple[Rule, float]] = {
    "uct": (uct, 1.4),
    "puct": (puct, 1.25),
    "gumbel": (gumbel, 1.0),
}  # and c


class Found(NamedTuple):
    """The result of a search: visits [N, A] of the roots' actions, values [N] of the roots, and the trees."""

    visits: Tensor
    values: Tensor
    tree: Tree


class Tree:
    """The trees of N positions.

    states: [rows, cells]. statistics: [3, A, rows] visits, total and prior of `Edges`. value: [rows], as evaluated.
    children: [A, rows] row that an action leads to; 0: none. best: [rows] edge of the next simulation. roots: [N] rows.
    """

    def __init__(
        self, game: Game, states: Tensor, evaluate: Evaluate, rule: str, c: float | None, simulations: int | None,
        noise: Tensor | None,
    ) -> None:  # fmt: skip
        self.game, self.evaluate, self.rule, (self.score, default) = game, evaluate, rule, RULES[rule]
        self.c, self.n, self.n_nodes = default if c is None else c, len(states), 1
        rows, n_actions = self.n * (2 + (simulations or FIRST_NODES)), game.n_actions
        new = states.new_zeros
        self.games = torch.arange(self.n, device=states.device)
        self.roots = self.games + self.n
        self.states, self.value = new(rows, game.n_cells), new(rows, dtype=torch.float32)
        self.statistics = new(3, n_actions, rows, dtype=torch.float32)
        self.children, self.best = new(n_actions, rows, dtype=torch.int64), new(rows, dtype=torch.int64)
        self.noise = new(n_actions, self.n, dtype=torch.float32) if noise is None else noise.T
        prior, value = self._evaluate(states)
        if rule == "puct" and noise is not None:
            prior = (1 - NOISE_WEIGHT) * prior + NOISE_WEIGHT * self.noise
        self.halving: Tensor | None = None  # [simulations, N] see `halving_visits`
        if rule == "gumbel" and simulations:
            counts = [halving_visits(1 + k, simulations) for k in range(n_actions)]
            self.halving = torch.tensor(counts, device=states.device).T[:, (prior > -torch.inf).sum(0) - 1]
        self._add_nodes(states, prior, value)
        self._select(self.roots)

    def edges(self, rows: Tensor) -> Edges:
        """Return the statistics of the actions of nodes."""
        visits, total, prior = self.statistics.index_select(2, rows)
        return Edges(visits, total, prior, self.value.index_select(0, rows))

    def prior(self, rows: Tensor) -> Tensor:
        """Return the prior probabilities [A, K] of nodes."""
        prior = self.edges(rows).prior
        return prior.clamp(min=0) if self.rule == "puct" else prior.softmax(0)

    @property
    def policy(self) -> Tensor:
        """[N, A] the improved policy of the roots: shares of visits; of gumbel softmax(logits + sigma(q))."""
        edges = self.edges(self.roots)
        if self.rule == "gumbel":
            return improved_logits(edges, self.c).softmax(0).T
        return (edges.visits / edges.visits.sum(0)).T

    @property
    def action(self) -> Tensor:
        """[N] the action to play: the most visited; equal ones by their means, of gumbel by noise + logits + sigma(q)."""
        edges = self.edges(self.roots)
        rank = self.noise + improved_logits(edges, self.c) if self.rule == "gumbel" else edges.means
        return rank.masked_fill(edges.visits < edges.visits.amax(0), -torch.inf).max(0).indices

    def variation(self, row: int) -> list[int]:
        """Return the principal variation from a node: the most visited action, again and again."""
        found = list[int]()
        while row and (visits := self.statistics[0, :, row]).any():
            found.append(int(visits.argmax()))
            row = int(self.children[found[-1], row])
        return found

    def simulate(self) -> None:
        """Add a node to each tree: selection, expansion, evaluation and backpropagation."""
        if self.n_nodes * self.n == len(self.best):
            self._grow()
        children, node = self.children.view(-1), self.roots
        nodes, edges = list[Tensor](), list[Tensor]()
        while node.any():
            nodes.append(node)
            edges.append(self.best.index_select(0, node))
            node = children.index_select(0, edges[-1])
        path, taken = torch.stack(nodes), torch.stack(edges)  # [depth, N]
        on_path = path > 0
        last = on_path.sum(0, keepdim=True) - 1
        leaf, parent = taken.gather(0, last)[0], path.gather(0, last)[0]
        states, reward, ended = self.game.play(self.states.index_select(0, parent), leaf // len(self.best))
        prior, value = self._evaluate(states)
        added = self.games + self.n_nodes * self.n
        children.index_copy_(0, leaf, added.masked_fill(ended, 0))  # an end has no node: it is played again
        self._add_nodes(states, prior, value)
        signs = torch.tensor([1.0, -1.0], device=value.device).repeat(len(nodes))[: len(nodes)]
        result = torch.where(ended, reward, -value) * signs[last]  # [1, N] for the player at the root
        kept = on_path.view(-1).nonzero()[:, 0]
        passed = taken.view(-1).index_select(0, kept)
        visits, total, _ = self.statistics.view(3, -1)
        visits.index_add_(0, passed, visits.new_ones(len(passed)))
        total.index_add_(0, passed, (result * signs[:, None]).view(-1).index_select(0, kept))
        self._select(torch.cat((path.view(-1).index_select(0, kept), added)))

    def _evaluate(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prior [A, N] in the form of `Edges`, and the values."""
        logits, value = self.evaluate(states)
        illegal = ~self.game.legal(states, ended=False).T
        prior = logits.T.masked_fill(illegal, -torch.inf)
        return (prior.softmax(0).masked_fill(illegal, -torch.inf) if self.rule == "puct" else prior), value

    def _add_nodes(self, states: Tensor, prior: Tensor, value: Tensor) -> None:
        rows = slice(self.n_nodes * self.n, (self.n_nodes + 1) * self.n)
        self.states[rows], self.statistics[2, :, rows], self.value[rows] = states, prior, value
        self.n_nodes += 1

    def _select(self, rows: Tensor) -> None:
        """Set the best edge of nodes. The first N are the roots."""
        edges, size = self.edges(rows), len(self.best)
        self.best.index_copy_(0, rows, rows + size * self.score(edges, self.c).max(0).indices)
        if self.halving is not None and (done := self.n_nodes - 2) < len(self.halving):
            roots = Edges(*(field[..., : self.n] for field in edges))
            rank = self.noise + improved_logits(roots, self.c)
            rank = rank.masked_fill(roots.visits != self.halving[done], -torch.inf)
            self.best.index_copy_(0, self.roots, self.roots + size * rank.max(0).indices)

    def _grow(self) -> None:
        """Double the rows, which renumbers the edges."""
        size = len(self.best)
        self.best += self.best // size * size
        self.states = pad(self.states, (0, 0, 0, size))
        for name in ("best", "value", "children", "statistics"):
            setattr(self, name, pad(getattr(self, name), (0, size)))


@torch.no_grad()
def search(
    game: Game, states: Tensor, evaluate: Evaluate, *, simulations: int | None = None, seconds: float | None = None,
    rule: str = "puct", c: float | None = None, noise: Tensor | None = None,
) -> Found:  # fmt: skip
    """Search positions [N, cells] that have not ended, with a budget of simulations of each position or of seconds.

    Args:
        evaluate: maps positions [N, cells] to prior logits [N, A] and values [N] in [-1, 1] for the player to move.
        rule, c: of selection, and its constant; see `RULES`.
        noise: [N, A] of the roots: Dirichlet noise for puct, Gumbel noise for gumbel.

    Raises:
        ConfigError: an unknown rule, no budget or a budget of 0, or a position without legal moves.
    """
    if rule not in RULES:
        raise ConfigError(f"unknown rule of search {rule!r}", expected=one_of(rule, [*RULES]))
    given = [budget for budget in (simulations, seconds) if budget is not None]
    if len(given) != 1 or given[0] <= 0:
        what = f"search with simulations={simulations} and seconds={seconds}"
        raise ConfigError(what, expected="one budget above 0", do="set simulations=100")
    if len(stuck := (~game.legal(states).any(1)).nonzero()):
        where = f"position {int(stuck[0])} has no legal moves:\n{game.draw(states[stuck[0, 0]])}"
        raise ConfigError(where, expected="a game that has not ended", do="begin a new game")
    end = time.perf_counter() + (seconds or 0)
    tree = Tree(game, states, evaluate, rule, c, simulations, noise)
    tree.simulate()
    while tree.n_nodes - 2 < simulations if simulations else time.perf_counter() < end:
        tree.simulate()
    edges = tree.edges(tree.roots)
    return Found(edges.visits.T, edges.node_value, tree)
