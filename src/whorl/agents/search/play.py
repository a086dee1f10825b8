"""A trained agent as an opponent: its search of a position, as the terminal, the page and the report show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whorl.agents.methods.method import MethodConfig
from whorl.agents.search.alphazero import AlphaZero
from whorl.agents.search.game import GAMES
from whorl.agents.search.match import Player
from whorl.agents.task import open_method
from whorl.errors import ConfigError


@dataclass(frozen=True)
class TrainedPlayer:
    """An agent of a game. simulations: of a search."""

    name: str
    method: AlphaZero
    networks: Any
    simulations: int

    @classmethod
    def open(
        cls, name: str, config: MethodConfig, networks: Any, simulations: int | None = None
    ) -> TrainedPlayer:
        """Return an agent; by default with the simulations of its training. Raises ConfigError: it plays no game."""
        method, _ = open_method(config)
        if not isinstance(method, AlphaZero):
            what = f"{name} is an agent of {config.environment}, which is no game"
            raise ConfigError(
                what, expected=f"an agent of {' or '.join(GAMES)}", do="whorl rl train alphazero connect4"
            )
        return cls(name, method, networks, simulations or method.config.simulations)

    @property
    def player(self) -> Player:
        """The agent in a match."""
        return self.method.player(self.networks, self.simulations)

    def position(self, moves: Sequence[int], search: bool = True) -> dict[str, Any]:
        """Return the position after actions from the start.

        board: [rows][columns] "X" (who began), "O" or "". turn: who moves. legal: [A]. ended. winner: "X", "O" or "".
        search: None, or of a game that has not ended its move, value for the player to move, visits and prior [A].

        Raises:
            ConfigError: an action is illegal.
        """
        game, signs = self.method.game, ["", "X", "O"] if len(moves) % 2 == 0 else ["", "O", "X"]
        state = game.position(moves)
        legal, board = game.legal(state)[0].tolist(), state.view(game.shape).tolist()
        found: dict[str, Any] = {
            "board": [[signs[cell] for cell in row] for row in board], "turn": signs[1], "legal": legal,
            "ended": not any(legal), "winner": signs[2] if game.lost(state) else "", "search": None,
        }  # fmt: skip
        if search and any(legal):
            given = self.networks, state, self.simulations, torch.Generator().manual_seed(len(moves))
            visits, value, tree = self.method.search(*given)
            found["search"] = {
                "move": int(tree.action), "value": float(value), "visits": visits[0].int().tolist(),
                "prior": tree.prior(tree.roots)[:, 0].tolist(),
            }  # fmt: skip
        return found
