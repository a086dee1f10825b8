"""Ours as a contender of `align_grpo_step.py` and `align_sft.py`: the work and the report of `_align_trl.py`.

Each is the room's own loop (`align/stage/sft.py`, `align/rl/train.py`), halted where it tells its observer of a step. The optimiser
is AdamW on both sides, though the house's own would be Muon; the loss's average is over tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _turns import Gate
from bench.align import _workload as work

from whorl.align.config import KLConfig, RLConfig, SFTConfig
from whorl.align.data.curriculum import Curriculum
from whorl.align.model.example import Scribe, Text
from whorl.align.model.policy_model import Network, frozen
from whorl.align.rl.experience import Experience
from whorl.align.rl.rollout import Rollouts, RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.evals.verify.registry import VERIFIERS
from whorl.evals.verify.task import Task, Verdict
from whorl.slots import Slot, Weights
from whorl.tokens.hf_tokenizer import open_tokenizer
from whorl.train.config import OptimConfig, ScheduleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONSTANT = ScheduleConfig(kind="constant", warmup=0.0)
SHARE = work.RATE / OptimConfig().adamw_rate


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    """The seconds that a loop tells of."""
    return {name.removeprefix("seconds_"): s for name, s in metrics.items() if name.startswith("seconds_")}


class _ToTheEnd(RolloutWorker):
    """A worker whose answers all run to the limit: the id that would end one is an id like others."""

    def begin(self, rows: int = 64) -> None:
        VERIFIERS["spaces"] = lambda task, said: Verdict(
            work.reward(said), False
        )  # here: replicas have registers of their own
        super().begin(rows)
        self._scribe.ends = frozenset()


@dataclass
class Waiting(RolloutWorker):
    """A worker whose verdicts take a while to come."""

    wait: float = 0.0

    def fill(self, slot: Slot[Rollouts], weights: Weights, rng: np.random.Generator) -> int:
        sampled = super().fill(slot, weights, rng)
        time.sleep(self.wait)
        return sampled


def grpo(
    gate: Gate, folder: Path, kind: str, prompts: list[str], group: int, n_new: int, beta: float
) -> None:
    """Steps of `train_policy` in lock-step, halted behind each; the average over tokens and the clip are TRL's."""
    tokenizer = open_tokenizer(folder)
    never = set(tokenizer.control_ids) - set(tokenizer.end_ids)
    tasks = [Task(id=str(n), prompt=text, verifier="spaces") for n, text in enumerate(prompts)]
    length = n_new + max(len(Scribe(tokenizer).prompt(text)) for text in prompts)

    def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
        if set(experience.length.tolist()) != {n_new}:
            raise RuntimeError("an answer is of another length than was asked for")
        gate(
            {
                "parts": _parts(metrics), "loss": metrics["loss"], "norm": metrics["gradient_norm"],
                "reward": metrics["reward"], "parity": metrics["parity"],
            }
        )  # fmt: skip

    config = RLConfig(
        algorithm="dapo", clip=(0.2, 0.2), steps=10**6, prompts=len(prompts), answers=group, max_tokens=n_new,
        length=length, kl=KLConfig(weight=beta), matrices="adamw", share=SHARE, schedule=CONSTANT,
    )  # fmt: skip
    network = Network(work.model(DTYPES[kind]), forbidden=never)
    reference = frozen(work.model(DTYPES[kind]), network) if beta else None
    worker = _ToTheEnd(
        model=work.config(), dtype=str(DTYPES[kind]).removeprefix("torch."), tokenizer=folder, tasks=tasks,
        answers=group, max_tokens=n_new, length=length, temperature=1.0,
        curriculum=Curriculum([0.0] * len(tasks), rule="uniform"),
    )  # fmt: skip
    train_policy(network, worker, config, reference=reference, observe=observe)


def sft(gate: Gate, folder: Path, kind: str, texts: work.Rows, rows: int, length: int) -> None:
    """Steps of `fine_tune`, halted behind each. folder: not looked at, the weights are `_align_work.model`'s."""

    def observe(step: int, metrics: dict[str, float]) -> None:
        gate(
            {
                "parts": _parts(metrics), "loss": metrics["nll"], "norm": metrics["gradient_norm"],
                "tokens": int(metrics["count"]),
            }
        )  # fmt: skip

    made = []
    for ids in texts:
        mask = np.ones(len(ids), np.bool_)
        mask[0] = False
        made.append(Text(np.array(ids, np.int64), mask))
    config = SFTConfig(
        epochs=1e6, length=length, batch_rows=rows, matrices="adamw", share=SHARE, schedule=CONSTANT
    )
    fine_tune(Network(work.model(DTYPES[kind])), made, config, pad_id=work.PAD, observe=observe)
