"""Imitation: the share of the expert's return from ten episodes, growth of errors with the horizon, and two divergences.

    python bench/agents/imitation.py [--seeds 5] [--only gail-Pendulum-v1|horizon|divergence] [--peer PYTHON]
    python bench/agents/imitation.py --only divergence --picture docs/agents_divergence.png

Share: (return - random) / (expert - random), with returns of 100 greedy episodes from the same initial states. Horizon: on
`Tightrope`, cloning and DAgger have 1,000 labels each; the exponent of T in the number of lost steps is that of a fit to
logarithms. PYTHON has the library `imitation` 1.0.1 and numpy < 2, which learns from the same episodes by cloning and GAIL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._peers import environment as peer_environment
from bench._run import claim, parse

from whorl.agents.environments.environment import BatchedEnvironment, Spaces
from whorl.agents.environments.registration import TENSOR_ENVIRONMENTS, make_env
from whorl.agents.imitation.demonstrations import Demonstrations, record_demonstrations
from whorl.agents.methods.registration import make_config
from whorl.agents.networks import ActorCritic
from whorl.agents.saved_agent import expert_policy
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.task import evaluate, open_method, run_episodes, train

EXPERTS: dict[str, tuple[str, int]] = {
    "CartPole-v1": ("ppo", 100_000), "Acrobot-v1": ("ppo", 100_000), "Pendulum-v1": ("sac", 10_000),
}  # fmt: skip
BARS = {"clone": 0.90, "dagger": 0.98, "gail": 0.90}
TEST_SEED = 77


def shares(args: argparse.Namespace) -> None:
    """Claim the shares of each method on each environment."""
    for name, (method, steps) in EXPERTS.items():
        wanted = [m for m in BARS if args.only in ("", f"{m}-{name}")]
        if not wanted:
            continue
        config = make_config(method, name, steps=round(steps * args.scale))
        networks = train(config)
        best = float(np.mean(evaluate(config, networks, 100, TEST_SEED)))
        expert = expert_policy(config, networks, 10)
        shown = [record_demonstrations(name, expert, 10, 1000 + seed) for seed in range(args.seeds)]
        shown = [replace(each, random_return=-1e9) for each in shown] if args.smoke else shown
        random = float(np.mean([d.random_return for d in shown]))
        print(
            f"{name}: expert {method} {best:.1f}, random {random:.1f}, {[str(d) for d in shown]}", flush=True
        )
        for pupil in wanted:
            began, scores = time.perf_counter(), list[float]()
            for seed, demonstrations in enumerate(shown):
                of = make_config(pupil, name, seed=seed)
                of = of.model_copy(update={"steps": round(of.steps * args.scale)})
                learned = train(of, demonstrations=demonstrations)
                scores.append(float(np.mean(evaluate(of, learned, 100, TEST_SEED))))
            each = [(score - random) / (best - random) for score in scores]
            found = summarize_seeds([each], np.random.default_rng(0))
            seconds = (time.perf_counter() - began) / args.seeds
            print(
                f"{pupil} on {name}: {found:.3f} {np.round(scores, 1).tolist()}, {seconds:.0f} s per seed",
                flush=True,
            )
            bar = BARS[pupil]
            claim(
                f"share of the expert's return that {pupil} has on {name} from ten episodes", ours=found.mean, peer=1.0,
                peer_name="expert", unit="share", ratio=found.mean, bar=bar, ok=found.mean >= bar,
                variant=f"{pupil}-{name}", samples=each,
            )  # fmt: skip
        if args.peer:
            for pupil, score in library(args.peer, name, shown[0], args.smoke).items():
                print(
                    f"imitation's {pupil} on {name}: {(score - random) / (best - random):.3f} ({score:.1f})",
                    flush=True,
                )


LIBRARY = """
import json, sys, tempfile
import gymnasium, numpy as np
from imitation.algorithms import bc
from imitation.algorithms.adversarial.gail import GAIL
from imitation.data.types import TrajectoryWithRew
from imitation.rewards.reward_nets import BasicRewardNet
from imitation.util.networks import RunningNorm
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv
from imitation.data.wrappers import RolloutInfoWrapper
from imitation.data import rollout

folder, name, steps, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
d, at, shown = np.load(folder + "/d.npz"), 0, []
for n in d["lengths"]:
    part = slice(at, at + n)
    obs = np.concatenate([d["observation"][part], d["final_observation"][at + n - 1 : at + n]])
    shown.append(TrajectoryWithRew(obs=obs, acts=d["action"][part], infos=None, terminal=True, rews=d["reward"][part]))
    at += n
