"""Reward per second of asynchronous rollouts against lockstep.

    python bench/align/async_rollouts.py [--kind fp32|bf16] [--judge SECONDS]
    python bench/align/async_rollouts.py --quick      # 3 batches of 8 prompts, without the times of one core

The workload is that of `grpo_step.py`: 16 prompts, 8 completions of 32 tokens, a Llama shape of 6.9 M parameters. The
reward is 1 for a completion with a space, which a few steps raise. In lockstep, sampling and training alternate, each
on all cores, with a replica per core. Asynchronous workers sample on one core while the learner has the others. Their
samples are a few versions old and get importance weights.

Let r(n), l(n) be the seconds that sampling and training take per rollout batch on n cores. Lockstep costs r(N) + l(N).
Asynchronous rollouts cost max(r(k), l(N - k)), where l also scores the stale samples again. If lockstep keeps all cores
busy there is nothing to gain: the gain comes from waiting. `--judge` delays the verdicts of each rollout batch, like a
reward model behind a network or a tool call. Lockstep waits for them. With asynchronous rollouts two workers wait while
the learner trains.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse, sized
from bench.align import _workload as work
from bench.align._ours import CONSTANT, DTYPES, LR_SCALE, DelayedWorker

from whorl.align.config import StageTrainConfig
from whorl.align.data.curriculum import Curriculum
from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.config import AsyncRolloutConfig, RLConfig, RLRunConfig
from whorl.align.rl.experience import Experience
from whorl.align.rl.train import train_policy
from whorl.evals.grading.task import VerifiableTask
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.token_encoder import TokenEncoder

QUICK = "--quick" in sys.argv
PROMPTS, ANSWERS, NEW, WARM = sized((8, 8, 32, 2) if QUICK else (16, 8, 32, 3), (2, 2, 8, 1))
METRICS = (
    "reward", "time/data", "time/logprobs", "time/backward", "time/optimizer", "policy_lag/mean", "time/producer_busy",
    "importance/effective_sample_size",
)  # fmt: skip


def steps(
    folder: Path, kind: str, n: int, threads: int, rollout: AsyncRolloutConfig, delay: float = 0.0
) -> dict[str, float]:
    """Return means of the metrics over `n` rollout batches after the warm-up, with `seconds` and `reward_per_second`."""
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(folder)
    texts = work.prompts(folder, PROMPTS, NEW)
    tasks = [
        VerifiableTask(id=str(i), prompt=text, verifier="format((?s).* .*)") for i, text in enumerate(texts)
    ]
    length = NEW + max(len(TokenEncoder(tokenizer).prompt(text)) for text in texts)
    banned = set(tokenizer.control_ids) - set(tokenizer.end_ids)
    network = PolicyModel(work.model(DTYPES[kind]), banned_ids=banned)
    worker = DelayedWorker(
        work.config(), str(DTYPES[kind]).removeprefix("torch."), folder, tasks, ANSWERS, NEW, length, 1.0,
        Curriculum([0.0] * len(tasks), rule="uniform"), update_in_flight=rollout.update_in_flight,
        threads=1 if rollout.workers else None, delay=delay,
    )  # fmt: skip
    config = RLConfig(
        algorithm="dapo", steps=WARM + n, prompts_per_step=PROMPTS, group_size=ANSWERS, max_completion_tokens=NEW,
        max_seq_len=length, optimizer="adamw", lr_scale=LR_SCALE, async_rollout=rollout,
        train=StageTrainConfig(schedule=CONSTANT), run=RLRunConfig(replicas=1 if rollout.workers else threads),
    )  # fmt: skip
    seen: list[tuple[float, dict[str, float]]] = []

    def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
        seen.append((time.perf_counter(), metrics))

    train_policy(network, worker, config, callback=observe)
    timed = seen[WARM - 1 :]
    seconds = (timed[-1][0] - timed[0][0]) / n
    means = {name: sum(metrics.get(name, 0.0) for _, metrics in timed[1:]) / n for name in METRICS}
    return {"seconds": seconds, "reward_per_second": means["reward"] * PROMPTS * ANSWERS / seconds, **means}


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kind", choices=sorted(DTYPES), help="dtype; default: the machine's")
        parser.add_argument(
            "--judge",
            dest="delay",
            type=float,
            default=0.0,
            help="seconds until the verdicts of a batch arrive",
        )

    given = parse(__doc__, arguments, smoke={"kind": "fp32"}, quick={"quick": True})
    given.kind = given.kind or work.own_dtype()
    n, cores = sized(3 if given.quick else 16, 2), len(os.sched_getaffinity(0))
    workers = 2 if given.delay else 1
    asynchronous = AsyncRolloutConfig(
        workers=workers, prefetch=2, max_policy_lag=2 * workers, importance="truncate"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work.write(folder)
        found: dict[str, Any] = {
            "lockstep": steps(folder, given.kind, n, cores, AsyncRolloutConfig(), given.delay),
            "asynchronous": steps(folder, given.kind, n, max(1, cores - 1), asynchronous, given.delay),
        }
        if not QUICK:
            found["one core"] = steps(
                folder, given.kind, max(2, n // 2), 1, AsyncRolloutConfig(), given.delay
            )
    for name, figures in found.items():
        print(f"{name:12} " + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    lockstep = found["lockstep"]
    if one := found.get("one core"):
        training = one["time/backward"] + one["time/optimizer"]
        print(
            f"sampling {one['time/data']:.2f} s on one core, {lockstep['time/data']:.2f} on {cores}; training "
            f"{training:.2f} and {lockstep['time/backward'] + lockstep['time/optimizer']:.2f}; lower bound of "
            f"asynchronous rollouts {max(one['time/data'] / workers, training):.2f} s, lockstep {lockstep['seconds']:.2f} s"
        )
    ratio = found["asynchronous"]["reward_per_second"] / lockstep["reward_per_second"]
    claim(
        f"reward per second of asynchronous rollouts ({cores} cores, {given.kind}, verdicts {given.delay:g} s late)",
        ours=found["asynchronous"]["reward_per_second"], peer=lockstep["reward_per_second"], unit="reward/s",
        ratio=ratio, bar=1.3, ok=ratio >= 1.3, samples=[found], quick=given.quick,
        peer_name="lockstep", variant="judge" if given.delay else "",
    )  # fmt: skip


if __name__ == "__main__":
    main()
