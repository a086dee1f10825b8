"""Searches of many games at once against a search of one game, one node at a time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.agents.search._reference import Board, Rules
from bench.agents.search._reference import search as reference_search
from torch import Tensor

from whorl.agents.search import tree as tree_module
from whorl.agents.search.game import CONNECT4, TICTACTOE, Game, playout
from whorl.agents.search.tree import RULES, Tree, halving_visits, search
from whorl.errors import ConfigError


def hash_weights(game: Game) -> Tensor:
    return torch.randint(1, 1 << 20, (game.n_cells,), generator=torch.Generator().manual_seed(1))


def hashed(game: Game) -> Any:
    """An evaluation with exact sums: logits and values of a position are multiples of 1/32."""
    weights = hash_weights(game)

    def evaluate(states: Tensor) -> tuple[Tensor, Tensor]:
        mixed = ((states.long() + 1) * weights).sum(1, keepdim=True)
        logits = (mixed * torch.arange(1, game.n_actions + 1)) % 61 / 32
        return logits, mixed[:, 0] % 63 / 32 - 31 / 32

    return evaluate


def positions(game: Game, n: int, plies: int) -> Tensor:
    """Positions after random moves, without games that have ended."""
    states, generator = game.initial(64 * n), torch.Generator().manual_seed(0)
    for _ in range(plies):
        action = torch.multinomial(game.legal(states).float(), 1, generator=generator)[:, 0]
        states = game.play(states, action)[0]
        states = states[game.legal(states).any(1)]
    return states[:n]


def board(state: Tensor) -> Board:
    own, other = (sum(1 << i for i, s in enumerate(state.tolist()) if s == side) for side in (1, -1))
    return own, other


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("game", "plies"), [(CONNECT4, 9), (CONNECT4, 30), (TICTACTOE, 4)])
def test_visits_equal_a_search_of_one_node_at_a_time(game: Game, plies: int, rule: str) -> None:
    states, rules, weights = positions(game, 4, plies), Rules(game), hash_weights(game).tolist()
    noise = torch.rand(len(states), game.n_actions, generator=torch.Generator().manual_seed(2))
    given: dict[str, Any] = {"noise": noise} if rule == "gumbel" else {}
    visits, values, tree = search(game, states, hashed(game), simulations=100, rule=rule, **given)
    for i, state in enumerate(states):

        def evaluate_one(one: Board) -> tuple[list[float], float]:
            mixed = sum((1 + (one[0] >> i & 1) - (one[1] >> i & 1)) * w for i, w in enumerate(weights))
            return [mixed * a % 61 / 32 for a in range(1, game.n_actions + 1)], mixed % 63 / 32 - 31 / 32

        given = {"noise": noise[i].tolist()} if rule == "gumbel" else {}
        root = reference_search(rules, board(state), evaluate_one, 100, rule, RULES[rule][1], **given)
        assert visits[i].tolist() == root.visits
        assert float(values[i]) == pytest.approx((root.value + sum(root.total)) / 101, abs=1e-5)
        for action, child in root.children.items():
            row = tree.children[action][tree.roots[i]]
            assert tree.edges(row[None]).visits[:, 0].tolist() == child.visits


def random_games(game: Game) -> Any:
    generator = torch.Generator().manual_seed(0)

    def evaluate(states: Tensor) -> tuple[Tensor, Tensor]:
        results = playout(game, states.repeat(16, 1), generator).view(16, -1)
        return torch.zeros(len(states), game.n_actions), results.mean(0)

    return evaluate


@pytest.mark.parametrize("rule", RULES)
def test_search_wins_and_blocks(rule: str) -> None:
    """X has three in column 4: X to move wins there, and O to move must block."""
    states = torch.cat([CONNECT4.position(moves) for moves in ([3, 0, 3, 0, 3, 1], [3, 0, 3, 6, 3])])
    visits, values, tree = search(CONNECT4, states, random_games(CONNECT4), simulations=200, rule=rule)
    assert tree.action.tolist() == [3, 3] and (visits.sum(1) == 200).all()
    assert tree.variation(int(tree.roots[0])) == [3] and tree.variation(int(tree.roots[1]))[0] == 3
    assert values[0] > 0.5 and torch.allclose(tree.policy.sum(1), torch.ones(2))


def test_time_budget_grows_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(tree_module, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    given = {"rule": "puct", "c": 2.0}
    visits, _, tree = search(CONNECT4, CONNECT4.initial(2), hashed(CONNECT4), seconds=100, **given)
    assert (visits.sum(1) == 100).all() and tree.n_nodes == 102  # the first arrays hold 64
    same, _, _ = search(CONNECT4, CONNECT4.initial(2), hashed(CONNECT4), simulations=100, **given)
    assert visits.equal(same)


def test_noise_changes_the_prior_of_roots_alone() -> None:
    states, noise = CONNECT4.initial(1), torch.eye(7)[6:]
    _, _, tree = search(CONNECT4, states, random_games(CONNECT4), simulations=3, rule="puct", noise=noise)
    prior = tree.edges(tree.roots).prior[:, 0]
    assert prior.tolist() == pytest.approx([*[0.75 / 7] * 6, 0.75 / 7 + 0.25])
    assert tree.edges(tree.roots + 1).prior[:, 0].tolist() == pytest.approx([1 / 7] * 7)
    _, _, tree = search(
        CONNECT4, states, random_games(CONNECT4), simulations=1, rule="gumbel", noise=9 * noise
    )
    assert tree.action.tolist() == [6]


def test_sequential_halving_spends_the_budget_on_the_best() -> None:
    assert halving_visits(4, 16) == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2 + [4] * 2 + [5] * 2
    assert halving_visits(1, 3) == [0, 1, 2]
    assert all(len(halving_visits(k, n)) == n for k in range(1, 9) for n in (1, 2, 7, 50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulations": 0}, "simulations=0 and seconds=None.*one budget above 0.*simulations=100"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({}, "simulations=None"),
        ({"simulations": 1, "rule": "ucb"}, "'ucb'.*uct, puct, gumbel"),
        (
            {"simulations": 1, "states": CONNECT4.position([0, 1] * 3 + [0])},
            "position 0 has no legal moves:\n.*X",
        ),
    ],
)
def test_impossible_searches_are_refused(changes: dict[str, Any], message: str) -> None:
    states = changes.pop("states", CONNECT4.initial(1))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        search(CONNECT4, states, hashed(CONNECT4), **changes)


def test_tree_allocates_once_for_planned_simulations() -> None:
    _, _, tree = search(TICTACTOE, TICTACTOE.initial(3), hashed(TICTACTOE), simulations=20)
    assert isinstance(tree, Tree) and len(tree.states) == 3 * tree.n_nodes == 3 * 22
