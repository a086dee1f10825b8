"""From a record of rollouts to what is learnt from it: rows with their streams, and an advantage for every token.

    record [R, T] of ids   ->   tokens, targets, loss_mask, sequence [R, T - 1], and beside the targets
                                behaviour_log_prob, version, advantage (and value_target, reference_log_prob, old_value)

Where the algorithms differ is a baseline and a few factors (`objectives/llm_policy.py`); who is compared with whom is the
same for all: the K answers to one task.

The subtle part is what was cut off. An answer that ran into the limit has no end: nothing says what would have come of it.
Its reward is what the verifier says of what there is (nearly always 0), and it counts like any other; `overlong` lets the
reward fall softly before the limit instead (DAPO), so that length is told from wrongness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.align.rl.rollout import Rollouts
from whorl.slots import Slot


@dataclass(frozen=True)
class Experience:
    """A record, copied out of its slot.

    part: rows with streams (see the top of this file); reward: [R], as verified; passed, finished: [R] bool; length: [R] ids
    sampled; task: [R]; redrawn, broken: counts.
    """

    batch: dict[str, Tensor]
    reward: Tensor
    passed: Tensor
    finished: Tensor
    length: Tensor
    task: Tensor
    resampled_groups: int
    failed_verifications: int

    @property
    def rows(self) -> int:
        return len(self.reward)


def read_rollouts(slot: Slot[Rollouts]) -> Experience:
    """What a slot holds; the columns that no row uses are cut off."""
    views = slot.tensors()
    length, prompt = views["length"].clone(), views["prompt_length"]
    stop = max(2, int(length.max()))
    ids = views["ids"][:, :stop]
    place = torch.arange(1, stop)
    inside = place < length[:, None]  # [R, stop - 1], of targets
    sampled = inside & (place >= prompt[:, None])
    rows = torch.arange(len(length))[:, None]
    zeros = torch.zeros(())
    part = {
        "tokens": torch.where(torch.arange(stop - 1) < length[:, None], ids[:, :-1], 0),
        "targets": torch.where(inside, ids[:, 1:], 0),
        "loss_mask": sampled,
        "sequence": torch.where(inside, rows, -1),
        "behaviour_log_prob": torch.where(sampled, views["behaviour_log_prob"][:, 1:stop], zeros),
        "version": torch.where(sampled, views["version"][:, 1:stop], 0),
    }
    return Experience(
        part,
        views["reward"].clone(),
        views["passed"].clone(),
        views["finished"].clone(),
        length - prompt,
        views["task"].clone(),
        int(views["resampled_groups"][0]),
        int(views["failed_verifications"][0]),
    )


def rollout_metrics(experience: Experience, group_size: int) -> dict[str, float]:
    """What a record says about how the policy does."""
    reward, passed = experience.reward, experience.passed
    length, groups = experience.length.float(), experience.reward.view(-1, group_size)
    wrong = ~passed

    def mean(of: Tensor, where: Tensor) -> float:
        return float(of[where].mean()) if where.any() else 0.0

    return {
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
    }
