"""Rules of games, their environments, and random playouts."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from whorl.agents import make_env
from whorl.agents.search.game import CONNECT4, GAMES, TICTACTOE, Game, playout
from whorl.errors import ConfigError


def reachable(game: Game) -> list[int]:
    """Numbers of distinct positions after each move, of games that may have ended."""
    states, counts = game.initial(1), [1]
    while True:
        parent, action = game.legal(states).nonzero().unbind(1)
        if not len(parent):
            return counts
        states = game.play(states[parent], action)[0].unique(dim=0)
        counts.append(len(states))


def test_tic_tac_toe_has_the_known_numbers_of_positions() -> None:
    assert reachable(TICTACTOE) == [1, 9, 72, 252, 756, 1260, 1520, 1140, 390, 78]


def test_connect_four_has_the_known_numbers_of_positions() -> None:
    """Of OEIS A212693, after 0 to 5 moves."""
    states, counts = CONNECT4.initial(1), []
    for _ in range(6):
        counts.append(len(states))
        parent, action = CONNECT4.legal(states).nonzero().unbind(1)
        states = CONNECT4.play(states[parent], action)[0].unique(dim=0)
    assert counts == [1, 7, 49, 238, 1120, 4263]


@pytest.mark.parametrize(
    "moves", [[0, 1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 2, 2, 3], [0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3]]
)
def test_four_in_a_row_end_the_game(moves: list[int]) -> None:
    before = CONNECT4.position(moves[:-1])
    _, reward, ended = CONNECT4.play(before, torch.tensor(moves[-1:]))
    assert reward.tolist() == [1] and ended.all()
    assert not CONNECT4.legal(CONNECT4.position(moves)).any()
    *_, drawn, full = CONNECT4.play(before, torch.tensor([5]))
    assert drawn.tolist() == [0] and not full.any()


@cache
def random_result(game: Game, cells: tuple[int, ...]) -> tuple[float, float]:
    """Exact probabilities that the player to move wins and loses if all moves are uniform."""
    state = torch.tensor([cells], dtype=torch.int8)
    actions = game.legal(state)[0].nonzero()[:, 0]
    if not len(actions):
        return 0.0, float(game.lost(state))
    after, reward, ended = game.play(state.expand(len(actions), -1), actions)
    results = [
        (float(won), 0.0) if over else random_result(game, tuple(s.tolist()))[::-1]
        for s, won, over in zip(after, reward, ended, strict=True)
    ]
    wins, losses = torch.tensor(results).mean(0).tolist()
    return wins, losses


@pytest.mark.parametrize(
    ("game", "moves"),
    [(TICTACTOE, [4, 0, 1]), (CONNECT4, [*[0, 1] * 2, *[1, 0] * 3, *[2, 3] * 2, *[3, 2] * 3, 4, 4, 4, 5, 4, 5, 6, 4, 5, 4])],
)  # fmt: skip
def test_playouts_have_the_distribution_of_uniform_moves(game: Game, moves: list[int]) -> None:
    state = game.position(moves)
    wins, losses = random_result(game, tuple(state[0].tolist()))
    found = playout(game, state.expand(40_000, -1), torch.Generator().manual_seed(0))
    assert min(wins, losses) > 0.02
    assert float((found == 1).float().mean()) == pytest.approx(wins, abs=0.01)
    assert float((found == -1).float().mean()) == pytest.approx(losses, abs=0.01)


def test_environment_alternates_players_and_begins_again() -> None:
    env = make_env("connect4", 2)
    assert env.spaces.players == 2 and env.spaces.n_actions == 7
    assert not env.reset(0).any()
    for move in [0, 1, 0, 1, 0, 1]:
        found = env.step(torch.tensor([move, 3]))
        assert not found.terminated.any()
    assert env.tables() is None and found.observation.dtype == torch.float32
    found = env.step(torch.tensor([0, 2]))
    assert found.reward.tolist() == [1, 0] and found.terminated.tolist() == [True, False]
    assert not found.observation[0].any() and found.final_observation[0].sum() == -1
    assert found.observation[1].view(6, 7)[:, 3].tolist() == [1, -1, 1, -1, 1, -1]
    assert found.observation[1].view(6, 7)[5, 2] == -1  # the stone just set is the opponent's


def test_illegal_moves_are_refused_with_the_legal_ones() -> None:
    full = [3] * 6
    with pytest.raises(
        ConfigError, match=r"(?s)the move 4 is illegal in.*expected: one of: 1, 2, 3, 5, 6, 7"
    ) as error:
        CONNECT4.check(CONNECT4.position(full), torch.tensor([3]))
    assert ". . . O . . ." in str(error.value)
    env = make_env("tictactoe", 1)
    env.reset(0)
    env.step(torch.tensor([4]))
    with pytest.raises(ConfigError, match="the move 5 is illegal"):
        env.step(torch.tensor([4]))
    with pytest.raises(ConfigError, match="this one has ended"):
        CONNECT4.check(CONNECT4.position([0, 1] * 3 + [0]), torch.tensor([3]))
    with pytest.raises(ConfigError, match="a column, from 1 to 7"):
        CONNECT4.parse("8")
    assert [game.parse(" 3\n") for game in GAMES.values()] == [2, 2]
