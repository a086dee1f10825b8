"""KL divergence from a known density to a model, and modes held: interquartile mean of the seeds with its interval.

python bench/generative/densities.py                       # five seeds each; about half an hour on 2 cores
python bench/generative/densities.py --only flow-8-gaussians --seeds 2

`critic` trains the critic of a GAN with a penalty of 10 against an untrained generator, which does not change. The value of
its objective is compared with the exact W_1 of the same held-out rows and samples.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.seed_statistics import summarize_seeds
from whorl.generative.data import open_data
from whorl.generative.distances import squared_distances
from whorl.generative.measures import draw_measured, likelihoods, measure
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import parse_config
from whorl.generative.task import GenerativeTask
from whorl.tracking.seeds import generator
from whorl.train.learner.learner import Learner
from whorl.train.rows import train_rows


@dataclass(frozen=True)
class Bar:
    """A model of a density. measure: by name; limit: the most, or the least if `least`; steps, batch_size: of training."""

    method: str
    density: str
    measure: str
    limit: float
    least: bool = False
    steps: int = 16_000
    batch_size: int = 128

    @property
    def variant(self) -> str:
        return f"{self.method}-{self.density}"


HELD_OUT = 2000  # rows
UNITS = {"KL": "nats", "modes held": "modes"}
BARS = [
    Bar("flow", "8-gaussians", "KL", 0.05),
    Bar("ddpm", "8-gaussians", "KL", 0.05),
    Bar("flow", "checkerboard", "KL", 0.10),
    Bar("ddpm", "checkerboard", "KL", 0.10),
    Bar("flow", "25-gaussians", "modes held", 25, least=True, steps=4000),
    Bar("ddpm", "25-gaussians", "modes held", 25, least=True, steps=4000),
    Bar("gan", "25-gaussians", "modes held", 25, least=True, steps=8000, batch_size=512),
]


def critic_ratio(seed: int, steps: int) -> float:
    """Return the value of a critic's objective as a share of the exact W_1 between held-out rows and samples."""
    config = parse_config("gan", {"steps": steps, "penalty": 10.0, "seed": seed})
    task = GenerativeTask(open_data("8-gaussians"), config)
    critic = Learner(task.networks, task.updates()).updates[0]
    for step in range(steps):
        critic.accumulate(critic.objective(task.batch(step)))
        critic.step(task.lr_scale(step))
    rows = task.data.test[:HELD_OUT]
    batch = {"data": rows, **task.method.draws(rows, None, generator(seed, "critic"))}
    with torch.no_grad():
        loss = task.method.loss(task.networks, batch)
        fake = task.networks.get_submodule("generator")(batch["noise"], None)
    costs = squared_distances(fake, rows).sqrt().numpy()
    return -float(loss.total / loss.count) / float(costs[linear_sum_assignment(costs)].mean())


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", default="", help="METHOD-DENSITY")
        parser.add_argument("--steps", type=int, default=0, help="default: those of the bar")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "steps": 5, "rows": 20})
    torch.set_num_threads(1)
    if args.only in ("", "critic"):
        ratios = [critic_ratio(seed, args.steps or 2000) for seed in range(args.seeds)]
        worst = max(abs(ratio - 1) for ratio in ratios)
        print(f"critic: value / W_1 of the seeds {', '.join(f'{ratio:.3f}' for ratio in ratios)}", flush=True)
        claim(
            "value of a critic with penalty against the exact W_1: largest relative difference of the seeds", ours=worst,
            peer=0.0, unit="", ratio=worst / 0.1, bar=0.1, ok=worst <= 0.1, variant="critic", samples=ratios,
        )  # fmt: skip
    for bar in BARS:
        if args.only not in ("", bar.variant):
            continue
        values, seconds = list[float](), list[float]()
        for seed in range(args.seeds):
            settings = {"steps": args.steps or bar.steps, "batch_size": bar.batch_size, "seed": seed}
            config = parse_config(bar.method, settings)
            task, began = GenerativeTask(open_data(bar.density), config), time.perf_counter()
            train_rows(task)
            seconds.append(time.perf_counter() - began)
            task.networks.eval()
            with torch.no_grad():
                if bar.measure == "KL":
                    found = likelihoods(task.method, task.networks, task.data, getattr(args, "rows", None))
                else:
                    found = iter(
                        measure(
                            draw_measured(task.method, task.networks, task.data, DrawOptions(), seed),
                            task.data,
                        )
                    )
                values.append(next(m.value for m in found if m.name == bar.measure))
        summary = summarize_seeds([values], np.random.default_rng(0))
        mean = summary.mean
        print(
            f"{bar.variant}: {bar.measure} {format(summary, '.3f')}, {np.mean(seconds):.0f} s per seed",
            flush=True,
        )
        claim(
            f"{bar.measure} of {bar.method} on {bar.density}", ours=mean, peer=bar.limit, unit=UNITS[bar.measure],
            ratio=mean / bar.limit, bar=bar.limit, ok=mean >= bar.limit if bar.least else mean <= bar.limit,
            variant=bar.variant, samples=values,
        )  # fmt: skip


if __name__ == "__main__":
    main()
