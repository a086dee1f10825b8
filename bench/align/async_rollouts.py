"""Rollouts ahead of the learner against lock-step: reward per second, and the arithmetic of when it pays.

.venv/bin/python bench/align/async_rollouts.py [--quick] [--kind bf16] [--judge SECONDS]

The work of `align_grpo_step.py` (16 prompts, 8 answers of 32 tokens, a Llama of 6.9 M parameters); the reward is 1 where a
space is said, which a few steps raise. In lock-step sampling and learning take turns, each with all cores (a replica each).
Ahead, processes sample on one core while the learner has the others; what they sample is a few versions old, and weighed.

With r(n), l(n) the seconds that sampling and learning of a record take on n cores: lock-step costs r(N) + l(N), ahead costs
max(r(k), l(N - k)), where l has to score what is stale once more. Cores that are all at work in lock-step leave nothing to
win; what does is waiting. `--judge`: each record's verdicts come so much later, as from a judge that is asked over a network
or a tool that is called; lock-step waits for them, ahead two workers wait while the learner learns.
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
from bench._run import claim
from bench.align import _workload as work
from bench.align._ours import CONSTANT, DTYPES, SHARE, Waiting

from whorl.align.config import AsyncRolloutConfig, RLConfig
from whorl.align.data.curriculum import Curriculum
from whorl.align.model.example import ExampleTokenizer
from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.experience import Experience
from whorl.align.rl.train import train_policy
from whorl.evals.verify.task import VerifiableTask
from whorl.tokens.hf_tokenizer import load_tokenizer

PROMPTS, ANSWERS, NEW, WARM = 16, 8, 32, 3


def steps(
    folder: Path, kind: str, n: int, threads: int, ahead: AsyncRolloutConfig, wait: float = 0.0
) -> dict[str, float]:
    """Means over `n` records behind the warm-up."""
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(folder)
    texts = work.prompts(folder, PROMPTS, NEW)
    tasks = [
        VerifiableTask(id=str(i), prompt=text, verifier="format((?s).* .*)") for i, text in enumerate(texts)
    ]
    length = NEW + max(len(ExampleTokenizer(tokenizer).prompt(text)) for text in texts)
    never = set(tokenizer.control_ids) - set(tokenizer.end_ids)
    network = PolicyModel(work.model(DTYPES[kind]), banned_ids=never)
    worker = Waiting(
        work.config(), str(DTYPES[kind]).removeprefix("torch."), folder, tasks, ANSWERS, NEW, length, 1.0,
        Curriculum([0.0] * len(tasks), rule="uniform"), update_in_flight=ahead.update_in_flight,
        threads=1 if ahead.workers else None, wait=wait,
    )  # fmt: skip
    config = RLConfig(
        algorithm="dapo", steps=WARM + n, prompts_per_step=PROMPTS, group_size=ANSWERS, max_completion_tokens=NEW, max_seq_len=length,
        optimizer="adamw", lr_scale=SHARE, schedule=CONSTANT, async_rollout=ahead, replicas=1 if ahead.workers else threads,
    )  # fmt: skip
    seen: list[tuple[float, dict[str, float]]] = []

    def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
        seen.append((time.perf_counter(), metrics))

    train_policy(network, worker, config, callback=observe)
    timed = seen[WARM - 1 :]
    seconds = (timed[-1][0] - timed[0][0]) / n
    told = [metrics for _, metrics in timed[1:]]
    names = (
        "reward",
        "seconds_wait",
        "seconds_score",
        "seconds_gradients",
        "seconds_step",
        "lag_mean",
        "producer_busy",
        "stale_effective",
    )
    means = {name: sum(m.get(name, 0.0) for m in told) / n for name in names}
    return {"seconds": seconds, "reward_per_second": means["reward"] * PROMPTS * ANSWERS / seconds, **means}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", default="bf16", choices=sorted(DTYPES))
    parser.add_argument(
        "--judge", type=float, default=0.0, help="seconds until a record's verdicts are there"
    )
    given = parser.parse_args()
    n, cores = (4 if given.quick else 16), len(os.sched_getaffinity(0))
    workers = 2 if given.judge else 1
    ahead = AsyncRolloutConfig(workers=workers, prefetch=2, max_policy_lag=2 * workers, importance="truncate")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work.write(folder)
        found: dict[str, Any] = {
            "lock-step": steps(folder, given.kind, n, cores, AsyncRolloutConfig(), given.judge),
            "one core": steps(folder, given.kind, max(2, n // 2), 1, AsyncRolloutConfig(), given.judge),
            "ahead": steps(folder, given.kind, n, max(1, cores - 1), ahead, given.judge),
        }
    for who, figures in found.items():
        print(f"{who:10}" + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    lock, one = found["lock-step"], found["one core"]
    print(
        f"sampling {one['seconds_wait']:.2f} s on one core, {lock['seconds_wait']:.2f} on {cores}; learning "
        f"{one['seconds_gradients'] + one['seconds_step']:.2f} and {lock['seconds_gradients'] + lock['seconds_step']:.2f}: "
        f"ahead cannot be below {max(one['seconds_wait'] / workers, one['seconds_gradients'] + one['seconds_step']):.2f} s, "
        f"lock-step takes {lock['seconds']:.2f}"
    )
    ratio = found["ahead"]["reward_per_second"] / lock["reward_per_second"]
    claim(
        f"reward per second, rollouts ahead against lock-step ({cores} cores, {given.kind}, judged {given.judge:g} s later)",
        ours=found["ahead"]["reward_per_second"], peer=lock["reward_per_second"], unit="reward/s", ratio=ratio, bar=1.3,
        ok=ratio >= 1.3, samples=[found], quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