envs = DummyVecEnv([lambda: RolloutInfoWrapper(gymnasium.make(name)) for _ in range(8)])
rng, found = np.random.default_rng(0), {}
cloner = bc.BC(observation_space=envs.observation_space, action_space=envs.action_space,
               demonstrations=rollout.flatten_trajectories(shown), rng=rng, device="cpu")
cloner.train(n_epochs=epochs, progress_bar=False)
found["clone"] = evaluate_policy(cloner.policy, envs, 100)[0]
learner = PPO("MlpPolicy", envs, batch_size=64, ent_coef=0.0, learning_rate=4e-4, gamma=0.95, n_epochs=5, seed=0,
              device="cpu", n_steps=256)
reward = BasicRewardNet(envs.observation_space, envs.action_space, normalize_input_layer=RunningNorm)
trainer = GAIL(demonstrations=shown, demo_batch_size=1024, gen_replay_buffer_capacity=512, n_disc_updates_per_round=8,
               venv=envs, gen_algo=learner, reward_net=reward, allow_variable_horizon=True,
               log_dir=tempfile.mkdtemp())
trainer.train(steps)
found["gail"] = evaluate_policy(learner, envs, 100)[0]
print(json.dumps({name: float(value) for name, value in found.items()}))
"""


def library(python: str, name: str, shown: Demonstrations, smoke: bool) -> dict[str, float]:
    """Return the returns that the library `imitation` reaches with the settings of its documentation."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/d.npz", lengths=shown.lengths, **{n: t.numpy() for n, t in shown.steps.items()})
        sizes = ["2048", "1"] if smoke else ["100000", "30"]
        command = [python, "-c", LIBRARY, folder, name, *sizes]
        done = subprocess.run(command, env=peer_environment(python, 1), capture_output=True, text=True)
    if done.returncode:
        print(f"left out: imitation on {name}: {done.stderr.strip()[-300:]}")
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class Tightrope(BatchedEnvironment):
    """Contexts follow at random, each with one right action of 100. A wrong one leads off the rope, where every context has
    another right action, which leads back. Each step on the rope has the reward 1."""

    CONTEXTS, ACTIONS, HORIZON = 200, 100, 128
    spaces = Spaces((2 * CONTEXTS,), n_actions=ACTIONS)
    default_max_episode_steps = HORIZON
    right = torch.randint(ACTIONS, (2 * CONTEXTS,), generator=torch.Generator().manual_seed(0))

    def initial_state(self, n: int) -> Tensor:
        return torch.randint(self.CONTEXTS, (1, n), generator=self.generator)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        on = action == self.right[state[0]]
        following = self.initial_state(len(action)) + self.CONTEXTS * ~on
        return following, on.float(), torch.zeros_like(on)

    def observe(self, state: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(state[0], 2 * self.CONTEXTS).float()


def horizon(args: argparse.Namespace) -> None:
    """Claim the exponents of the horizon in the number of lost steps."""
    TENSOR_ENVIRONMENTS["Tightrope-v0"] = Tightrope

    def walk(observation: Tensor) -> Tensor:
        return Tightrope.right[observation.argmax(-1)]

    horizons = np.array([4, 8, 16, 32, 64, 128])
    lost: dict[str, Any] = {"clone": [], "dagger": []}
    for seed in range(args.seeds):
        for method in lost:
            episodes = 10 if method == "clone" else 5
            shown = record_demonstrations("Tightrope-v0", walk, episodes, seed, max_steps=100)
            config = make_config(
                method, "Tightrope-v0", seed=seed, steps=512, n_steps=8, hidden=(64,), updates=40
            )
            networks = train(config, demonstrations=shown)
            rewards: list[Tensor] = []
            act = expert_policy(config, networks)
            envs = make_env("Tightrope-v0", args.copies)
            run_episodes(
                envs, act, TEST_SEED, max_steps=128, keep=lambda *step, to=rewards: to.append(step[2].reward)
            )
            lost[method].append(horizons - torch.stack(rewards).mean(1).cumsum(0).numpy()[horizons - 1])
    found = {}
    for method, each in lost.items():
        mean = np.mean(each, axis=0)
        found[method] = float(np.polyfit(np.log(horizons), np.log(mean + 1e-9), 1)[0])
        print(f"{method}: lost steps {dict(zip(horizons.tolist(), np.round(mean, 3).tolist(), strict=True))}, "
              f"exponent {found[method]:.2f}", flush=True)  # fmt: skip
    difference = found["clone"] - found["dagger"]
    claim(
        "exponent of the horizon in the steps that cloning loses, less that of DAgger", ours=found["clone"],
        peer=found["dagger"], peer_name="DAgger", unit="exponent", ratio=difference, bar=0.5, ok=difference >= 0.5,
        variant="horizon", samples=[{m: np.mean(e, axis=0).tolist() for m, e in lost.items()}],
    )  # fmt: skip


def density(action: Tensor) -> Tensor:
    """Return the log-density of the expert, who turns left or right: two Gaussians of deviation 0.25 at -1 and 1."""
    modes = torch.distributions.Normal(torch.tensor([-1.0, 1.0]), 0.25)
    return modes.log_prob(action.reshape(-1, 1)).logsumexp(-1) - np.log(2)


def divergence(args: argparse.Namespace) -> None:
    """Fit a Gaussian policy to the bimodal expert in both directions of the KL divergence, and draw them."""
    config = make_config("clone", "Pendulum-v1", hidden=(8,))
    fitted: dict[str, tuple[float, float]] = {}
    for direction in ("forward", "reverse"):
        method: Any
        method, networks = open_method(config)
        assert isinstance(networks, ActorCritic)
        rng, here = torch.Generator().manual_seed(0), torch.ones(512, 3)
        torch.nn.init.constant_(
            networks.policy[-1].bias, 0.5
        )  # nearer to one mode, which breaks the symmetry
        torch.nn.init.constant_(networks.log_width, -1.0)
        optimizer = torch.optim.Adam(networks.parameters(), 0.02)
        for _ in range(args.fits):
            noise = torch.randn(512, 1, generator=rng)
            if direction == "forward":  # cloning: - E log pi over the expert's actions
                signs = torch.randint(2, (512, 1), generator=rng) * 2.0 - 1
                loss = (
                    method.loss(networks, {"observation": here, "action": signs + 0.25 * noise}).total / 512
                )
            else:  # E (log pi - log expert) over the policy's actions
                action, output = networks.act(here, noise)
                loss = (networks.log_prob(output, action) - density(action)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert networks.log_width is not None
        fitted[direction] = networks.policy(here[:1]).item(), networks.log_width.exp().item()
    grid = torch.linspace(-3, 3, 1201)
    curves = {"expert": density(grid).exp()}
    for direction, (mean, width) in fitted.items():
        curves[direction] = torch.distributions.Normal(mean, width).log_prob(grid).exp()
    gap = {name: float(torch.trapezoid(p * (grid.abs() < 0.5), grid)) for name, p in curves.items()}
    print(
        f"mean and deviation {fitted}; probability of an action between the modes, |a| < 0.5: {gap}",
        flush=True,
    )
    if args.picture is not None:
        draw(grid, curves, args.picture)
    ok = abs(fitted["forward"][1] - 1.03) < 0.05 and abs(fitted["reverse"][1] - 0.25) < 0.05
    claim(
        "actions between two modes of the expert: forward KL (cloning), and reverse", ours=gap["reverse"],
        peer=gap["forward"], peer_name="forward KL", unit="probability", ratio=gap["forward"] / gap["reverse"], bar=5.0,
        ok=ok and gap["forward"] >= 5 * gap["reverse"], variant="divergence", samples=[fitted],
    )  # fmt: skip


def draw(grid: Tensor, curves: dict[str, Tensor], path: Path) -> None:
    """Draw the densities of the expert and of both policies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    x = grid.numpy()
    axes.fill_between(x, curves["expert"].numpy(), color="#b9c2c9", alpha=0.6, linewidth=0, label="expert")
    axes.plot(x, curves["forward"].numpy(), color="#d1431f", label="forward KL(expert, policy): cloning")
    axes.plot(x, curves["reverse"].numpy(), color="#1f4e99", label="reverse KL(policy, expert)")
    axes.set(xlabel="action", ylabel="density", xlim=(-3, 3), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", default="", help="METHOD-ENVIRONMENT, horizon or divergence")
        parser.add_argument("--peer", default="", metavar="PYTHON", help="interpreter with imitation")
        parser.add_argument("--picture", type=Path, help="of the divergences")

    full = {"scale": 1.0, "copies": 1000, "fits": 1500}
    args = parse(__doc__, arguments, smoke={"seeds": 1, "scale": 0.03, "copies": 10, "fits": 20})
    for name, value in full.items():
        setattr(args, name, getattr(args, name, value))
    torch.set_num_threads(1)
    shares(args)
    if args.only in ("", "horizon"):
        horizon(args)
    if args.only in ("", "divergence"):
        divergence(args)


if __name__ == "__main__":
    main()
