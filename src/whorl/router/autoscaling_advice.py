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
class Snapshot:
    """The fleet at one moment. time: seconds; queue, running: requests now; arrived, finished, good: running totals."""

    time: float
    replicas: int
    queue: int
    running: int
    arrived: int
    finished: int
    good: int


class Objectives(BaseModel):
    """What the advice wants."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    goodput: float = Field(default=0.95, gt=0, le=1, description="share of requests that meet the objective")
    queue: float = Field(default=2.0, gt=0, description="requests waiting, a replica, that are too many")
    sequences: int = Field(default=32, ge=1, description="requests that a replica runs at once")
    up: float = Field(default=60.0, gt=0, description="seconds that a want must last")
    down: float = Field(default=600.0, gt=0, description="seconds that a calm must last")
    drain: float = Field(default=60.0, gt=0, description="seconds in which a queue should be worked off")
    fill: float = Field(default=0.8, gt=0, le=1, description="of a replica's capacity that may be used")
    fewest: int = Field(default=1, ge=0)
    most: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class Advice:
    """replicas: how many there should be; change: against now; reasons: why, or why not."""

    replicas: int
    change: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        n = abs(self.change)
        head = f"{n} {'more' if self.change > 0 else 'fewer'}" if n else "as many as now"
        return f"{head}: " + ", ".join(self.reasons)


def goodput(first: Snapshot, last: Snapshot) -> float | None:
    """Of the requests finished between two snapshots; None where there were none."""
    finished = last.finished - first.finished
    return (last.good - first.good) / finished if finished > 0 else None


def advise(window: Sequence[Snapshot], want: Objectives | None = None) -> Advice:
    """Advice from snapshots in their order, oldest first; what is older than both spans is not looked at."""
    want = want or Objectives()
    if not window:
        return Advice(want.fewest, 0, ("nothing was seen yet",))
    last = window[-1]
    now = last.replicas
    if now < want.fewest:
        return _to(
            want.fewest,
            now,
            want,
            f"{now} serve and {want.fewest} is the least that was asked for",
            capped=False,
        )
    recent = _since(window, want.up)
    if recent is None:
        return Advice(now, 0, (f"seen for {last.time - window[0].time:.0f} s of {want.up:.0f}",))
    return _up(recent, want) or _down(window, want) or _stay(recent, want)


def _since(window: Sequence[Snapshot], seconds: float) -> list[Snapshot] | None:
    """The snapshots of the last `seconds`; None where the window is shorter."""
    begin = window[-1].time - seconds
    if window[0].time > begin:
        return None
    return [s for s in window if s.time >= begin]


def _up(recent: list[Snapshot], want: Objectives) -> Advice | None:
    first, last = recent[0], recent[-1]
    now, seconds = max(1, last.replicas), last.time - first.time
    least = min(s.queue for s in recent)
    met = goodput(first, last)
    poor = met is not None and met < want.goodput
    deep = least >= want.queue * now
    if not deep and not (poor and least > 0):
        return None
    reasons = [f"queue {last.queue} deep" + (f", never below {least}" if least < last.queue else "")]
    reasons[0] += f" for {seconds:.0f} s"
    if poor:
        reasons.append(f"goodput {met:.2f} < {want.goodput:g}")
    done = (last.finished - first.finished) / seconds / now if seconds > 0 else 0.0
    if done == 0:
        return _to(now + 1, now, want, *reasons, "nothing finished, so what a replica can do is unknown")
    rate = (last.arrived - first.arrived) / seconds + last.queue / want.drain
    reasons.append(f"{rate:.2g} a second to do, {done:.2g} a replica done")
    return _to(max(now + 1, math.ceil(rate / (want.fill * done))), now, want, *reasons)


def _down(window: Sequence[Snapshot], want: Objectives) -> Advice | None:
    calm = _since(window, want.down)
    if calm is None or any(s.queue for s in calm):
        return None
    now, busiest = calm[-1].replicas, max(s.running for s in calm)
    met = goodput(calm[0], calm[-1])
    if now <= max(1, want.fewest) or (met is not None and met < want.goodput):
        return None
    if busiest > want.fill * want.sequences * (now - 1):
        return None
    return _to(
        now - 1,
        now,
        want,
        f"no queue for {want.down:.0f} s",
        f"never more than {busiest} running on {now} replicas",
    )


def _stay(recent: list[Snapshot], want: Objectives) -> Advice:
    last, met = recent[-1], goodput(recent[0], recent[-1])
    if met is not None and met < want.goodput:
        why = f"goodput {met:.2f} < {want.goodput:g} though no queue stands"
        return Advice(
            last.replicas, 0, (why, "the requests are slow in themselves: more replicas would not mend it")
        )
    told = "no requests finished" if met is None else f"goodput {met:.2f}"
    return Advice(last.replicas, 0, (f"queue {last.queue}", told))


def _to(wanted: int, now: int, want: Objectives, *reasons: str, capped: bool = True) -> Advice:
    most = min(want.most, 2 * now) if capped and now else want.most
    held = max(want.fewest, min(wanted, max(most, now)))
    more = (f"{wanted} would be needed, {held} is the most at once",) if wanted > held else ()
    return Advice(held, held - now, (*reasons, *more))
