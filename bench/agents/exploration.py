"""All kinds of exploration on five tasks: greedy returns, and the seeds that solve the task.

python bench/agents/exploration.py                          # twenty minutes on 2 cores
python bench/agents/exploration.py --task DeepSea20-v0 --kinds epsilon ensemble

DeepSea of 20 rows pays for one of 2^20 sequences of actions. A uniform policy would find it once in a million episodes;
a run here has 5,000.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.methods.registration import make_config
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.task import RETURN_WINDOW, TrainingProgress, evaluate, train
from whorl.train.learner.loop import StopTraining

DEEP_SEA = "DeepSea20-v0"
STRUCTURED = ("repeat", "ensemble")
# The kinds of discrete actions, and the settings that each adds to DQN's.
DISCRETE: dict[str, dict[str, Any]] = {
    "policy": {},
    "epsilon": {"exploration": {"kind": "epsilon"}},
    "repeat": {"exploration": {"kind": "repeat"}},
    "ensemble": {"exploration": {"kind": "ensemble"}, "members": 10},
    "epsilon, bonus": {"exploration": {"kind": "epsilon", "bonus": 0.1}},
}
NOISE: dict[str, dict[str, Any]] = {
    "policy": {},
    "gaussian": {"exploration": {"kind": "gaussian", "random_steps": 1_000}},
    "ou": {"exploration": {"kind": "ou", "random_steps": 1_000}},
}


@dataclass(frozen=True)
class Task:
    """An environment and its runs.

    solved: the least greedy return of a seed that solves it. method: of all kinds but `policy`, which is `policy_method`'s.
    settings: of `method`. seeds: by kind; the others have three. stop: mean of the last 100 training returns at which a run
    ends before its last step.
    """

    environment: str
    steps: int
    solved: float
    method: str
    policy_method: str
    kinds: dict[str, dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    stop: float = float("inf")

    def method_of(self, kind: str) -> str:
        return self.policy_method if kind == "policy" else self.method


TASKS = [
    Task(
        DEEP_SEA, 100_000, 0.9, "dqn", "ppo", DISCRETE,
        {
            "hidden": (32,), "n_envs": 10, "n_steps": 20, "updates_per_step": 0.125, "batch_size": 64,
            "learning_starts": 400, "target_every": 20, "learning_rate": 5e-3,
        },
        {"epsilon": 5, "ensemble": 5}, 0.6,
    ),
    Task(
        "FrozenLake8x8-v1", 60_000, 0.7, "dqn", "ppo", DISCRETE,
        {
            "hidden": (32,), "n_steps": 16, "updates_per_step": 0.25, "batch_size": 64, "target_every": 50,
            "learning_rate": 3e-3, "exploration": {"fraction": 0.5},
        },
    ),
    Task(
        "MountainCar-v0", 60_000, -150.0, "dqn", "ppo", DISCRETE,
        {
            "hidden": (64, 64), "updates_per_step": 0.5, "batch_size": 64, "n_step": 5, "target_every": 300,
            "exploration": {"fraction": 0.5},
        },
    ),
    Task(
        "CartPole-v1", 30_000, 475.0, "dqn", "ppo", DISCRETE,
        {"updates_per_step": 0.5, "exploration": {"fraction": 0.2}},
    ),
    Task("Pendulum-v1", 8_000, -200.0, "ddpg", "sac", NOISE, {"hidden": (64, 64), "batch_size": 64}),
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One seed of a kind on a task, with `scale` x its steps."""

    task: Task
    kind: str
    seed: int
    scale: float

    def __call__(self) -> tuple[float, int, float]:
        """Return the mean greedy return, the environment steps and the seconds."""
        torch.set_num_threads(1)
        task, method = self.task, self.task.method_of(self.kind)
        settings: dict[str, Any] = {}
        if method != "ppo":
            kind = task.kinds[self.kind]
            exploration = {**task.settings.get("exploration", {}), **kind.get("exploration", {})}
            settings = {"learning_starts": 1_000, **task.settings, **kind, "exploration": exploration}
            settings["learning_starts"] = round(settings["learning_starts"] * self.scale)
        config = make_config(
            method, task.environment, steps=round(task.steps * self.scale), seed=self.seed, **settings
        )
        began, steps = time.perf_counter(), [0]

        def observe(progress: TrainingProgress, _: Any) -> None:
            steps[0] = progress.steps
            if len(progress.returns) == RETURN_WINDOW and progress.mean_return >= task.stop:
                raise StopTraining

        networks = train(config, observe)
        score = float(np.mean(evaluate(config, networks, 20, 10_000 + self.seed)))
        return score, steps[0], time.perf_counter() - began


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--task", default="", help="one environment")
        parser.add_argument(
            "--kinds", nargs="*", help="some kinds, with the one that others are compared with"
        )
        parser.add_argument("--seeds", type=int, default=5, help="at most")
        parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "scale": 0.02})
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for task in TASKS:
            if args.task not in ("", task.environment):
                continue
            futures = {
                kind: [
                    pool.submit(Run(task, kind, s, args.scale))
                    for s in range(min(args.seeds, task.seeds.get(kind, 3)))
                ]
                for kind in task.kinds
                if not args.kinds or kind in args.kinds
            }
            print(f"\n{task.environment}, {task.steps:,} steps; solved from {task.solved:g}\n")
            print(
                "| kind | method | return | seeds that solve it | steps | s per seed |\n|---|---|---:|---:|---:|---:|"
            )
            found: dict[str, list[float]] = {}
            for kind, runs in futures.items():
                scores, steps, seconds = zip(*(run.result() for run in runs), strict=True)
                found[kind] = list(scores)
                summary = summarize_seeds([scores], np.random.default_rng(0))
                solved = sum(score >= task.solved for score in scores)
                row = f"| {kind} | {task.method_of(kind)} | {summary} | {solved} of {len(scores)} |"
                print(f"{row} {np.mean(steps):,.0f} | {np.mean(seconds):.0f} |", flush=True)
            report(task, found)


def report(task: Task, found: dict[str, list[float]]) -> None:
    """Claim the share of seeds that the best kind solves; on DeepSea, the best structured kind, and none by epsilon."""
    shares = {kind: sum(s >= task.solved for s in scores) / len(scores) for kind, scores in found.items()}
    deep, plain = task.environment == DEEP_SEA, "gaussian" if "gaussian" in shares else "epsilon"
    best = max((k for k in shares if not deep or k in STRUCTURED), key=lambda kind: shares[kind])
    who = "a structured kind" if deep else "the best kind"
    claim(
        f"share of seeds in which {who} of exploration solves {task.environment}",
        ours=shares[best], peer=shares[plain], peer_name=plain, unit="share", ratio=shares[best], bar=1.0,
        ok=shares[best] == 1.0 and not (deep and shares[plain]), variant=task.environment, samples=[found],
    )  # fmt: skip


if __name__ == "__main__":
    main()
