"""The ring all-reduce of parallel/explained against gloo's all_reduce, from 16 MB on.

    python bench/parallel/ring.py                # 16, 64 and 256 MB on 2 and 4 ranks of this machine

In each round every contender reduces the same tensor once, in turn, after a barrier. Its time is that of the slowest rank.
The claim is the smallest ratio of medians over all sizes and numbers of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.parallel.explained.collectives import Communicator
from whorl.parallel.ranks import run_ranks


def seconds_of(sizes: list[float], rounds: int) -> list[dict[str, list[float]]]:
    """This rank's seconds of each round, by size and contender."""
    group = Communicator("bench", range(dist.get_world_size()))
    contenders = {"gloo": dist.all_reduce, "ring": group.all_reduce}
    found = []
    for megabytes in sizes:
        tensors = {name: torch.ones(int(megabytes * 1e6) // 4) for name in contenders}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds + 1):
            for name, all_reduce in contenders.items():
                tensors[name].fill_(dist.get_rank() + 1.0)
                dist.barrier()
                began = time.perf_counter()
                all_reduce(tensors[name])
                times[name].append(time.perf_counter() - began)
            assert torch.equal(tensors["gloo"], tensors["ring"])
        found.append({name: seconds[1:] for name, seconds in times.items()})
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=15)
        parser.add_argument("--sizes", type=float, nargs="+", default=[16.0, 64.0, 256.0], help="MB")
        parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])

    args = parse(__doc__, arguments, smoke={"rounds": 2, "sizes": [1.0], "ranks": [2]})
    samples = []
    for ranks in args.ranks:
        results = run_ranks(ranks, seconds_of, args.sizes, args.rounds, timeout=600)
        for i, megabytes in enumerate(args.sizes):
            median = {
                name: statistics.median(max(r[i][name][k] for r in results) for k in range(args.rounds))
                for name in ("gloo", "ring")
            }
            ratio = median["gloo"] / median["ring"]
            samples.append({"ranks": ranks, "MB": megabytes, "ratio": round(ratio, 3), **median})
            print(
                f"{ranks} ranks, {megabytes:g} MB: ring {median['ring']:.4f} s, gloo {median['gloo']:.4f} s"
            )
    worst = min(samples, key=lambda s: s["ratio"])
    claim(
        f"ring all-reduce of {worst['MB']:g} MB on {worst['ranks']} ranks, the slowest case against gloo",
        ours=worst["ring"], peer=worst["gloo"], peer_name="gloo", unit="s", ratio=worst["ratio"], bar=0.7,
        ok=worst["ratio"] >= 0.7, samples=samples,
    )  # fmt: skip


if __name__ == "__main__":
    main()
