"""Learning to learn: RL2 on bandits and on a goal that moves, and one-shot imitation of held-out goals; five seeds.

bandits     greedy return of 20,000 trials, and the exact optimum
moved-goal  return of the second episode after the goal has moved, as a share of that before
one-task    the same of a PPO policy for one goal, when the goal is another
one-shot    share of held-out goals that are reached within 8 steps after one demonstration, and without it

python bench/agents/meta.py                    # about 15 minutes on 2 cores
python bench/agents/meta.py --only bandits --seeds 2
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.agents.environments.trials import HELD_OUT, DemonstratedGoalGrid, GoalGrid, HeldOutGoalGrid
from whorl.agents.imitation.demonstrations import Demonstrations
from whorl.agents.meta.adaptation import returns_by_episode
from whorl.agents.meta.bandit_optimum import FIVE_ARMS, PULLS, rewards_by_pull
from whorl.agents.methods.registration import make_config, make_method
from whorl.agents.seed_statistics import SeedSummary, summarize_seeds
from whorl.agents.task import evaluate, train

SMALLER = 0.005  # factor on the steps in a smoke run


class WithoutDemonstration(GoalGrid):
    """The held-out goals, with as few steps in an episode."""

    side, trial_steps, limit, default_goals = 5, 26, 8, HELD_OUT


def trained(method: str, environment: str, seed: int, **more: Any) -> tuple[Any, Any]:
    config = make_config(method, environment, seed=seed)
    if sized(False, True):
        config = make_config(method, environment, seed=seed, steps=round(config.steps * SMALLER))
    return config, train(config, **more)


def bandits(seed: int) -> float:
    config, networks = trained("rl2", "bandits", seed)
    return float(np.mean(evaluate(config, networks, sized(20_000, 100), 10_000 + seed)))


def episodes(config: Any, networks: Any, envs: Any) -> list[list[float]]:
    """Mean returns of the first, second, ... episode, in each phase; NaN where too few trials have one."""
    found = returns_by_episode(config, networks, envs) or {}
    return [[*returns, *[float("nan")] * 10][:10] for returns in (*found.values(), [])]


def moved_goal(seed: int) -> tuple[float, float, float]:
    """Return the first and the second episode after the move, as shares of the adapted return, and that return."""
    config, networks = trained("rl2", "GoalGrid-v0", seed)
    first, after, *_ = episodes(config, networks, GoalGrid(sized(5_000, 50)))
    adapted = float(np.nanmean(first[2:]))
    print(f"  seed {seed}: first goal {np.round(first, 3)}, moved {np.round(after, 3)}", flush=True)
    return after[0] / adapted, after[1] / adapted, adapted


def one_task(seed: int) -> float:
    """Return the share of its return that a policy for one goal keeps with another."""
    goal = (7 * seed + 3) % 16
    config, networks = trained("ppo", f"GoalGrid{goal}-v0", seed)
    others = tuple(cell for cell in range(16) if cell != goal)
    own, other = (
        float(np.mean(episodes(config, networks, GoalGrid(sized(2_000, 50), goals=goals))[0][:2]))
        for goals in ((goal,), others)
    )
    print(f"  seed {seed}: own goal {own:.3f}, another {other:.3f}", flush=True)
    return other / own


def demonstrations(trials: int, seed: int) -> Demonstrations:
    """Whole trials of the demonstrator of the training goals, one after another."""
    envs = DemonstratedGoalGrid(trials)
    rows: list[tuple[torch.Tensor, ...]] = []
    observation = envs.reset(seed)
    for _ in range(envs.trial_steps):
        assert envs.state is not None
        action = envs.demonstrator(envs.state)
        found = envs.step(action)
        rows.append((observation, action, found.reward))
        observation = found.observation
    columns = (torch.stack(column, 1).flatten(0, 1) for column in zip(*rows, strict=True))
    steps = dict(zip(("observation", "action", "reward"), columns, strict=True))
    return Demonstrations("GoalGridDemo-v0", (envs.trial_steps,) * trials, steps, -float("inf"))


@torch.no_grad()
def share_reached(config: Any, networks: Any, envs: Any, own_episode: int, seed: int) -> float:
    """Return the share of copies that reach the goal in the agent's first own episode."""
    method, observation = make_method(config, envs.spaces), envs.reset(10_000 + seed)
    reached = torch.zeros(envs.num_envs, dtype=torch.bool)
    for _ in range(envs.trial_steps):
        number = envs.episodes(envs.state)[1]
        found = envs.step(method.greedy_action(networks, observation))
        reached |= (found.reward > 0) & (number == own_episode)
        observation = found.observation
    return float(reached.float().mean())


