"""Simulations per second of a search of many games at once, and of one that visits one node of one game at a time.

    python -m pip install mctx                               # optional; --peer mctx=PYTHON names its interpreter
    python bench/agents/search/speed.py                      # two minutes, one thread (mctx: all)

All search Connect 4 from the empty board with one evaluation, a hash of the position, so that visit counts can be compared.
UCT evaluates by a random playout instead, as it is used. The reference (`_reference.py`) has nodes as objects, and the same
rules and evaluation for a batch of one. A second reference has rules and evaluation on plain integers, without tensors; its
rate is among the samples.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._peers import environment, interpreters
from bench._run import claim, parse
from bench.agents.search._reference import Board, Rules
from bench.agents.search._reference import search as reference_search

from whorl.agents.search.game import CONNECT4, playout
from whorl.agents.search.tree import RULES, search

BAR = 20.0
WEIGHTS = torch.randint(1, 1 << 20, (42,), generator=torch.Generator().manual_seed(1))
FACTORS = torch.arange(1, 8)


def hashed(states: Tensor) -> tuple[Tensor, Tensor]:
    mixed = ((states + 1).float().double() @ WEIGHTS.double()).long()
    return (mixed[:, None] * FACTORS) % 61 / 32, mixed % 63 / 32 - 31 / 32


class TensorRules:
    """The package's rules for a batch of one."""

    n_actions = CONNECT4.n_actions

    def legal(self, board: Tensor) -> list[int]:
        return CONNECT4.legal(board, ended=False)[0].nonzero()[:, 0].tolist()

    def play(self, board: Tensor, action: int) -> tuple[Tensor, bool, bool]:
        after, reward, ended = CONNECT4.play(board, torch.tensor([action]))
        return after, bool(reward), bool(ended)


def rate(run: Callable[[], object], simulations: int) -> float:
    began = time.perf_counter()
    run()
    return simulations / (time.perf_counter() - began)


def contenders(rule: str, games: int, simulations: int) -> tuple[dict[str, Callable[[], Any]], bool]:
    """Return a search of each contender, the first of many games, and whether the visit counts are equal."""
    integers, rng, generator = Rules(CONNECT4), random.Random(0), torch.Generator().manual_seed(0)
    weights, empty = WEIGHTS.tolist(), int(WEIGHTS.sum())

    def hashed_one(board: Board) -> tuple[list[float], float]:
        if rule == "uct":
            return [0.0] * 7, 0.0 if board[0] | board[1] == integers.full else integers.playout(board, rng)
        mixed = empty
        for stones, sign in zip(board, (1, -1), strict=True):
            while stones:
                mixed += sign * weights[(stones & -stones).bit_length() - 1]
                stones &= stones - 1
        return [mixed * factor % 61 / 32 for factor in range(1, 8)], mixed % 63 / 32 - 31 / 32

    def evaluate(leaves: Tensor) -> tuple[Tensor, Tensor]:
        return (
            (torch.zeros(len(leaves), 7), playout(CONNECT4, leaves, generator))
            if rule == "uct"
            else hashed(leaves)
        )

    def evaluate_one(board: Tensor) -> tuple[list[float], float]:
        logits, value = evaluate(board)
        return logits[0].tolist(), float(value)

    c, one, many = RULES[rule][1], CONNECT4.initial(1), CONNECT4.initial(games)
    found: dict[str, Callable[[], Any]] = {
        "ours": lambda: search(CONNECT4, many, evaluate, simulations=simulations, rule=rule),
        "one node at a time": lambda: reference_search(
            TensorRules(), one, evaluate_one, simulations, rule, c
        ),
        "integers": lambda: reference_search(integers, (0, 0), hashed_one, simulations, rule, c),
    }
    if rule == "uct":
        return found, True  # its playouts differ
    visits = [found["ours"]().visits[0].tolist(), *(found[name]().visits for name in [*found][1:])]
    return found, visits[0] == visits[1] == visits[2]


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--games", type=int, default=256)
        parser.add_argument("--simulations", type=int, default=100)
        parser.add_argument("--rounds", type=int, default=7)
        parser.add_argument("--peer", action="append", default=[], help="mctx=PYTHON")

    args = parse(__doc__, arguments, smoke={"games": 4, "simulations": 8, "rounds": 1})
    torch.set_num_threads(1)
    peers, beside = interpreters(args.peer, ["mctx"], threads=2), {}
    if "mctx" in peers:
        sizes = map(str, (args.games, args.simulations, args.rounds, *WEIGHTS.tolist()))
        given = [peers["mctx"], str(Path(__file__).with_name("_mctx.py")), *sizes]
        done = subprocess.run(
            given, env=environment(peers["mctx"], 2), capture_output=True, text=True, check=True
        )
        beside = json.loads(done.stdout)
    for rule in RULES:
        runs, equal = contenders(rule, args.games, args.simulations)
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                rates[name].append(rate(run, args.simulations * (args.games if name == "ours" else 1)))
        middle = {name: statistics.median(values) for name, values in rates.items()}
        middle |= {"mctx": beside[rule]} if rule in beside else {}
        shown = ", ".join(f"{name} {value:,.0f}" for name, value in middle.items())
        print(f"{rule}, simulations/s: {shown}; equal visits: {equal}", flush=True)
        ours, peer = middle["ours"], middle["one node at a time"]
        claim(
            f"{args.games} searches of Connect 4 by {rule} at once, {args.simulations} simulations", ours=round(ours),
            peer=round(peer), peer_name="one node at a time", unit="simulations/s", ratio=ours / peer, bar=BAR,
            ok=equal and ours >= BAR * peer, variant=rule, samples=[rates, beside],
        )  # fmt: skip


if __name__ == "__main__":
    main()
