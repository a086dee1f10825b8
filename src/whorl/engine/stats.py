"""What an engine has done: counters since it began, and its recent steps one by one.

Counters only ever grow, so that whoever looks twice knows what happened in between; a page that draws the batch's timeline
reads `recent`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from whorl.engine.scheduling.scheduler import Schedule

RECENT = 512


@dataclass(frozen=True)
class Step:
    """One step. at: seconds, by the engine's clock; model, sample: seconds of the two; the rest of `seconds` is our own."""

    at: float
    prefill_tokens: int
    decode_tokens: int
    sequences: int
    waiting: int
    preempted: int
    seconds: float
    model: float
    sample: float


@dataclass
class Stats:
    """Counters, and the last `RECENT` steps."""

    steps: int = 0
    prompt_tokens: int = 0  # positions of prompts that were computed
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0  # drafts that were right
    preemptions: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT))

    def step(
        self,
        at: float,
        schedule: Schedule,
        n_decode: int,
        *,
        model: float,
        sample: float,
        seconds: float,
        running: int,
        waiting: int,
    ) -> None:
        """Counts one step."""
        self.steps += 1
        n_prefill = schedule.tokens - n_decode
        self.prompt_tokens += n_prefill
        self.preemptions += len(schedule.preempted)
        self.seconds += seconds
        self.model_seconds += model
        self.sample_seconds += sample
        self.recent.append(
            Step(at, n_prefill, n_decode, running, waiting, len(schedule.preempted), seconds, model, sample)
        )
