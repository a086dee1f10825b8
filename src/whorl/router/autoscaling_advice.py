"""Advice on the number of replicas: a pure function from a window of counters to a number with reasons.

Queue depth and goodput are both needed. A persistent queue means that requests arrive faster than they are served. A short
queue is Poisson noise, and more replicas would idle. Goodput is the share of requests that meet the SLO (Zhong et al. 2024,
"DistServe", arXiv 2401.09670). It falls when replicas are missing, but also when the SLO is tighter than an idle replica
can meet. In the second case more replicas do not help, and the advice states it.

While a queue persists, requests finished per replica and second measure the capacity mu. For an arrival rate lambda and a
queue q that is to be drained within `drain_seconds` at `target_utilization`:

    required = ceil((lambda + q / drain_seconds) / (target_utilization mu)),     at most twice the current number

Scale-up is fast and scale-down is slow, because users notice too few replicas. Scale-down removes one replica at a time,
after a long period without a queue, if one replica fewer could run the peak number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class PoolSnapshot:
    """The pool at one moment.

    time: seconds; queue, running: current requests; arrived, finished, within_slo: running totals.
    """

    time: float
    replicas: int
    queue: int
    running: int
    arrived: int
    finished: int
    within_slo: int


class AutoscalingConfig(BaseModel):
    """Targets and limits of the advice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_goodput: float = Field(
        default=0.95, gt=0, le=1, description="required share of requests within the SLO"
    )
    queue_per_replica: float = Field(
        default=2.0, gt=0, description="waiting requests per replica that trigger a scale-up"
    )
    max_num_seqs: int = Field(default=32, ge=1, description="concurrent requests per replica")
    scale_up_seconds: float = Field(default=60.0, gt=0, description="seconds that the condition must last")
    scale_down_seconds: float = Field(default=600.0, gt=0, description="seconds without a queue")
    drain_seconds: float = Field(default=60.0, gt=0, description="seconds to drain a queue")
    target_utilization: float = Field(
        default=0.8, gt=0, le=1, description="used share of a replica's capacity"
    )
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class ScalingAdvice:
    """replicas: the advised number; change: the difference to the current number; reasons: short texts."""

    replicas: int
    change: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        n = abs(self.change)
        head = f"{n} {'more' if self.change > 0 else 'fewer'}" if n else "no change"
        return f"{head}: " + ", ".join(self.reasons)


def goodput(first: PoolSnapshot, last: PoolSnapshot) -> float | None:
    """Return the share of requests within the SLO that finished between two snapshots; None if none finished."""
    finished = last.finished - first.finished
    return (last.within_slo - first.within_slo) / finished if finished > 0 else None


def advise(window: Sequence[PoolSnapshot], config: AutoscalingConfig | None = None) -> ScalingAdvice:
    """Return advice from snapshots in order, oldest first. Snapshots older than both time spans are ignored."""
    config = config or AutoscalingConfig()
    if not window:
        return ScalingAdvice(config.min_replicas, 0, ("no snapshots yet",))
    last = window[-1]
    now = last.replicas
    if now < config.min_replicas:
        return _clamped_advice(
            config.min_replicas,
            now,
            config,
            f"{now} serving, minimum {config.min_replicas}",
            capped=False,
        )
    recent = _last_seconds(window, config.scale_up_seconds)
    if recent is None:
        return ScalingAdvice(
            now, 0, (f"observed for {last.time - window[0].time:.0f} s of {config.scale_up_seconds:.0f}",)
        )
    return _scale_up(recent, config) or _scale_down(window, config) or _keep_replicas(recent, config)


def _last_seconds(window: Sequence[PoolSnapshot], seconds: float) -> list[PoolSnapshot] | None:
    """Return the snapshots of the last `seconds`; None if the window is shorter."""
    begin = window[-1].time - seconds
    if window[0].time > begin:
        return None
    return [s for s in window if s.time >= begin]


def _scale_up(recent: list[PoolSnapshot], config: AutoscalingConfig) -> ScalingAdvice | None:
    first, last = recent[0], recent[-1]
    now, seconds = max(1, last.replicas), last.time - first.time
    least = min(s.queue for s in recent)
    attained = goodput(first, last)
    low_goodput = attained is not None and attained < config.min_goodput
    long_queue = least >= config.queue_per_replica * now
    if not long_queue and not (low_goodput and least > 0):
        return None
    reasons = [f"queue of {last.queue}" + (f", at least {least}" if least < last.queue else "")]
    reasons[0] += f" for {seconds:.0f} s"
    if low_goodput:
        reasons.append(f"goodput {attained:.2f} < {config.min_goodput:g}")
    done = (last.finished - first.finished) / seconds / now if seconds > 0 else 0.0
    if done == 0:
        return _clamped_advice(
            now + 1, now, config, *reasons, "no request finished, so the capacity is unknown"
        )
    rate = (last.arrived - first.arrived) / seconds + last.queue / config.drain_seconds
    reasons.append(f"{rate:.2g}/s required, {done:.2g}/s per replica")
    return _clamped_advice(
        max(now + 1, math.ceil(rate / (config.target_utilization * done))), now, config, *reasons
    )


def _scale_down(window: Sequence[PoolSnapshot], config: AutoscalingConfig) -> ScalingAdvice | None:
    quiet = _last_seconds(window, config.scale_down_seconds)
    if quiet is None or any(s.queue for s in quiet):
        return None
    now, peak = quiet[-1].replicas, max(s.running for s in quiet)
    attained = goodput(quiet[0], quiet[-1])
    if now <= max(1, config.min_replicas) or (attained is not None and attained < config.min_goodput):
        return None
    if peak > config.target_utilization * config.max_num_seqs * (now - 1):
        return None
    return _clamped_advice(
        now - 1,
        now,
        config,
        f"no queue for {config.scale_down_seconds:.0f} s",
        f"at most {peak} running on {now} replicas",
    )


def _keep_replicas(recent: list[PoolSnapshot], config: AutoscalingConfig) -> ScalingAdvice:
    last, attained = recent[-1], goodput(recent[0], recent[-1])
    if attained is not None and attained < config.min_goodput:
        reason = f"goodput {attained:.2f} < {config.min_goodput:g} without a queue"
        return ScalingAdvice(
            last.replicas, 0, (reason, "requests are slow without queueing: more replicas would not help")
        )
    goodput_text = "no requests finished" if attained is None else f"goodput {attained:.2f}"
    return ScalingAdvice(last.replicas, 0, (f"queue of {last.queue}", goodput_text))


def _clamped_advice(
    required: int, now: int, config: AutoscalingConfig, *reasons: str, capped: bool = True
) -> ScalingAdvice:
    upper = min(config.max_replicas, 2 * now) if capped and now else config.max_replicas
    advised = max(config.min_replicas, min(required, max(upper, now)))
    capped_reason = (f"{required} required, {advised} allowed at once",) if required > advised else ()
    return ScalingAdvice(advised, advised - now, (*reasons, *capped_reason))
