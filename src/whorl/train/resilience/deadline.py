"""The deadline of a run with a budget of time: behind its plan it decays earlier and ends on time.

The learning-rate schedule and the length of the rows are functions of the planned step v, from 0 to N. A run on time has
v = steps done. A run behind its plan advances v by a rate above 1 per step:

    rate = max(1, (N - v) t / (S - e))     t: seconds per step, recently; S: planned seconds; e: seconds so far

So the rest of the plateau and the decay are shortened in proportion, the learning rate is continuous, and the last step has
the planned one. If the machine becomes faster again, the rate returns to 1.

The seconds count from the start of the first life, compilation included. A resumed life continues with the seconds of its
checkpoint, without its own start and without the steps that a kill has lost: so kills do not put a run behind its plan. The
rate is a part of the checkpoint. Rank 0 reads the clock, and all ranks follow it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from time import monotonic

from whorl.parallel.process_group import ProcessGroup

TOLERANCE = 0.05  # of the planned seconds, before anything is shortened
MIN_CHANGE = 0.02  # of the rate
MIN_REST = 0.05  # of the steps done: what the rate leaves for the decay where time is over
CHECKS, WINDOW = 200, 8  # checks in a run on time; number of them in the recent speed


class Deadline:
    """The planned step as a function of the step number.

    Args:
        steps, seconds: of the plan; no seconds: no deadline. state: `state_dict` of a checkpoint.
    """

    def __init__(self, steps: int, seconds: float | None, state: Mapping[str, float] | None = None) -> None:
        self.planned_steps, self.planned_seconds = steps, seconds
        self.step, self.planned_at, self.rate = 0, 0.0, 1.0  # of the last change
        self.seconds = 0.0
        self._now: float | None = None if state else monotonic()
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        if state:
            self.step, self.seconds = int(state["step"]), state["seconds"]
            self.planned_at, self.rate = state["planned"], state["rate"]

    def state_dict(self) -> dict[str, float]:
        """Return JSON from which another life continues."""
        return {"step": self.step, "planned": self.planned_at, "rate": self.rate, "seconds": self.seconds}

    def planned(self, step: int) -> float:
        """Return the planned step of `step`; equal to it in a run on time."""
        return self.planned_at + (step - self.step) * self.rate

    @property
    def steps(self) -> int:
        """Number of steps at the present rate."""
        rest = (self.planned_steps - self.planned_at) / self.rate
        return self.step + math.ceil(rest - 1e-9)

    def follow(self, done: int, group: ProcessGroup) -> bool:
        """Read the clock after a step, and return whether the rate changed. Every rank calls this after every step."""
        now = monotonic()
        if self._now is not None:
            self.seconds += now - self._now
        self._now = now
        if self.planned_seconds is None or done >= self.steps or done % max(1, self.planned_steps // CHECKS):
            return False
        self.seconds = group.all_gather_scalars(self.seconds)[0][0]
        self._recent.append((done, self.seconds))
        if len(self._recent) < 3:
            return False
        (first, began), last = self._recent[0], self.planned(done)
        step_seconds, left = (self.seconds - began) / (done - first), self.planned_steps - last
        end = self.seconds + left / self.rate * step_seconds
        if self.rate == 1 and end <= (1 + TOLERANCE) * self.planned_seconds:
            return False
        rest = max((self.planned_seconds - self.seconds) / max(step_seconds, 1e-9), 1.0)
        rate = min(max(1.0, left / rest), max(self.rate, left / max(1.0, MIN_REST * done)))
        if abs(rate / self.rate - 1) < MIN_CHANGE:
            return False
        self.step, self.planned_at, self.rate = done, last, rate
        return True
