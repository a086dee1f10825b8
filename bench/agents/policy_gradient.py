"""The variance of REINFORCE's gradient by baseline, and the return of IMPALA by policy lag, with and without V-trace.

    python bench/agents/policy_gradient.py

Variance: of the gradient over rollouts of one policy that reaches about 60 on CartPole-v1, summed over parameters. Lag: the
actors act with weights that are a fixed number of steps old; the return is the mean of the last 100 of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.agents.methods.registration import make_config, make_method
from whorl.agents.rollout import Actor, rollout_spec
from whorl.agents.task import AgentTask, open_method, train
from whorl.slots import Board, FIFOReader, SerialProducer, SlotRing
from whorl.train.trainer import RunOptions, Trainer


def gradient_variance(baseline: str, rollouts: int) -> float:
    """Return the total variance of the gradient over rollouts of a fixed policy."""
    config = make_config("reinforce", "CartPole-v1", baseline=baseline, n_steps=200, n_envs=4)
    networks = train(make_config("reinforce", "CartPole-v1", baseline="learned", steps=60_000))
    spaces = open_method(config)[0].spaces
    method, spec = make_method(config, spaces), rollout_spec(spaces, 4, 200)
    ring, board = SlotRing(spec, 1), Board.from_tensors(dict(networks.named_parameters()))
    gradients = []
    with FIFOReader(ring, [SerialProducer(ring, Actor(config, 7), board=board)]) as records:
        for slot, _ in zip(records, range(rollouts + 20), strict=False):
            loss = method.loss(networks, method.flat(networks, slot.tensors()))  # type: ignore[attr-defined]
            parts = torch.autograd.grad(loss.total, list(networks.policy.parameters()))
            gradients.append(torch.cat([part.flatten() for part in parts]) / loss.count)
    return float(torch.stack(gradients[20:]).var(0).sum())  # the moving average is near its mean after 20


class LaggingTask(AgentTask):
    """Actors get weights that are `lag` steps old."""

    lag = 0

    def sync_weights(self, steps_done: int) -> None:
        if not hasattr(self, "past"):
            self.past = deque[dict[str, torch.Tensor]](maxlen=self.lag + 1)
        self.past.append({n: t.clone() for n, t in self.learner.weights.items()})
        self.board.publish(self.past[0], max(0, steps_done - self.lag))


def lagged_return(lag: int, v_trace: bool, steps: int, seed: int) -> float:
    config = make_config("impala", "CartPole-v1", actors=0, steps=steps, v_trace=v_trace, seed=seed)
    task = LaggingTask(config)
    task.lag = lag
    Trainer(task, RunOptions(threads=1)).fit()
    return task.progress.mean_return


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rollouts", type=int, default=200)
        parser.add_argument("--steps", type=int, default=200_000)
        parser.add_argument("--seeds", type=int, default=5)

    args = parse(__doc__, arguments, smoke={"rollouts": 4, "steps": 2_000, "seeds": 1})
    torch.set_num_threads(1)
    variance = {
        name: gradient_variance(name, args.rollouts) for name in ("none", "moving-average", "learned")
    }
    print("variance of the gradient:", {name: f"{value:.3g}" for name, value in variance.items()}, flush=True)
    ratio = variance["none"] / variance["moving-average"]
    claim(
        "variance of the gradient of REINFORCE without a baseline over a moving average", ours=variance["moving-average"],
        peer=variance["none"], unit="variance", ratio=ratio, bar=2.0, ok=ratio >= 2, variant="baseline",
    )  # fmt: skip
    mean: dict[tuple[int, bool], float] = {}
    for lag in (0, 4, 16, 64):
        for v_trace in (True, False):
            scores = [lagged_return(lag, v_trace, args.steps, seed) for seed in range(args.seeds)]
            mean[lag, v_trace] = float(np.mean(scores))
            print(
                f"lag {lag:2}, {'V-trace' if v_trace else 'GAE'}: {mean[lag, v_trace]:.1f} {scores}",
                flush=True,
            )
    share = mean[16, True] / mean[0, True]
    claim(
        "return of IMPALA with V-trace at a lag of 16 steps over that at 0", ours=mean[16, True], peer=mean[0, True],
        unit="return", ratio=share, bar=0.95, ok=share >= 0.95, variant="lag",
        samples=[{"lag": lag, "v_trace": v, "return": m} for (lag, v), m in mean.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
