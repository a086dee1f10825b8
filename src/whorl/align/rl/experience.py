"""Rollout batches as training data: rows with aligned streams.

    ids [R, T]   ->   tokens, targets, loss_mask, sequence [R, T - 1], and aligned with the targets
                      behaviour_log_prob, version, advantage (and value_target, reference_log_prob, old_value)

Algorithms differ in a baseline and a few factors (`objectives/llm_policy.py`). Every one of them compares the K
completions of one task.

The subtle point is truncation. A completion that reached the length limit has no end. Its reward is the verifier's
result for the truncated text (almost always 0), and it counts like any other. With `overlong_buffer` the reward falls
gradually before the limit (DAPO), which separates length from wrongness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.align.rl.rollout import ROLLOUT_DTYPES, Rollouts
from whorl.slots import Slot

COUNTS = ("tool_calls", "malformed_calls", "env_errors")


@dataclass(frozen=True)
class Experience:
    """A rollout batch, copied out of its slot.

    batch: rows with streams (see the top of this file). reward: [R]. passed, finished: [R] bool. length: [R] sampled
    ids. task: [R] index. reason: [R] of the rewards. turns, tool_calls, malformed_calls, env_errors: [R] counts.
    resampled_groups, failed_verifications: counts. dtype: of the sampler. dtype_difference: of its log-probabilities to
    the learner's, 0 where they were not compared.
    """

    batch: dict[str, Tensor]
    reward: Tensor
    passed: Tensor
    finished: Tensor
    length: Tensor
    task: Tensor
    turns: Tensor
    tool_calls: Tensor
    malformed_calls: Tensor
    env_errors: Tensor
    resampled_groups: int
    failed_verifications: int
    reason: list[str]
    dtype: str
    dtype_difference: float

    @property
    def rows(self) -> int:
        return len(self.reward)


def read_rollouts(slot: Slot[Rollouts]) -> Experience:
    """Return the content of a slot, without columns that no row uses."""
    views = slot.tensors()
    length = views["length"].clone()
    width = max(2, int(length.max()))
    ids = views["ids"][:, :width]
    column = torch.arange(1, width)
    valid = column < length[:, None]  # [R, stop - 1], of targets
    sampled = valid & views["action_mask"][:, 1:width]
    rows = torch.arange(len(length))[:, None]
    zeros = torch.zeros(())
    batch = {
        "tokens": torch.where(torch.arange(width - 1) < length[:, None], ids[:, :-1], 0),
        "targets": torch.where(valid, ids[:, 1:], 0),
        "loss_mask": sampled,
        "sequence": torch.where(valid, rows, -1),
        "behaviour_log_prob": torch.where(sampled, views["behaviour_log_prob"][:, 1:width], zeros),
        "version": torch.where(sampled, views["version"][:, 1:width], 0),
    }
    return Experience(
        batch,
        views["reward"].clone(),
        views["passed"].clone(),
        views["finished"].clone(),
        sampled.sum(1),
        views["task"].clone(),
        views["turns"].clone(),
        views["tool_calls"].clone(),
        views["malformed_calls"].clone(),
        views["env_errors"].clone(),
        int(views["resampled_groups"][0]),
        int(views["failed_verifications"][0]),
        [bytes(row.tolist()).rstrip(b"\0").decode("utf-8", "ignore") for row in views["reason"]],
        ROLLOUT_DTYPES[int(views["dtype"][0])],
        float(views["dtype_difference"][0]),
    )


def rollout_metrics(experience: Experience, group_size: int, *, multi_turn: bool = False) -> dict[str, float]:
    """Return the metrics of a rollout batch. multi_turn: also those of an environment."""
    reward, passed = experience.reward, experience.passed
    length, groups = experience.length.float(), experience.reward.view(-1, group_size)
    wrong = ~passed

    def mean(of: Tensor, where: Tensor) -> float:
        return float(of[where].mean()) if where.any() else 0.0

    counts = {name: float(getattr(experience, name).sum()) for name in COUNTS}
    environment = {"turns/mean": float(experience.turns.float().mean()), **counts}
    return {
        **(environment if multi_turn else {}),
        "reward": float(reward.mean()),
        "accuracy": float(passed.float().mean()),
        "pass_at_k": float(passed.view(-1, group_size).any(1).float().mean()),
        "zero_std_groups": float((groups == groups[:, :1]).all(1).sum()),
        "resampled_groups": float(experience.resampled_groups),
        "verifier_errors": float(experience.failed_verifications),
        "truncated_fraction": float((~experience.finished).float().mean()),
        "empty_completions": float((experience.length <= 1).sum()),
        "completion_length/mean": float(length.mean()),
        "completion_length/correct": mean(length, passed),
        "completion_length/incorrect": mean(length, wrong),
        f"rollout_dtype/{experience.dtype}": 1.0,
    }
