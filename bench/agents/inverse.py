"""Inverse RL on a lake that does not slip: the expert's visits, and its reward on another floor and for other moves.

python bench/agents/inverse.py                    # five seeds; two minutes on 2 cores
python bench/agents/inverse.py --seeds 1 --hidden 64 --rate 0.01

The expert draws its actions from the soft policy of the true reward at temperature 0.1. It has 1,000 episodes on DryLake-v0.
`max-entropy-irl` recovers a reward. Its policy has exact visits, which are compared with the expert's exact ones by total
variation. Policy iteration solves the reward again on FrozenLake-v1, where two of three steps slip, and on DiagonalLake-v0,
whose agent has other moves. The figure is the exact true return divided by that of the optimum. The peer is the policy of
`clone`, trained on the same episodes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.environments.registration import make_tables
from whorl.agents.imitation.demonstrations import Policy, record_demonstrations
from whorl.agents.imitation.inverse import expected_visits, reward_table, soft_policy, total_variation
from whorl.agents.methods.registration import make_config
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.tabular import expected_total, greedy, policy_iteration
from whorl.agents.task import train

SOURCE, DISCOUNT, TEMPERATURE, BAR = "DryLake-v0", 0.99, 0.1, 0.95
OTHERS = {"slippery": "FrozenLake-v1", "diagonal": "DiagonalLake-v0"}


def drawn(policy: np.ndarray, seed: int) -> Policy:
    """A policy of tables [S, A] that draws its actions."""
    generator, log_prob = torch.Generator().manual_seed(seed), torch.from_numpy(policy).float()

    def act(observation: Tensor) -> Tensor:
        return torch.multinomial(observation @ log_prob, 1, generator=generator)[:, 0]

    return act


def one_seed(seed: int, episodes: int, steps: int, hidden: tuple[int, ...], rate: float) -> dict[str, float]:
    """Return the total variation, and the shares of the optimum of the reward and of the clone in each other lake."""
    tables = make_tables(SOURCE)
    expert, _ = soft_policy(tables, tables.reward / TEMPERATURE, DISCOUNT)
    demonstrations = record_demonstrations(SOURCE, drawn(expert, seed), episodes, seed)
    config = make_config(
        "max-entropy-irl",
        SOURCE,
        seed=seed,
        steps=steps,
        hidden=hidden,
        learning_rate=rate,
        discount=DISCOUNT,
    )
    found = train(config, demonstrations=demonstrations)
    cloned = train(make_config("clone", SOURCE, seed=seed, steps=steps), demonstrations=demonstrations)
    states = torch.eye(len(tables.terminal))
    with torch.no_grad():
        reward = found.reward(states)[:, 0].double().numpy()
        clone = cloned.policy(states).softmax(-1).double().numpy()
    visits = [expected_visits(tables, p, DISCOUNT) for p in (found.policy.exp().double().numpy(), expert)]
    result = {"total_variation": total_variation(*visits)}
    for name, environment in OTHERS.items():
        other = make_tables(environment)

        def solved(rewards: np.ndarray, other: object = other) -> float:
            best = greedy(policy_iteration(replace(other, reward=rewards), DISCOUNT).action_values)
            return expected_total(other, other.policy(best), other.reward)

        optimum = solved(other.reward)
        result[name] = solved(reward_table(other, reward)) / optimum
        result[f"{name} clone"] = expected_total(other, clone, other.reward) / optimum
    return result


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--episodes", type=int, default=1_000)
        parser.add_argument("--steps", type=int, default=10_000)
        parser.add_argument(
            "--hidden", type=int, nargs="*", default=[], help="widths of the reward's network"
        )
        parser.add_argument("--rate", type=float, default=0.3, help="learning rate")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "steps": 256, "episodes": 20})
    torch.set_num_threads(1)
    found = []
    for seed in range(args.seeds):
        found.append(one_seed(seed, args.episodes, args.steps, tuple(args.hidden), args.rate))
        print(f"seed {seed}: " + ", ".join(f"{name} {x:.3f}" for name, x in found[-1].items()), flush=True)
    rng = np.random.default_rng(0)
    means = {name: summarize_seeds([[one[name] for one in found]], rng) for name in found[0]}
    kind = "deep-" if args.hidden else ""
    variation = means["total_variation"]
    claim(
        f"total variation of visits from those of the expert after {args.episodes} episodes", ours=variation.mean, peer=0.05,
        unit="share", ratio=variation.mean, bar=0.05, ok=variation.mean <= 0.05, variant=f"{kind}visits", samples=found,
    )  # fmt: skip
    for name, environment in OTHERS.items():
        ours, clone = means[name].mean, means[f"{name} clone"].mean
        claim(
            f"share of the optimum on {environment} of the reward found on {SOURCE}, solved again", ours=ours, peer=clone,
            peer_name="clone", unit="share", ratio=ours, bar=BAR, ok=ours >= BAR > clone, variant=f"{kind}{name}",
            samples=[one[name] for one in found],
        )  # fmt: skip


if __name__ == "__main__":
    main()
