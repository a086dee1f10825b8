"""How many replicas there should be: from a window of counts to advice with its reasons. A pure function; nobody is obliged.

Queue depth and goodput are looked at together, since each alone deceives. A queue that stands is work that arrives faster
than it is done; but a queue that flashes up is Poisson's, and more machines would only idle between the flashes. Goodput
(the share of requests that met their objective: Zhong et al. 2024, "DistServe", arXiv 2401.09670) falls for want of them,
but also because the objective is tighter than an idle replica could keep: then more buy nothing, and the advice says so.

How many: while a queue stands, what is finished per replica and second is its capacity mu. With arrivals of lambda and a
queue of q to be worked off within `drain` seconds, at no more than `fill` of the capacity,

    wanted = ceil((lambda + q / drain) / (fill mu)),     never more than twice as many as now

Up is quick and down is slow: too few is what people feel. Down goes one at a time, after a long calm, and only if what runs
at the busiest moment would fit into one fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class PoolSnapshot:
    """The fleet at one moment. time: seconds; queue, running: requests now; arrived, finished, good: running totals."""

    time: float
    replicas: int
    queue: int
    running: int
    arrived: int
    finished: int
    within_slo: int


class AutoscalingConfig(BaseModel):
    """What the advice wants."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_goodput: float = Field(
        default=0.95, gt=0, le=1, description="share of requests that meet the objective"
    )
    queue_per_replica: float = Field(
        default=2.0, gt=0, description="requests waiting, a replica, that are too many"
    )
    max_num_seqs: int = Field(default=32, ge=1, description="requests that a replica runs at once")
    scale_up_seconds: float = Field(default=60.0, gt=0, description="seconds that a want must last")
    scale_down_seconds: float = Field(default=600.0, gt=0, description="seconds that a calm must last")
    drain_seconds: float = Field(
        default=60.0, gt=0, description="seconds in which a queue should be worked off"
    )
    target_utilization: float = Field(
        default=0.8, gt=0, le=1, description="of a replica's capacity that may be used"
    )
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class ScalingAdvice:
    """replicas: how many there should be; change: against now; reasons: why, or why not."""

    replicas: int
    change: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        n = abs(self.change)
        head = f"{n} {'more' if self.change > 0 else 'fewer'}" if n else "as many as now"
        return f"{head}: " + ", ".join(self.reasons)


def goodput(first: PoolSnapshot, last: PoolSnapshot) -> float | None:
    """Of the requests finished between two snapshots; None where there were none."""
    finished = last.finished - first.finished
    return (last.within_slo - first.within_slo) / finished if finished > 0 else None


def advise(window: Sequence[PoolSnapshot], config: AutoscalingConfig | None = None) -> ScalingAdvice:
    """Advice from snapshots in their order, oldest first; what is older than both spans is not looked at."""
    config = config or AutoscalingConfig()
    if not window:
        return ScalingAdvice(config.min_replicas, 0, ("nothing was seen yet",))
    last = window[-1]
    now = last.replicas
    if now < config.min_replicas:
        return _clamped_advice(
            config.min_replicas,
            now,
            config,
            f"{now} serve and {config.min_replicas} is the least that was asked for",
            capped=False,
        )
    recent = _last_seconds(window, config.scale_up_seconds)
    if recent is None:
        return ScalingAdvice(
            now, 0, (f"seen for {last.time - window[0].time:.0f} s of {config.scale_up_seconds:.0f}",)
        )
    return _scale_up(recent, config) or _scale_down(window, config) or _keep_replicas(recent, config)


def _last_seconds(window: Sequence[PoolSnapshot], seconds: float) -> list[PoolSnapshot] | None:
    """The snapshots of the last `seconds`; None where the window is shorter."""
    begin = window[-1].time - seconds
    if window[0].time > begin:
        return None
    return [s for s in window if s.time >= begin]


def _scale_up(recent: list[PoolSnapshot], config: AutoscalingConfig) -> ScalingAdvice | None:
    first, last = recent[0], recent[-1]
    now, seconds = max(1, last.replicas), last.time - first.time
    least = min(s.queue for s in recent)
    met = goodput(first, last)
    poor = met is not None and met < config.min_goodput
    deep = least >= config.queue_per_replica * now
    if not deep and not (poor and least > 0):
        return None
    reasons = [f"queue {last.queue} deep" + (f", never below {least}" if least < last.queue else "")]
    reasons[0] += f" for {seconds:.0f} s"
    if poor:
        reasons.append(f"goodput {met:.2f} < {config.min_goodput:g}")
    done = (last.finished - first.finished) / seconds / now if seconds > 0 else 0.0
    if done == 0:
        return _clamped_advice(
            now + 1, now, config, *reasons, "nothing finished, so what a replica can do is unknown"
        )
    rate = (last.arrived - first.arrived) / seconds + last.queue / config.drain_seconds
    reasons.append(f"{rate:.2g} a second to do, {done:.2g} a replica done")
    return _clamped_advice(
        max(now + 1, math.ceil(rate / (config.target_utilization * done))), now, config, *reasons
    )


def _scale_down(window: Sequence[PoolSnapshot], config: AutoscalingConfig) -> ScalingAdvice | None:
    calm = _last_seconds(window, config.scale_down_seconds)
    if calm is None or any(s.queue for s in calm):
        return None
    now, busiest = calm[-1].replicas, max(s.running for s in calm)
    met = goodput(calm[0], calm[-1])
    if now <= max(1, config.min_replicas) or (met is not None and met < config.min_goodput):
        return None
    if busiest > config.target_utilization * config.max_num_seqs * (now - 1):
        return None
    return _clamped_advice(
        now - 1,
        now,
        config,
        f"no queue for {config.scale_down_seconds:.0f} s",
        f"never more than {busiest} running on {now} replicas",
    )


def _keep_replicas(recent: list[PoolSnapshot], config: AutoscalingConfig) -> ScalingAdvice:
    last, met = recent[-1], goodput(recent[0], recent[-1])
    if met is not None and met < config.min_goodput:
        why = f"goodput {met:.2f} < {config.min_goodput:g} though no queue stands"
        return ScalingAdvice(
            last.replicas, 0, (why, "the requests are slow in themselves: more replicas would not mend it")
        )
    told = "no requests finished" if met is None else f"goodput {met:.2f}"
    return ScalingAdvice(last.replicas, 0, (f"queue {last.queue}", told))


def _clamped_advice(
    wanted: int, now: int, config: AutoscalingConfig, *reasons: str, capped: bool = True
) -> ScalingAdvice:
    most = min(config.max_replicas, 2 * now) if capped and now else config.max_replicas
    held = max(config.min_replicas, min(wanted, max(most, now)))
    more = (f"{wanted} would be needed, {held} is the most at once",) if wanted > held else ()
    return ScalingAdvice(held, held - now, (*reasons, *more))
