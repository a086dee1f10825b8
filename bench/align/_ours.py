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
from whorl.align.model.example import ExampleTokenizer, TokenizedExample
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.rl.experience import Experience
from whorl.align.rl.rollout import Rollouts, RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.evals.verify.registry import VERIFIERS
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.slots import BoardReader, Slot
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.train.config import OptimConfig, ScheduleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONSTANT = ScheduleConfig(kind="constant", warmup_ratio=0.0)
SHARE = work.RATE / OptimConfig().lr_adamw


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    """The seconds that a loop tells of."""
    return {name.removeprefix("seconds_"): s for name, s in metrics.items() if name.startswith("seconds_")}


class _ToTheEnd(RolloutWorker):
    """A worker whose answers all run to the limit: the id that would end one is an id like others."""

    def setup(self, rows: int = 64) -> None:
        VERIFIERS["spaces"] = lambda task, said: Verdict(
            work.reward(said), False
        )  # here: replicas have registers of their own
        super().setup(rows)
        self._example_tokenizer.stop_ids = frozenset()


@dataclass
class Waiting(RolloutWorker):
    """A worker whose verdicts take a while to come."""

    wait: float = 0.0

    def fill(self, slot: Slot[Rollouts], weights: BoardReader, rng: np.random.Generator) -> int:
        sampled = super().fill(slot, weights, rng)
        time.sleep(self.wait)
        return sampled


def grpo(
    gate: Gate, folder: Path, kind: str, prompts: list[str], group: int, n_new: int, beta: float
) -> None:
    """Steps of `train_policy` in lock-step, halted behind each; the average over tokens and the clip are TRL's."""
    tokenizer = load_tokenizer(folder)
    never = set(tokenizer.control_ids) - set(tokenizer.end_ids)
    tasks = [VerifiableTask(id=str(n), prompt=text, verifier="spaces") for n, text in enumerate(prompts)]
    length = n_new + max(len(ExampleTokenizer(tokenizer).prompt(text)) for text in prompts)

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
        algorithm="dapo", clip=(0.2, 0.2), steps=10**6, prompts_per_step=len(prompts), group_size=group, max_completion_tokens=n_new,
        max_seq_len=length, kl=KLConfig(coef=beta), optimizer="adamw", lr_scale=SHARE, schedule=CONSTANT,
    )  # fmt: skip
    network = PolicyModel(work.model(DTYPES[kind]), banned_ids=never)
    reference = frozen_reference(work.model(DTYPES[kind]), network) if beta else None
    worker = _ToTheEnd(
        model=work.config(), dtype=str(DTYPES[kind]).removeprefix("torch."), tokenizer=folder, tasks=tasks,
        answers=group, max_tokens=n_new, length=length, temperature=1.0,
        curriculum=Curriculum([0.0] * len(tasks), rule="uniform"),
    )  # fmt: skip
    train_policy(network, worker, config, reference=reference, callback=observe)


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
        made.append(TokenizedExample(np.array(ids, np.int64), mask))
    config = SFTConfig(
        epochs=1e6, seq_len=length, batch_size=rows, optimizer="adamw", lr_scale=SHARE, schedule=CONSTANT
    )
    fine_tune(PolicyModel(work.model(DTYPES[kind])), made, config, pad_id=work.PAD, callback=observe)
