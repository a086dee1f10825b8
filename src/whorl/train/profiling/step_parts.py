"""The parts of a step with their times, bounds, choices and candidates; what has no name is the rest.

`training_step` makes the table of a training step from a profile; `decoding_step.py` makes those of decoding steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from whorl.train.profiling.profiler import Profile
from whorl.train.profiling.trace import (
    ATTENTION,
    FRAMEWORK,
    LOOKUPS,
    MATMULS,
    POINTWISE,
    REDUCTIONS,
    UNNAMED,
    WAITING,
)

MIN_SHARE = 0.005  # of a step: smaller parts of a training step share one line
# (part, class; "" for the elementwise ones) -> operations whose choices decide it
CHOICES = {
    ("attention", ATTENTION): ("attention",), ("attention", MATMULS): ("linear",),
    ("MLP, experts", MATMULS): ("mlp", "linear"), ("head, loss", MATMULS): ("head", "linear"),
    ("head, loss", ""): ("cross_entropy",), ("optimizer", MATMULS): ("orthogonalize",),
    ("optimizer", ""): ("update", "adamw"), ("optimizer", LOOKUPS): ("update",),
}  # fmt: skip


@dataclass(frozen=True)
class StepPart:
    """One part: seconds in a step as chosen; bound_seconds: 0 without a bound; others: seconds of other candidates."""

    name: str
    seconds: float
    bound_seconds: float = 0.0
    chosen: str = ""
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTable:
    """One step. seconds: as chosen. others: seconds of the whole step with the other candidates."""

    name: str
    seconds: float
    parts: list[StepPart]
    chosen: str = ""
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def accounted(self) -> float:
        """Fraction of the step that is in the parts."""
        return sum(part.seconds for part in self.parts) / self.seconds

    @property
    def share(self) -> float:
        """Fraction of the step that its parts would take at their bounds."""
        return sum(part.bound_seconds for part in self.parts) / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "accounted": self.accounted, "share_of_bound": self.share}


def training_step(found: Profile, choices: Mapping[str, Iterable[str]]) -> StepTable:
    """Return the table of a traced training step of one replica. choices: candidates in use, by operation."""
    parts, small = list[StepPart](), 0.0
    for part, by_class in found.costs.items():
        for kind, cost in by_class.items():
            if part in UNNAMED:
                continue
            if cost.seconds < MIN_SHARE * found.traced_seconds:
                small += cost.seconds
                continue
            made = CHOICES.get((part, "" if kind in (POINTWISE, REDUCTIONS) else kind), ())
            used = [f"{name}={'/'.join(sorted({*choices[name]}))}" for name in made if choices.get(name)]
            bound = 0.0 if kind in (WAITING, FRAMEWORK) else found.bound_seconds(cost)
            parts.append(StepPart(f"{part}: {kind}", cost.seconds, bound, ", ".join(used)))
    parts.append(StepPart("smaller parts", small))
    mode = "compiled" if found.compiled else "eager"
    return StepTable(
        f"a training step of one replica ({mode}, {found.dtype}), traced", found.traced_seconds, parts
    )


def format_step(table: StepTable) -> str:
    """Return the table as text, the longest parts first."""
    wide = max(len(part.name) for part in [*table.parts, StepPart("part of the step", 0.0)])
    choice = max(len(part.chosen) for part in [*table.parts, StepPart("", 0.0, chosen="choice")])
    lines = [f"{table.name}: {_us(table.seconds)} us" + (f", {table.chosen}" if table.chosen else "")]
    if table.others:
        lines[0] += f" ({_candidates(table.others)})"
    lines.append(
        f"{'part of the step':<{wide}}{'us':>10}{'share':>8}{'of bound':>10}  {'choice':<{choice}}  others"
    )
    for part in sorted(table.parts, key=lambda part: -part.seconds):
        bound = f"{part.bound_seconds / part.seconds:.0%}" if part.bound_seconds and part.seconds else ""
        lines.append(
            f"{part.name:<{wide}}{_us(part.seconds):>10}{part.seconds / table.seconds:>8.1%}{bound:>10}  "
            f"{part.chosen:<{choice}}  {_candidates(part.others)}".rstrip()
        )
    rest = table.seconds * (1 - table.accounted)
    lines.append(f"{'rest':<{wide}}{_us(rest):>10}{1 - table.accounted:>8.1%}")
    lines.append(f"{'step':<{wide}}{_us(table.seconds):>10}{1:>8.1%}{table.share:>10.0%}")
    return "\n".join(lines)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.{0 if seconds >= 1e-4 else 1}f}"


def _candidates(seconds: Mapping[str, float]) -> str:
    return "; ".join(f"{way} {_us(value)}" for way, value in seconds.items())
