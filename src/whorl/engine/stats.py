"""What an engine has done: counters since it began, and its recent steps one by one.

Counters only ever grow, so that whoever looks twice knows what happened in between; a page that draws the batch's timeline
reads `recent`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from whorl.engine.scheduling.scheduler import Schedule

MAX_RECENT_STEPS = 512


@dataclass(frozen=True)
class StepStats:
    """One step. at: seconds, by the engine's clock; model, sample: seconds of the two; the rest of `seconds` is our own."""

    started: float
    prefill_tokens: int
    decode_tokens: int
    sequences: int
    waiting: int
    n_preempted: int
    seconds: float
    model_seconds: float
    sample_seconds: float


@dataclass
class EngineStats:
    """Counters, and the last `RECENT` steps."""

    steps: int = 0
    prompt_tokens: int = 0  # positions of prompts that were computed
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts that were right
    n_preemptions: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    recent_steps: deque[StepStats] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_STEPS))

    def record_step(
        self,
        started: float,
        schedule: Schedule,
        n_decode: int,
        *,
        model_seconds: float,
        sample_seconds: float,
        seconds: float,
        running: int,
        waiting: int,
    ) -> None:
        """Counts one step."""
        self.steps += 1
        n_prefill = schedule.tokens - n_decode
        self.prompt_tokens += n_prefill
        self.n_preemptions += len(schedule.preempted)
        self.seconds += seconds
        self.model_seconds += model_seconds
        self.sample_seconds += sample_seconds
        self.recent_steps.append(
            StepStats(
                started,
                n_prefill,
                n_decode,
                running,
                waiting,
                len(schedule.preempted),
                seconds,
                model_seconds,
                sample_seconds,
            )
        )
