"""Matches: points, colours, openings, seeds, and players that cheat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whorl.agents.search.game import CONNECT4, TICTACTOE
from whorl.agents.search.match import OPENING_MOVES, Match, play_match, random_player, uct_player
from whorl.errors import ConfigError


def first_legal(states: Tensor, generator: torch.Generator) -> Tensor:
    return TICTACTOE.legal(states).int().argmax(1)


def test_uct_beats_a_random_player_from_both_sides() -> None:
    strong, weak = uct_player(CONNECT4, 25), random_player(CONNECT4)
    found = play_match(CONNECT4, (strong, weak), 20, seed=0)
    assert found.interval.mean > 0.8 and found.interval.low > 0.6
    assert play_match(CONNECT4, (weak, strong), 20, seed=0).interval.mean < 0.2


def test_openings_are_played_twice_with_sides_changed() -> None:
    found = play_match(TICTACTOE, (first_legal, first_legal), 20, seed=1)
    # One player against itself: both games of an opening are equal, and its points are the opposite.
    for even, odd in zip(found.moves[::2], found.moves[1::2], strict=True):
        assert even == odd
    assert torch.equal(found.points[::2], 1 - found.points[1::2])
    assert len({tuple(moves[:OPENING_MOVES]) for moves in found.moves}) > 5


def test_moves_of_a_match_lead_to_its_points() -> None:
    found = play_match(TICTACTOE, [random_player(TICTACTOE)] * 2, 30, seed=2)
    for number, moves in enumerate(found.moves):
        state = TICTACTOE.position(moves)
        assert not TICTACTOE.legal(state).any()
        last_is_first = (number + len(moves) - 1) % 2 == 0
        wanted = 0.5 if not TICTACTOE.lost(state) else float(last_is_first)
        assert float(found.points[number]) == wanted
    again = play_match(TICTACTOE, [random_player(TICTACTOE)] * 2, 30, seed=2)
    assert again.moves == found.moves
    assert play_match(TICTACTOE, [random_player(TICTACTOE)] * 2, 30, seed=3).moves != found.moves


def test_illegal_move_of_a_player_is_refused() -> None:
    with pytest.raises(ConfigError, match="tictactoe: the move 1 is illegal"):
        play_match(
            TICTACTOE, [lambda states, generator: torch.zeros(len(states), dtype=torch.int64)] * 2, 4, 0
        )


def test_match_prints_points_and_interval() -> None:
    text = str(Match(torch.tensor([1.0, 1.0, 0.5, 0.0]), [[]] * 4))
    assert text.startswith("62.5 % of the points (") and text.endswith("2 won, 1 drawn, 1 lost")
