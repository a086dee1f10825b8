"""Tic-tac-toe: with 25 simulations a trained agent moves into a lost position from none that is not lost.

    python bench/agents/search/tictactoe.py            # five seeds

All positions that legal moves reach are enumerated and solved by backward induction. The agent searches each position that
is not lost, without noise; a failure is a move after which the opponent can force a win. Seeds are whole training runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench._run import claim, parse

from whorl.agents.methods.registration import make_config
from whorl.agents.search.game import TICTACTOE, Game
from whorl.agents.task import open_method, train

SIMULATIONS = 25
IMPOSSIBLE = -9.0


def solve(game: Game) -> tuple[Tensor, Tensor]:
    """All positions [N, cells] that have a move, and the result of each action for the player to move [N, A]."""
    layers, states = [], game.initial(1)
    while len(pairs := game.legal(states).nonzero()):
        position, action = pairs.unbind(1)
        following, reward, ended = game.play(states[position], action)
        unique, place = following.unique(dim=0, return_inverse=True)
        layers.append((states, position, action, reward, ended, place))
        states = unique
    positions, results, values = [], [], -game.lost(states).float()
    for states, position, action, reward, ended, place in reversed(layers):
        result = torch.full((len(states), game.n_actions), IMPOSSIBLE)
        result[position, action] = torch.where(ended, reward, -values[place])
        open_ = game.legal(states).any(1)
        values = torch.where(open_, result.amax(1), -game.lost(states).float())
        positions.append(states[open_])
        results.append(result[open_])
    return torch.cat(positions), torch.cat(results)


def failures(seed: int, steps: int | None, states: Tensor, results: Tensor) -> int:
    """Train one agent; the positions in which it moves from a result of at least 0 to a loss."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"steps": steps} if steps else {}
    config = make_config("alphazero", "tictactoe", seed=seed, **changes)
    networks = train(config)
    method: Any = open_method(config)[0]
    found = method.search(networks, states, SIMULATIONS, torch.Generator().manual_seed(0))
    chosen = results.gather(1, found.tree.action[:, None])[:, 0]
    return int((chosen < 0).sum())


def main() -> None:
    args = parse(
        __doc__,
        lambda p: (p.add_argument("--seeds", type=int, default=5), p.add_argument("--steps", type=int)),
        smoke={"seeds": 1, "steps": 1000},
    )
    states, results = solve(TICTACTOE)
    open_ = results.amax(1) >= 0
    states, results = states[open_], results[open_]
    counts = []
    for seed in range(args.seeds):
        counts.append(failures(seed, args.steps, states, results))
        print(f"seed {seed}: {counts[-1]} of {len(states)} positions", flush=True)
    claim(
        f"tic-tac-toe, {SIMULATIONS} simulations: losing moves in {len(states)} positions that are not lost, worst seed",
        ours=float(max(counts)), peer=0.0, peer_name="bar", unit="positions", ratio=float(max(counts)), bar=0.0,
        ok=max(counts) == 0, samples=counts,
    )  # fmt: skip


if __name__ == "__main__":
    main()