def one_shot(seed: int) -> tuple[float, float]:
    given = demonstrations(sized(2_000, 100), seed)
    config, networks = trained("one-shot", "GoalGridDemo-v0", seed, demonstrations=given)
    n = sized(5_000, 50)
    shown = share_reached(config, networks, HeldOutGoalGrid(n), 1, seed)
    return shown, share_reached(config, networks, WithoutDemonstration(n), 0, seed)


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", default="", help="bandits, moved-goal, one-task or one-shot")

    args = parse(__doc__, arguments, smoke={"seeds": 1})
    torch.set_num_threads(1)

    def over_seeds(measure: Callable[[int], Any]) -> list[SeedSummary]:
        began = time.perf_counter()
        runs = [np.atleast_1d(measure(seed)) for seed in range(args.seeds)]
        print(f"{measure.__name__}: {(time.perf_counter() - began) / args.seeds:.0f} s per seed", flush=True)
        columns = np.array(runs).T.tolist()
        return [summarize_seeds([column], np.random.default_rng(0)) for column in columns]

    if args.only in ("", "bandits"):
        (found,), best = over_seeds(bandits), float(rewards_by_pull(FIVE_ARMS, PULLS).sum())
        print(f"bandits: {found:.3f}, optimum {best:.4f}", flush=True)
        claim(
            "greedy return of RL2 on five arms, ten pulls", ours=found.mean, peer=best, unit="reward per trial",
            ratio=found.mean / best, bar=6.55, ok=found.mean >= 6.55, variant="bandits", peer_name="Bayes optimum",
        )  # fmt: skip
    if args.only in ("", "moved-goal"):
        first, second, adapted = over_seeds(moved_goal)
        print(f"moved-goal: episode 1 {first}, episode 2 {second}; adapted return {adapted}", flush=True)
        claim(
            "return of RL2 in the second episode after the goal has moved, over that before", ours=second.mean,
            peer=first.mean, unit="share of the adapted return", ratio=second.mean, bar=0.9, ok=second.mean >= 0.9,
            variant="moved-goal", peer_name="first episode after the move",
        )  # fmt: skip
    if args.only in ("", "one-task"):
        (kept,) = over_seeds(one_task)
        print(f"one-task: {kept}", flush=True)
        claim(
            "share of its return that a policy for one goal keeps with another goal", ours=kept.mean, peer=1.0,
            unit="share of the return", ratio=kept.mean, bar=0.5, ok=kept.mean <= 0.5, variant="one-task",
            peer_name="its own goal",
        )  # fmt: skip
    if args.only in ("", "one-shot"):
        shown, blind = over_seeds(one_shot)
        print(f"one-shot: {shown} with a demonstration, {blind} without", flush=True)
        claim(
            "held-out goals reached after one demonstration", ours=shown.mean, peer=blind.mean, unit="share of trials",
            ratio=shown.mean / blind.mean, bar=3.0, ok=shown.mean >= max(0.8, 3 * blind.mean), variant="one-shot",
            peer_name="without a demonstration",
        )  # fmt: skip


if __name__ == "__main__":
    main()
