"""AlphaZero: targets against their definitions, mirrored positions, expert iteration, and learning tic-tac-toe."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from whorl.agents.methods.registration import make_config, make_method, parse_config
from whorl.agents.search.alphazero import AlphaZero
from whorl.agents.search.game import TICTACTOE, TicTacToe
from whorl.agents.task import AgentTask, open_method, train
from whorl.errors import ConfigError

# X wins in the middle column against O in the left one, with cells in the order of reading.
X_WINS = (4, 0, 1, 3, 7)


def open_small(**changes: Any) -> tuple[AlphaZero, Any]:
    method, networks = open_method(make_config("alphazero", "tictactoe", hidden=(8,), **changes))
    assert isinstance(method, AlphaZero)
    return method, networks


def rollout_of(games: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A rollout of one copy in which these moves are played, with the search's policy on the move and its value 0.25."""
    envs = TicTacToe(1)
    observations, steps = [envs.reset(0)], []
    for move in games:
        steps.append(envs.step(torch.tensor([move])))
        observations.append(steps[-1].observation)
    fields = {
        name: torch.stack([getattr(s, name) for s in steps]) for name in ("reward", "terminated", "truncated")
    }
    output = torch.zeros(len(games), 1, 10)
    output[torch.arange(len(games)), 0, torch.tensor(games)] = 1
    output[..., 9] = 0.25
    return {
        **fields, "observation": torch.stack(observations),
        "final_observation": torch.stack([s.final_observation for s in steps]),
        "action": torch.tensor(games)[:, None], "cost": torch.zeros(len(games), 1), "output": output,
    }  # fmt: skip


def drawn(method: AlphaZero, moves: tuple[int, ...]) -> dict[int, dict[str, torch.Tensor]]:
    """Number of stones -> a row that the replay draws after a rollout of these moves."""
    method.make_store(1)
    method.store.add(rollout_of(moves))
    config = method.config
    part = method.store.draw(200, np.random.default_rng(0), discount=config.discount, n_steps=config.n_step)
    stones = (part["observation"] != 0).sum(1).tolist()
    return {n: {k: v[i] for k, v in part.items()} for i, n in enumerate(stones)}


def test_returns_alternate_between_the_players() -> None:
    rows = drawn(open_small()[0], X_WINS)
    assert {n: float(row["reward"]) for n, row in rows.items()} == {0: 1, 1: -1, 2: 1, 3: -1, 4: 1}
    assert all(float(row["next_discount"]) == 0 for row in rows.values())


def test_a_game_that_goes_on_has_the_newest_value_as_target() -> None:
    rows = drawn(open_small()[0], X_WINS[:3])
    assert {n: float(row["next_discount"]) for n, row in rows.items()} == {0: -1, 1: 1, 2: -1}
    assert all(int((row["next_observation"] != 0).sum()) == 3 for row in rows.values())


@pytest.mark.parametrize("moves", [X_WINS, X_WINS[:3]], ids=["ended", "open"])
def test_loss_equals_its_definition_on_mirrored_positions(moves: tuple[int, ...]) -> None:
    method, networks = open_small(search_value=0.5)
    for parameter in networks.parameters():  # the last layers begin close to 0
        torch.nn.init.normal_(parameter, 0, 0.3)
    rows = [*drawn(method, moves).values()][:2]
    part = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = method.loss(networks, part)
    wanted = 0.0
    for i, row in enumerate(rows):
        state, policy = row["observation"], row["output"][:9]
        later = networks(row["next_observation"][None])[1][0]
        target = (row["reward"] + row["next_discount"] * later + row["output"][9]) / 2
        if i == 0:  # the first half of a minibatch is mirrored
            state, policy = (t.view(3, 3).flip(1).flatten() for t in (state, policy))
        logits, value = networks(state[None])
        loss = -(policy[state == 0] * logits[0][state == 0].log_softmax(0)).sum() + (value[0] - target) ** 2
        wanted += loss.item()
    assert found.total.item() == pytest.approx(wanted, rel=1e-5) and int(found.count) == 2


def test_expert_iteration_takes_values_from_playouts_alone() -> None:
    states = TICTACTOE.position((4, 0, 1))  # X wins at 7 unless O takes it
    for evaluation, differs in (("network", True), ("rollout", False)):
        method, networks = open_small(evaluation=evaluation)
        visits = []
        for bias in (0.0, 3.0):
            torch.nn.init.constant_(networks.value[-1].bias, bias)
            found = method.search(networks, states, 64, torch.Generator().manual_seed(0))
            visits.append(found.values)
        assert bool((visits[0] != visits[1]).any()) is differs


@cache
def solved(cells: tuple[int, ...]) -> int:
    """The value of a position for the player to move, by the whole tree."""
    state = torch.tensor([cells], dtype=torch.int8)
    moves = TICTACTOE.legal(state)[0].nonzero()[:, 0]
    if not len(moves):
        return -int(TICTACTOE.lost(state))
    nexts = TICTACTOE.play(state.expand(len(moves), -1).contiguous(), moves)[0]
    return max(-solved(tuple(row)) for row in nexts.tolist())


def reachable() -> torch.Tensor:
    """All positions with at least two legal moves."""
    states, found = TICTACTOE.initial(1), []
    for _ in range(8):
        found.append(states)
        parent, action = TICTACTOE.legal(states).nonzero().unbind(1)
        states = TICTACTOE.play(states[parent], action)[0].unique(dim=0)
    states = torch.cat(found)
    return states[TICTACTOE.legal(states).sum(1) > 1]


def test_alphazero_learns_tic_tac_toe() -> None:
    _, networks = open_small()
    states = reachable()
    legal = TICTACTOE.legal(states)
    parent, action = legal.nonzero().unbind(1)
    values = torch.full(legal.shape, -2)
    nexts = TICTACTOE.play(states[parent], action)[0]
    values[parent, action] = torch.tensor([-solved(tuple(row)) for row in nexts.tolist()])
    best = values == values.amax(1, keepdim=True)

    @torch.no_grad()
    def right(networks: Any) -> float:
        """Share of positions in which the network's likeliest move is best, without a search."""
        logits = networks(states.float())[0].masked_fill(~legal, -torch.inf)
        return float(best.gather(1, logits.argmax(1, keepdim=True)).float().mean())

    trained = train(make_config("alphazero", "tictactoe", steps=2_500, hidden=(16,)))
    assert right(networks) < 0.7 and right(trained) > 0.85


def test_games_and_methods_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ConfigError, match="ppo in tictactoe, which has 2 players"):
        AgentTask(make_config("ppo", "tictactoe"))
    with pytest.raises(ConfigError, match="alphazero in CartPole-v1, which has 1 player"):
        AgentTask(make_config("alphazero", "CartPole-v1"))
    with pytest.raises(ConfigError, match="simulations"):
        parse_config("alphazero", "connect4", {"simulations": "0"})


def test_actor_keeps_policy_and_value_of_the_search() -> None:
    method, networks = open_small(simulations=8)
    envs = TicTacToe(3)
    with torch.no_grad():
        action, output = method.act(networks, envs.reset(0), torch.tensor([0.1, 0.5, 0.9]))
    assert output.shape == (3, 10) and torch.allclose(output[:, :9].sum(1), torch.ones(3))
    assert make_method(method.config, envs.spaces).n_outputs == 10 and action.shape == (3,)
