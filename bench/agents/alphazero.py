"""AlphaZero on Connect 4 after 30,000 games of self-play: points against UCT, and optimal moves in late positions.

The agent searches with 100 simulations, UCT with 1,000 random playouts. Late positions come from random games with 26 to 33
stones, and an alpha-beta solver has the exact value of each move; UCT with 100 simulations is the peer there.

python bench/agents/alphazero.py                  # five seeds; about 35 minutes each on 2 quiet cores
python bench/agents/alphazero.py --seeds 1 --seed 3
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.agents.search._solver import late_positions

from whorl.agents.methods.registration import make_config
from whorl.agents.search.game import CONNECT4
from whorl.agents.search.match import Player, play_match, uct_player
from whorl.agents.search.play import TrainedPlayer
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.task import TrainingProgress, train
from whorl.train.learner.loop import StopTraining

POINTS, OPTIMAL = 0.75, 0.90
UCT_SIMULATIONS, SIMULATIONS = 1000, 100


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--seed", type=int, default=0, help="the first")
        parser.add_argument("--games", type=int, default=30_000, help="of self-play")
        parser.add_argument("--match", type=int, default=200, help="games against UCT")
        parser.add_argument("--positions", type=int, default=500)

    small = {
        "seeds": 1,
        "games": 100,
        "match": 2,
        "positions": 10,
        "changes": {"steps": 4_000, "simulations": 2, "hidden": (8,)},
    }
    args = parse(__doc__, arguments, smoke=small)
    torch.set_num_threads(1)
    states, optimal = late_positions(args.positions, seed=0)
    points, shares = list[float](), list[float]()

    def right(player: Player, seed: int) -> float:
        moves = player(states, torch.Generator().manual_seed(seed))
        return float(optimal.gather(1, moves[:, None]).float().mean())

    for seed in range(args.seed, args.seed + args.seeds):
        agent = trained(seed, args.games, getattr(args, "changes", {}))
        found = play_match(CONNECT4, (agent.player, uct_player(CONNECT4, UCT_SIMULATIONS)), args.match, seed)
        points.append(found.interval.mean)
        shares.append(right(agent.player, seed))
        print(
            f"seed {seed}: {found}; {shares[-1]:.1%} optimal moves in {len(states)} late positions",
            flush=True,
        )
    uct = right(uct_player(CONNECT4, SIMULATIONS), 0)
    for what, values, peer, bar in (
        ("points against UCT", points, 1 - float(np.mean(points)), POINTS),
        ("optimal moves in late positions", shares, uct, OPTIMAL),
    ):
        summary = summarize_seeds([values], np.random.default_rng(0))
        print(f"{what}: {summary:.3f}")
        claim(
            f"share of {what}, Connect 4 after {args.games:,} games", ours=summary.mean, peer=peer, unit="share",
            ratio=summary.mean / bar, bar=bar, ok=summary.mean >= bar, samples=values, variant=what.split()[0],
            peer_name=f"UCT with {UCT_SIMULATIONS if peer != uct else SIMULATIONS:,} simulations",
        )  # fmt: skip


def trained(seed: int, games: int, changes: dict[str, Any]) -> TrainedPlayer:
    """Train for at most `games` games of self-play, and return the agent with 100 simulations."""
    config, last = make_config("alphazero", "connect4", seed=seed, actors=1, **changes), dict[str, Any]()
    began = time.perf_counter()

    def observe(progress: TrainingProgress, networks: Any) -> None:
        last.update(games=progress.episodes, steps=progress.steps, networks=networks)
        if progress.episodes >= games:
            raise StopTraining

    train(config, observe)
    seconds = time.perf_counter() - began
    print(
        f"seed {seed}: {last['games']:,} games, {last['steps']:,} moves in {seconds / 60:.1f} minutes",
        flush=True,
    )
    return TrainedPlayer.open(f"seed {seed}", config, last["networks"], SIMULATIONS)


if __name__ == "__main__":
    main()
