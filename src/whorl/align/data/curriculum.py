"""Curriculum: samples tasks by their recent pass rates.

A group of completions of one task gives a signal through the differences of its rewards (GRPO). A group that is all
correct or all wrong gives none. With pass rate p the variance of the reward is p (1 - p), largest at one half. So
tasks are drawn with these weights:

    "uniform"      1                      the baseline
    "filter"       1 if 0 < p < 1         hard: neither always correct nor always wrong (in the recent attempts)
    "variance"     p (1 - p)              soft
    "easy_first"   p (1 - p), bounded     only tasks up to a difficulty; the bound rises once the hardest open tasks
                                          pass at `advance_rate`

Source of p (1 - p): Foster et al. 2025, arXiv:2502.12272. `resample` draws further groups in place of uninformative
ones: DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, the condition of equation 11).

The subtle points. A weight of 0 would be permanent, since only draws update an estimate. So no weight is below
`min_weight` of the maximum. Old attempts decay by `decay` with each new group, because the model has changed. An
unseen task counts as one half. The state is counts alone: the caller passes the generator, so a resumed run draws the
same tasks.

An item may also be a whole level of a generator: `probabilities` sum to 1.
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
MIN_COUNT = 1 / 16  # of an attempt; a smaller count becomes 0, so that "always correct" can become true again


class Curriculum:
    """Pass rates of n tasks, and draws from them.

    Args:
        difficulty: [n], any unit; used by "easy_first" only.
        rule: see the top of this file.
        advance_rate: pass rate of the hardest open tasks at which harder ones open.
        decay: in (0, 1]; weight of a group's attempts when the next group of the task is recorded.
        min_weight: in (0, 1]; least weight, relative to the largest weight of the rule.

    passed, failed: [n] decayed counts. n_open_levels: number of open difficulties.

    Raises:
        ConfigError: no task, a difficulty that is not finite, or an argument out of range.
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
            raise ConfigError("difficulty must be one finite number per task", expected="at least one task")
        if rule not in get_args(CurriculumRule):
            raise ConfigError(f"rule is {rule!r}", expected=one_of(rule, get_args(CurriculumRule)))
        for name, value in (("decay", decay), ("min_weight", min_weight), ("advance_rate", advance_rate)):
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
        """Return [n] pass rates from the recent attempts plus one half-passed attempt."""
        return (self.passed + 0.5) / (self.passed + self.failed + 1.0)

    def is_open(self) -> NDArray[np.bool_]:
        """Return [n] whether a task may be drawn: its difficulty is within the bound."""
        allowed: NDArray[np.bool_] = self.difficulty <= self._levels[self.n_open_levels - 1]
        return allowed

    def weights(self) -> NDArray[np.float64]:
        """Return [n] weights in [0, 1]: 0 for closed tasks, at least `min_weight` for the others."""
        p = self.pass_rates()
        if self.rule == "uniform":
            weight = np.ones(len(p))
        elif self.rule == "filter":
            weight = ((self.passed > 0) == (self.failed > 0)).astype(np.float64)  # both, or not seen yet
        else:
            weight = 4 * p * (1 - p)
        return np.where(self.is_open(), np.maximum(weight, self.min_weight), 0.0)

    def probabilities(self) -> NDArray[np.float64]:
        """Return [n] `weights`, normalized to sum to 1."""
        weight = self.weights()
        shares: NDArray[np.float64] = weight / weight.sum()
        return shares

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        """Return n tasks, each at most once; if fewer are open, all appear once before any appears twice.

        Sampling without replacement in proportion to the weights: the n largest of log weight + Gumbel noise
        (Efraimidis and Spirakis 2006).
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
        """Record a group of `n_attempts` completions of a task, of which `pass_rate` passed.

        Raises:
            ValueError: no such task, or impossible numbers.
        """
        if not 0 <= task < len(self) or not 0 <= pass_rate <= 1 or n_attempts < 0:
            raise ValueError(f"task {task} of {len(self)}: pass rate {pass_rate} of {n_attempts} attempts")
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
            # One passed task is not enough: half of the level's tasks, or eight, must have been tried.
            enough = (tried > 0).sum() >= min(8, math.ceil(len(tried) / 2))
            if not enough or passed.sum() < self.advance_rate * tried.sum():
                return
            self.n_open_levels += 1

    def copy(self) -> Curriculum:
        """Return an independent copy."""
        other = copy.copy(self)
        other.passed, other.failed = self.passed.copy(), self.failed.copy()
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, for `load_state_dict`."""
        return {
            "passed": self.passed.tolist(),
            "failed": self.failed.tolist(),
            "reach": self.n_open_levels,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a curriculum of the same tasks.

        Raises:
            DataError: another number of tasks, or an invalid state; nothing changes then.
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
                f"the curriculum's state has {len(passed)} tasks, and there are {len(self)}",
                do="resume with the tasks of the original run",
            )
        valid = all((counts >= 0).all() and np.isfinite(counts).all() for counts in (passed, failed))
        if not valid or not 1 <= reach <= len(self._levels):
            raise DataError("the curriculum's state has impossible counts", do="use another checkpoint")
        self.passed, self.failed, self.n_open_levels = passed, failed, reach


@dataclass(frozen=True)
class Resampled(Generic[G]):
    """informative, uninformative: groups with and without a learning signal, in order of arrival.

    all_passed, all_failed, all_equal: number of uninformative groups by kind.
    """

    informative: list[G]
    uninformative: list[G]
    all_passed: int
    all_failed: int
    all_equal: int


def informative(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ, so that its advantages are not all 0."""
    return len(rewards) > 0 and min(rewards) < max(rewards)


def resample(
    curriculum: Curriculum,
    rollout: Callable[[list[int]], Sequence[tuple[G, Sequence[float]]]],
    n_groups: int,
    rng: np.random.Generator,
    *,
    max_rounds: int = 4,
) -> Resampled[G]:
    """Roll out groups until `n_groups` are informative or the rounds are used up; every group is recorded.

    Args:
        rollout: takes tasks, returns for each its group and the group's rewards, in [0, 1].
        max_rounds: of draws; bounds the cost if the model passes every task.
    """
    informative_groups: list[G] = []
    uninformative_groups: list[G] = []
    counts = {"passed": 0, "failed": 0, "equal": 0}
    for _ in range(max_rounds):
        if len(informative_groups) >= n_groups:
            break
        tasks = curriculum.draw(n_groups - len(informative_groups), rng)
        for task, (group, rewards) in zip(tasks, rollout(tasks), strict=True):
            mean = sum(rewards) / max(len(rewards), 1)
            curriculum.update(task, min(max(mean, 0.0), 1.0), len(rewards))
            if informative(rewards):
                informative_groups.append(group)
            else:
                uninformative_groups.append(group)
                counts["passed" if mean >= 1 else "failed" if mean <= 0 else "equal"] += 1
    return Resampled(
        informative_groups, uninformative_groups, counts["passed"], counts["failed"], counts["equal"]
    )
