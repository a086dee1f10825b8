"""The result of the planner: one run, and the numbers behind the choice. The step `plan` writes it as `plan.json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from whorl.plan.dial.probe import Probe
from whorl.plan.laws.law import ScalingLaw, fitted_law
from whorl.train.job import Job
from whorl.train.profiling.step_timer import StepTiming


class Evidence(NamedTuple):
    """A law, and the function that measures the user's text for the chosen job, to correct it (`dial/probe.py`)."""

    law: ScalingLaw = fitted_law()
    probe: Callable[[Job, StepTiming | None], Probe | None] | None = None


class TrainingPlan(BaseModel):
    """The chosen run.

    job: everything that decides the run, apart from the token set, which does not exist yet (`tokens` is empty).
    budget: as given. expected: parameters, tokens, FLOPs, bytes of memory, and with timing seconds and speed.
    arithmetic: lines that explain the choice. candidates: the best shapes, with expected bits per byte.
    probe: what it measured on the text, if the law was corrected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: Job
    budget: str
    expected: dict[str, int | float]
    arithmetic: list[str]
    candidates: list[dict[str, Any]]
    probe: Probe | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        return self.job.model.vocab_size
