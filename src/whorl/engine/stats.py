"""Engine counters since the start, and its recent steps.

Counters only grow, so a client that reads twice can take differences. The timeline page reads `recent_steps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from whorl.engine.scheduler import Schedule

MAX_RECENT_STEPS = 512


@dataclass(frozen=True)
class StepStats:
    """One step. started: seconds by the engine's clock. model_seconds, sample_seconds: parts of `seconds`."""

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
    """Counters, and the last `MAX_RECENT_STEPS` steps."""

    steps: int = 0
    prompt_tokens: int = 0  # prompt positions computed
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts accepted
    n_preemptions: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0
    draft_seconds: float = 0.0  # of proposers
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    recent_steps: deque[StepStats] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_STEPS))

    @property
    def acceptance_rate(self) -> float:
        """Drafts accepted, as a fraction of the drafts made; 0 without drafts."""
        return self.accepted_tokens / max(1, self.drafted_tokens)

    @contextmanager
    def timed_drafts(self, clock: Callable[[], float]) -> Iterator[None]:
        """Add the time within the context to `draft_seconds`."""
        began = clock()
        yield
        self.draft_seconds += clock() - began

    def counters(self) -> dict[str, float]:
        """Return the numbers by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}

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
        """Add one step to the counters."""
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
