"""Whorl as a contender of `grpo_step.py` and `sft_throughput.py`: the same work and report as `_trl.py`.

Each contender runs the package's training loop (`align/stage/sft.py`, `align/rl/train.py`). The loop stops at a gate in
its callback after each step. Both sides use AdamW, although Whorl's default is Muon. The loss is the mean over tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bench._turns import Gate
from bench.align import _workload as work

from whorl.align.config import SFTConfig, StageTrainConfig
from whorl.align.data.curriculum import Curriculum
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.policy_config import KLConfig
from whorl.align.rl.config import PolicyUpdateConfig, RLConfig
from whorl.align.rl.experience import Experience
from whorl.align.rl.rollout import Rollouts, RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.evals.grading import GRADERS, Grade, VerifiableTask
from whorl.slots import BoardReader, Slot
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample
from whorl.train.config import OptimConfig, ScheduleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONSTANT = ScheduleConfig(kind="constant", warmup_ratio=0.0)
LR_SCALE = work.RATE / OptimConfig().lr_adamw


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    """Return the seconds by activity of a step's metrics."""
    return {
        name.removeprefix("time/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/total"
    }


def spaces(gold: str, text: str) -> Grade:
    """Return the reward of the work as a grade that has not passed."""
    return Grade(work.reward(text), False)


class FixedLengthWorker(RolloutWorker):
    """A worker whose completions all have the maximal length, because no id ends one."""

    def setup(self, rows: int = 64) -> None:
        # Registered here, because each replica process has a separate registry.
        GRADERS.entries["spaces"] = f"{__name__}:spaces"
        super().setup(rows)
        self._encoder.stop_ids = frozenset()


@dataclass
class DelayedWorker(RolloutWorker):
    """A worker whose verdicts take `delay` seconds per rollout batch."""

    delay: float = 0.0

    def fill(self, slot: Slot[Rollouts], weights: BoardReader, rng: np.random.Generator) -> int:
        sampled = super().fill(slot, weights, rng)
        time.sleep(self.delay)
        return sampled


def grpo(
    gate: Gate, folder: Path, kind: str, prompts: list[str], group: int, n_new: int, beta: float
) -> None:
    """Run steps of lockstep `train_policy`, with a gate after each. Loss aggregation and clip are those of TRL."""
    tokenizer = load_tokenizer(folder)
    banned = set(tokenizer.control_ids) - set(tokenizer.end_ids)
    tasks = [VerifiableTask(id=str(n), prompt=text, verifier="spaces") for n, text in enumerate(prompts)]
    length = n_new + max(len(TokenEncoder(tokenizer).prompt(text)) for text in prompts)

    def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
        if set(experience.length.tolist()) != {n_new}:
            raise RuntimeError("a completion does not have the requested length")
        gate(
            {
                "parts": _parts(metrics), "loss": metrics["loss"], "norm": metrics["grad_norm"],
                "reward": metrics["reward"], "logprob_diff": metrics["logprob_diff_max"],
            }
        )  # fmt: skip

    config = RLConfig(
        algorithm="dapo", update=PolicyUpdateConfig(clip=(0.2, 0.2)), steps=10**6, group_size=group,
        prompts_per_step=len(prompts),
        max_completion_tokens=n_new, max_seq_len=length, kl=KLConfig(coef=beta), optimizer="adamw",
        lr_scale=LR_SCALE, train=StageTrainConfig(schedule=CONSTANT),
    )  # fmt: skip
    network = PolicyModel(work.model(DTYPES[kind]), banned_ids=banned)
    reference = frozen_reference(work.model(DTYPES[kind]), network) if beta else None
    worker = FixedLengthWorker(
        model_config=work.config(), dtype=str(DTYPES[kind]).removeprefix("torch."), tokenizer_path=folder, tasks=tasks,
        group_size=group, max_completion_tokens=n_new, max_seq_len=length, temperature=1.0,
        curriculum=Curriculum([0.0] * len(tasks), rule="uniform"),
    )  # fmt: skip
    train_policy(network, worker, config, reference=reference, callback=observe)


def sft(gate: Gate, folder: Path, kind: str, texts: work.Rows, rows: int, length: int) -> None:
    """Run steps of `fine_tune`, with a gate after each. `folder` is not read: the weights are those of `_workload.model`."""

    def observe(step: int, metrics: dict[str, float]) -> None:
        gate(
            {
                "parts": _parts(metrics), "loss": metrics["nll"], "norm": metrics["grad_norm"],
                "tokens": int(metrics["loss_tokens"]),
            }
        )  # fmt: skip

    examples = []
    for ids in texts:
        mask = np.ones(len(ids), np.bool_)
        mask[0] = False
        examples.append(TokenizedExample(np.array(ids, np.int64), mask))
    config = SFTConfig(
        data={"epochs": 1e6, "seq_len": length, "batch_size": rows},
        optimizer="adamw",
        lr_scale=LR_SCALE,
        train=StageTrainConfig(schedule=CONSTANT),
    )
    fine_tune(PolicyModel(work.model(DTYPES[kind])), examples, config, pad_id=work.PAD, callback=observe)
