"""Curriculum: which tasks come next, by how often each was passed of late.

A group of answers to one task teaches through the differences of their rewards (GRPO): all right or all wrong, it teaches
nothing, and its rollouts were paid for. With p the chance of passing, the variance of such a reward is p (1 - p), and so
is the size of what there is to learn; most at one half. So tasks are drawn with weights:

    "uniform"      1                      none: what the others are compared with
    "filter"       1 if 0 < p < 1         hard: neither always right nor always wrong (of the tries remembered)
    "variance"     p (1 - p)              soft: the more even the odds, the more often
    "easy_first"   p (1 - p), bounded     only tasks up to some difficulty; the bound moves on once the hardest that are
                                          open are passed at the rate `move_on`

(Foster et al. 2025, "Learning to reason at the frontier of learnability", arXiv:2502.12272, for p (1 - p).) And `resample`
draws more groups in place of those that taught nothing, until enough are left: DAPO's dynamic sampling (Yu et al. 2025,
arXiv:2503.14476, the condition beside equation 11).

The subtle parts. A weight of nought would be for ever, as only draws change an estimate; so none falls below `floor` of
the highest there is, and a task that was too hard is looked at again. Old tries fade by `memory` with each new group, as
the model that made them is gone. An unseen task counts as one half: what nobody knows is worth a try. And the state is
counts alone: the generator of a draw is passed in, so a run that went on draws what one that never stopped would have.

What is drawn may be a task, or a whole level of a generator: `shares` gives weights that sum to 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError, DataError, one_of

CurriculumRule = Literal["uniform", "filter", "variance", "easy_first"]
G = TypeVar("G")
MIN_COUNT = 1 / 16  # of a try: what has faded below it is gone, so that "always right" can be true again


class Curriculum:
    """Pass rates of n tasks, and draws from them.

    Args:
        difficulty: [n], in any unit; only "easy_first" looks at it.
        rule: see the top of this file.
        move_on: the pass rate of the hardest open tasks at which harder ones open.
        memory: in (0, 1]: what a group's tries count for when the task's next group is recorded.
        floor: in (0, 1]: the least weight, as a part of the highest that the rule can give.

    passed, failed: [n] faded counts; reach: how many of the distinct difficulties are open.

    Raises:
        ConfigError: no task, a difficulty that is no number, or an argument out of its range.
    """

    def __init__(
        self,
        difficulty: Sequence[float],
        *,
        rule: CurriculumRule = "variance",
        advance_rate: float = 0.75,
        decay: float = 0.7,
        min_weight: float = 0.02,
    ) -> None:
        self.difficulty = np.asarray(difficulty, dtype=np.float64)
        if self.difficulty.ndim != 1 or not len(self.difficulty) or not np.isfinite(self.difficulty).all():
            raise ConfigError("difficulty must be one finite number a task", expected="at least one task")
        if rule not in get_args(CurriculumRule):
            raise ConfigError(f"rule is {rule!r}", expected=one_of(rule, get_args(CurriculumRule)))
        for name, value in (("memory", decay), ("floor", min_weight), ("move_on", advance_rate)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}", expected="above 0, up to 1")
        self.rule, self.advance_rate, self.decay, self.min_weight = rule, advance_rate, decay, min_weight
        self.passed = np.zeros(len(self.difficulty))
        self.failed = np.zeros(len(self.difficulty))
        self._levels = np.unique(self.difficulty)
        self.n_open_levels = 1 if rule == "easy_first" else len(self._levels)

    def __len__(self) -> int:
        return len(self.difficulty)

    def pass_rates(self) -> NDArray[np.float64]:
        """[n] pass rate of each task, by the tries remembered and one more that was half passed."""
        return (self.passed + 0.5) / (self.passed + self.failed + 1.0)

    def is_open(self) -> NDArray[np.bool_]:
        """[n] whether a task may be drawn: it is no harder than the bound."""
        allowed: NDArray[np.bool_] = self.difficulty <= self._levels[self.n_open_levels - 1]
        return allowed

    def weights(self) -> NDArray[np.float64]:
        """[n] in [0, 1]: 0 for tasks that are not open, at least `floor` for the others."""
        p = self.pass_rates()
        if self.rule == "uniform":
            weight = np.ones(len(p))
        elif self.rule == "filter":
            weight = ((self.passed > 0) == (self.failed > 0)).astype(np.float64)  # both, or not seen yet
        else:
            weight = 4 * p * (1 - p)
        return np.where(self.is_open(), np.maximum(weight, self.min_weight), 0.0)

    def probabilities(self) -> NDArray[np.float64]:
        """[n] `weights`, summing to 1."""
        weight = self.weights()
        shares: NDArray[np.float64] = weight / weight.sum()
        return shares

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        """The next n tasks, each at most once; where fewer are open, all of them once before any comes twice.

        The chance to come first is a task's share, and so on among those that are left (the n largest of log weight +
        Gumbel noise: Efraimidis and Spirakis 2006).
        """
        weight = self.weights()
        (candidates,) = weight.nonzero()
        logs = np.log(weight[candidates])
        chosen: list[int] = []
        while len(chosen) < n:
            keys = logs + rng.gumbel(size=len(candidates))
            order = np.argsort(-keys, kind="stable")[: n - len(chosen)]
            chosen += candidates[order].tolist()
        return chosen

    def update(self, task: int, pass_rate: float, n_attempts: int = 8) -> None:
        """A group of `tried` answers to a task, of which the share `rate` passed.

        Raises:
            ValueError: there is no such task, or the numbers cannot be.
        """
        if not 0 <= task < len(self) or not 0 <= pass_rate <= 1 or n_attempts < 0:
            raise ValueError(f"task {task} of {len(self)}: passed at {pass_rate} of {n_attempts} tries")
        for counts, new in (
            (self.passed, pass_rate * n_attempts),
            (self.failed, (1 - pass_rate) * n_attempts),
        ):
            faded = self.decay * counts[task]
            counts[task] = new + (faded if faded >= MIN_COUNT else 0.0)
        self._advance()

    def _advance(self) -> None:
        while self.n_open_levels < len(self._levels):
            hardest = self.difficulty == self._levels[self.n_open_levels - 1]
            passed, tried = self.passed[hardest], (self.passed + self.failed)[hardest]
            # One lucky task says nothing of its level: half of the level's tasks, or eight, must have been tried.
            enough = (tried > 0).sum() >= min(8, math.ceil(len(tried) / 2))
            if not enough or passed.sum() < self.advance_rate * tried.sum():
                return
            self.n_open_levels += 1

    def copy(self) -> Curriculum:
        """Another that begins as this one is."""
        other = copy.copy(self)
        other.passed, other.failed = self.passed.copy(), self.failed.copy()
        return other

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, as JSON can hold it."""
        return {
            "passed": self.passed.tolist(),
            "failed": self.failed.tolist(),
            "reach": self.n_open_levels,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a curriculum of the same tasks.

        Raises:
            DataError: it is of another number of tasks, or no such state; nothing is changed then.
        """
        try:
            passed = np.array(state["passed"], dtype=np.float64)
            failed = np.array(state["failed"], dtype=np.float64)
            reach = int(state["reach"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the curriculum's state cannot be read: {error!r}",
                expected="passed, failed and reach",
            ) from error
        shape = self.difficulty.shape
        if passed.shape != shape or failed.shape != shape:
            raise DataError(
                f"the curriculum's state is of {len(passed)} tasks, and there are {len(self)}",
                do="go on with the tasks that the run began with",
            )
        sound = all((counts >= 0).all() and np.isfinite(counts).all() for counts in (passed, failed))
        if not sound or not 1 <= reach <= len(self._levels):
            raise DataError("the curriculum's state has counts that cannot be", do="take another checkpoint")
        self.passed, self.failed, self.n_open_levels = passed, failed, reach


@dataclass(frozen=True)
class Resampled(Generic[G]):
    """kept: groups that teach; aside: those that do not, in the order they came; and how many of these were all right,
    all wrong, or all the same in between."""

    informative: list[G]
    uninformative: list[G]
    all_passed: int
    all_failed: int
    all_equal: int


def informative(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that its advantages are not all nought."""
    return len(rewards) > 0 and min(rewards) < max(rewards)


def resample(
    curriculum: Curriculum,
    rollout: Callable[[list[int]], Sequence[tuple[G, Sequence[float]]]],
    n_groups: int,
    rng: np.random.Generator,
    *,
    max_rounds: int = 4,
) -> Resampled[G]:
    """Roll out groups until `wanted` of them teach, or the rounds are used up; every group is recorded.

    Args:
        roll: takes tasks, returns for each its group and the group's rewards, in [0, 1].
        most_rounds: of draws. A model that passes everything would go on for ever; what there is, is returned.
    """
    kept: list[G] = []
    aside: list[G] = []
    counts = {"passed": 0, "failed": 0, "equal": 0}
    for _ in range(max_rounds):
        if len(kept) >= n_groups:
            break
        tasks = curriculum.draw(n_groups - len(kept), rng)
        for task, (group, rewards) in zip(tasks, rollout(tasks), strict=True):
            mean = sum(rewards) / max(len(rewards), 1)
            curriculum.update(task, min(max(mean, 0.0), 1.0), len(rewards))
            if informative(rewards):
                kept.append(group)
            else:
                aside.append(group)
                counts["passed" if mean >= 1 else "failed" if mean <= 0 else "equal"] += 1
    return Resampled(kept, aside, counts["passed"], counts["failed"], counts["equal"])
