"""Learning curves: training return over environment steps, one panel per method, and a picture of them.

python bench/agents/curves.py --picture docs/agents_curves.png     # three seeds, about ten minutes on one core
python bench/agents/curves.py --only sac --seeds 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.methods.registration import make_config
from whorl.agents.seed_statistics import SummaryCurve, interquartile_curve
from whorl.agents.task import TrainingProgress, train

# method, environment, steps
RUNS: list[tuple[str, str, int]] = [
    ("reinforce", "CartPole-v1", 50_000), ("a2c", "CartPole-v1", 50_000),
    ("a3c", "CartPole-v1", 50_000), ("ppo", "CartPole-v1", 50_000),
    ("impala", "CartPole-v1", 50_000), ("trpo", "CartPole-v1", 50_000),
    ("cpo", "CostlyGrid-v0", 100_000), ("dqn", "CartPole-v1", 15_000),
    ("ddpg", "Pendulum-v1", 10_000), ("td3", "Pendulum-v1", 10_000), ("sac", "Pendulum-v1", 10_000),
]  # fmt: skip
WINDOW = 20  # episodes of which a point is the mean
SOLVED = {"CartPole-v1": 475.0, "Pendulum-v1": -170.0, "CostlyGrid-v0": 0.7}
LOWEST = {"CartPole-v1": 0.0, "Pendulum-v1": -1_700.0, "CostlyGrid-v0": -5.0}  # of the axis


def curve_of(method: str, environment: str, steps: int, seed: int) -> Any:
    """Return (steps, mean of the newest episodes) of one run."""
    at: list[float] = []
    returns: list[float] = []

    def observe(progress: TrainingProgress, _: Any) -> None:
        if progress.returns and (not at or progress.steps - at[-1] >= steps / 200):
            at.append(progress.steps)
            returns.append(float(np.mean(list(progress.returns)[-WINDOW:])))

    train(make_config(method, environment, steps=steps, seed=seed), observe)
    return at, returns


def draw(found: Mapping[str, SummaryCurve], path: Path) -> None:
    """Draw one panel per method, with the interval of the seeds as a band."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    runs = [run for run in RUNS if run[0] in found]
    rows = -(-len(runs) // 4)
    figure = Figure(figsize=(11, 2.2 * rows), layout="constrained")
    panels = figure.subplots(rows, 4, squeeze=False).flatten()
    for axes, (method, environment, steps) in zip(panels, runs, strict=False):
        curve = found[method]
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color="#1f4e99", alpha=0.2, linewidth=0)
        axes.plot(curve.x, curve.mean, color="#1f4e99", linewidth=1.6)
        axes.axhline(SOLVED[environment], color="#d1431f", linewidth=0.8, linestyle=":")
        axes.set(xlim=(0, steps), ylim=(LOWEST[environment], None))
        axes.set_title(f"{method}, {environment}", fontsize=9)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    figure.supxlabel("environment steps", fontsize=9)
    figure.supylabel("return", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--only", default="", help="one method")
        parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps")
        parser.add_argument("--picture", type=Path)

    args = parse(__doc__, arguments, smoke={"seeds": 1, "scale": 0.2})
    torch.set_num_threads(1)
    found: dict[str, SummaryCurve] = {}
    grown: dict[str, tuple[float, float]] = {}
    for method, environment, steps in RUNS:
        if args.only not in ("", method):
            continue
        runs = [curve_of(method, environment, round(steps * args.scale), s) for s in range(args.seeds)]
        found[method] = curve = interquartile_curve(runs, np.random.default_rng(0))
        grown[method] = float(curve.mean[0]), float(curve.mean[-1])
        print(
            f"{method}, {environment}: {curve.mean[0]:.1f} at first, {curve.mean[-1]:.1f} at last", flush=True
        )
    if args.picture is not None:
        draw(found, args.picture)
    better = sum(last > first for first, last in grown.values())
    claim(
        "methods whose training return grows, interquartile mean of the seeds", ours=better, peer=len(grown),
        peer_name="methods", unit="methods", ratio=better / len(grown), bar=1.0, ok=better == len(grown), samples=[grown],
    )  # fmt: skip


if __name__ == "__main__":
    main()
