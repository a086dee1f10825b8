"""Curriculum: which tasks come next, by how often each was passed of late.

A group of answers to one task teaches through the differences of their rewards (GRPO): all right or all wrong, it teaches
nothing, and its rollouts were paid for. With p the chance of passing, the variance of such a reward is p (1 - p), and so
is the size of what there is to learn; most at one half. So tasks are drawn with weights:

    "learnable"   p (1 - p)              soft: the more even the odds, the more often
    "filter"      1 if 0 < p < 1         hard: neither always right nor always wrong (of the tries remembered)
    "uniform"     1                      none: what the others are compared with

(Foster et al. 2025, "Learning to reason at the frontier of learnability", arXiv:2502.12272, for p (1 - p).) Each may be
joined by *easy to hard*: only tasks up to some difficulty are drawn at all, and the bound moves on once the hardest that
are open are passed at the rate `move_on`. And `resample` draws more groups in place of those that taught nothing, until
enough are left: DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, the condition beside equation 11).

The subtle parts. A weight of nought would be for ever, as only draws change an estimate; so none falls below `floor` of
the highest there is, and a task that was too hard is looked at again. Old tries fade by `memory` with each new group, as
the model that made them is gone. An unseen task counts as one half: what nobody knows is worth a try. And the generator
is made anew from (seed, number of the draw), so that what is saved is numbers alone, and a run that went on draws what
one that never stopped would have drawn.

What is drawn may be a task, or a whole level of a generator: `shares` gives weights that sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError, DataError
from whorl.runs.seeds import numpy_rng

Rule = Literal["learnable", "filter", "uniform"]
G = TypeVar("G")
FORGOTTEN = 1 / 16  # of a try: what has faded below it is gone, so that "always right" can be true again


class Curriculum:
    """Pass rates of n tasks, and draws from them.

    Args:
        difficulty: [n], in any unit; used by easy to hard alone.
        seed: of the draws.
        rule: see the top of this file.
        move_on: the pass rate of the hardest open tasks at which harder ones open; None opens all at once.
        memory: in (0, 1]: what a group's tries count for when the task's next group is recorded.
        floor: in (0, 1]: the least weight, as a part of the highest that the rule can give.

    passed, failed: [n] faded counts; drawn: how many draws were made; reach: how many of the distinct difficulties are open.

    Raises:
        ConfigError: no task, a difficulty that is no number, or an argument out of its range.
    """

    def __init__(
        self,
        difficulty: Sequence[float],
        *,
        seed: int = 0,
        rule: Rule = "learnable",
        move_on: float | None = None,
        memory: float = 0.7,
        floor: float = 0.02,
    ) -> None:
        self.difficulty = np.asarray(difficulty, dtype=np.float64)
        if self.difficulty.ndim != 1 or not len(self.difficulty) or not np.isfinite(self.difficulty).all():
            raise ConfigError("difficulty must be one finite number a task", expected="at least one task")
        if rule not in ("learnable", "filter", "uniform"):
            raise ConfigError(f"rule is {rule!r}", expected="learnable, filter or uniform")
        for name, value in (("memory", memory), ("floor", floor)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}", expected="above 0, up to 1")
        if move_on is not None and not 0 < move_on <= 1:
            raise ConfigError(f"move_on is {move_on}", expected="above 0, up to 1; or none")
        self.seed, self.rule, self.move_on, self.memory, self.floor = seed, rule, move_on, memory, floor
        self.passed = np.zeros(len(self.difficulty))
        self.failed = np.zeros(len(self.difficulty))
        self.drawn = 0
        self._steps = np.unique(self.difficulty)
        self.reach = 1 if move_on is not None else len(self._steps)

    def __len__(self) -> int:
        return len(self.difficulty)

    def rates(self) -> NDArray[np.float64]:
        """[n] pass rate of each task, by the tries remembered and one more that was half passed."""
        return (self.passed + 0.5) / (self.passed + self.failed + 1.0)

    def open(self) -> NDArray[np.bool_]:
        """[n] whether a task may be drawn: it is no harder than the bound."""
        allowed: NDArray[np.bool_] = self.difficulty <= self._steps[self.reach - 1]
        return allowed

    def weights(self) -> NDArray[np.float64]:
        """[n] in [0, 1]: 0 for tasks that are not open, at least `floor` for the others."""
        p = self.rates()
        if self.rule == "learnable":
            weight = 4 * p * (1 - p)
        elif self.rule == "filter":
            weight = ((self.passed > 0) == (self.failed > 0)).astype(np.float64)  # both, or not seen yet
        else:
            weight = np.ones(len(p))
        return np.where(self.open(), np.maximum(weight, self.floor), 0.0)

    def shares(self) -> NDArray[np.float64]:
        """[n] `weights`, summing to 1."""
        weight = self.weights()
        shares: NDArray[np.float64] = weight / weight.sum()
        return shares

    def draw(self, n: int) -> list[int]:
        """The next n tasks, each at most once; where fewer are open, all of them once before any comes twice.

        The chance to come first is a task's share, and so on among those that are left (the n largest of log weight +
        Gumbel noise: Efraimidis and Spirakis 2006).
        """
        rng = numpy_rng(self.seed, "curriculum", self.drawn)
        self.drawn += 1
        weight = self.weights()
        (candidates,) = weight.nonzero()
        logs = np.log(weight[candidates])
        chosen: list[int] = []
        while len(chosen) < n:
            keys = logs + rng.gumbel(size=len(candidates))
            order = np.argsort(-keys, kind="stable")[: n - len(chosen)]
            chosen += candidates[order].tolist()
        return chosen

    def record(self, task: int, passed: float, tried: int) -> None:
        """A group of `tried` answers to a task, of which `passed` passed (or whose rewards in [0, 1] have that sum).

        Raises:
            ValueError: there is no such task, or the counts cannot be.
        """
        if not 0 <= task < len(self) or not 0 <= passed <= tried:
            raise ValueError(f"task {task} of {len(self)}: {passed} passed of {tried}")
        if not tried:
            return
        for counts, new in ((self.passed, passed), (self.failed, tried - passed)):
            faded = self.memory * counts[task]
            counts[task] = new + (faded if faded >= FORGOTTEN else 0.0)
        self._move_on()

    def _move_on(self) -> None:
        while self.move_on is not None and self.reach < len(self._steps):
            hardest = self.difficulty == self._steps[self.reach - 1]
            passed, tried = self.passed[hardest], (self.passed + self.failed)[hardest]
            # One lucky task says nothing of its level: half of the level's tasks, or eight, must have been tried.
            enough = (tried > 0).sum() >= min(8, math.ceil(len(tried) / 2))
            if not enough or passed.sum() < self.move_on * tried.sum():
                return
            self.reach += 1

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON can hold it."""
        return {
            "passed": self.passed.tolist(),
            "failed": self.failed.tolist(),
            "drawn": self.drawn,
            "reach": self.reach,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state` of the same tasks.

        Raises:
            DataError: it is of another number of tasks, or no such state; nothing is changed then.
        """
        try:
            passed = np.array(state["passed"], dtype=np.float64)
            failed = np.array(state["failed"], dtype=np.float64)
            drawn, reach = int(state["drawn"]), int(state["reach"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the curriculum's state cannot be read: {error!r}",
                expected="passed, failed, drawn and reach",
            ) from error
        shape = self.difficulty.shape
        if passed.shape != shape or failed.shape != shape:
            raise DataError(
                f"the curriculum's state is of {len(passed)} tasks, and there are {len(self)}",
                do="go on with the tasks that the run began with",
            )
        sound = all((counts >= 0).all() and np.isfinite(counts).all() for counts in (passed, failed))
        if not sound or drawn < 0 or not 1 <= reach <= len(self._steps):
            raise DataError("the curriculum's state has counts that cannot be", do="take another checkpoint")
        self.passed, self.failed, self.drawn, self.reach = passed, failed, drawn, reach


@dataclass(frozen=True)
class Resampled(Generic[G]):
    """Groups that teach; how many were rolled out, and how many were all right, all wrong, or all the same in between."""

    groups: list[G]
    rolled: int
    all_passed: int
    all_failed: int
    all_equal: int


def informative(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that its advantages are not all nought."""
    return len(rewards) > 0 and min(rewards) < max(rewards)


def resample(
    curriculum: Curriculum,
    roll: Callable[[list[int]], Sequence[tuple[G, Sequence[float]]]],
    wanted: int,
    *,
    most_rounds: int = 4,
) -> Resampled[G]:
    """Roll out groups until `wanted` of them teach, or the rounds are used up; every group is recorded.

    Args:
        roll: takes tasks, returns for each its group and the group's rewards, in [0, 1].
        most_rounds: of draws. A model that passes everything would go on for ever; what there is, is returned.
    """
    groups: list[G] = []
    rolled = all_passed = all_failed = all_equal = 0
    for _ in range(most_rounds):
        tasks = curriculum.draw(wanted - len(groups))
        for task, (group, rewards) in zip(tasks, roll(tasks), strict=True):
            rolled += 1
            curriculum.record(task, min(max(sum(rewards), 0.0), len(rewards)), len(rewards))
            if informative(rewards):
                groups.append(group)
            elif len(rewards) and rewards[0] >= 1:
                all_passed += 1
            elif not len(rewards) or rewards[0] <= 0:
                all_failed += 1
            else:
                all_equal += 1
        if len(groups) == wanted:
            break
    return Resampled(groups, rolled, all_passed, all_failed, all_equal)
