"""The result of the planner: one run, and the numbers behind the choice. The step `plan` writes it as `plan.json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from whorl.train.job import Job


class TrainingPlan(BaseModel):
    """The chosen run.

    job: everything that decides the run, apart from the token set, which does not exist yet (`tokens` is empty).
    budget: as given. expected: parameters, tokens, FLOPs, bytes of memory, and with timing seconds and speed.
    arithmetic: lines that explain the choice. candidates: the best shapes, with expected bits per byte.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: Job
    budget: str
    expected: dict[str, int | float]
    arithmetic: list[str]
    candidates: list[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        return self.job.model.vocab_size
