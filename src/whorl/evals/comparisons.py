"""Two evaluations side by side: for each task the paired difference of its first metric, with a verdict in words.

Items count by their weights, so the difference is that of the shown figures: with weights w, an item's value is
w x / mean(w). Where lower is better the sign is turned, so "A is better" has one meaning. Several tasks are several
chances of a false finding, so p-values are adjusted by Holm's method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from whorl.errors import DataError
from whorl.evals.results import ItemResult, TaskMeasure, TaskResult
from whorl.evals.statistics.comparison import Comparison, compare, describe
from whorl.evals.statistics.power import detectable_by, holm

ALPHA = 0.05
LOGARITHMS = {
    "perplexity": "token",
    "word_perplexity": "word",
    "byte_perplexity": "byte",
    "item_perplexity": "item",
}


@dataclass(frozen=True)
class TaskComparison:
    """Two models on one task.

    Attributes:
        comparison: of the first metric; larger is better. Its difference is in the metric's units, of the logarithm for a
            perplexity.
        p_adjusted: over all tasks.
        detectable: smallest difference that these items find in four of five tries.
        text: sentences.
        unit: of the metric.
    """

    task: str
    metric: str
    comparison: Comparison
    p_adjusted: float
    detectable: float
    text: str
    unit: str = "share"


def compare_results(
    a: Sequence[TaskResult],
    b: Sequence[TaskResult],
    names: tuple[str, str] = ("A", "B"),
    *,
    margin: float = 0.0,
) -> list[TaskComparison]:
    """Return the comparison of each task that both models have, in the order of A.

    Args:
        names: of the models, for the sentences.
        margin: the largest loss that does not matter, in units of the metric; 0 for none.

    Raises:
        DataError: no task is shared, or a task has another version or other items.
    """
    others = {result.task: result for result in b}
    shared = [(first, others[first.task]) for first in a if first.task in others]
    if not shared:
        raise DataError(
            f"{names[0]} and {names[1]} share no task", expected=f"one of: {', '.join(r.task for r in a)}",
            do="evaluate both models on the same tasks",
        )  # fmt: skip
    shared = [pair for pair in shared if _has_pairs(*pair)] or shared[:1]  # the latter raises
    found = []
    for first, second in shared:
        if first.hash != second.hash:
            raise DataError(
                f"task {first.task}: the hashes {first.hash} and {second.hash} differ",
                expected="the same version, settings and items", do="evaluate both models on the same task",
            )  # fmt: skip
        both = [result.settings.get("judge") for result in (first, second)]
        if both[0] != both[1]:
            raise DataError(
                f"task {first.task}: the judge of {names[0]} is {both[0]}, that of {names[1]} is {both[1]}",
                expected="verdicts of one judge", do="evaluate both models with the same --judge",
            )  # fmt: skip
        found.append(_compare_task(first, second, margin))
    adjusted = holm([each.comparison.paired.p_value for each in found])
    return [
        replace(each, p_adjusted=float(p), text=_text(each, float(p), len(found), names))
        for each, p in zip(found, adjusted, strict=True)
    ]


def summary_sentence(found: Sequence[TaskComparison], names: tuple[str, str] = ("A", "B")) -> str:
    """Return one sentence over all tasks, with adjusted p-values."""
    sure = [each for each in found if each.p_adjusted <= ALPHA]
    won = sum(each.comparison.paired.difference > 0 for each in sure)
    lost = len(sure) - won
    parts = [f"{name} is better on {n}" for name, n in zip(names, (won, lost), strict=True) if n]
    open_ = len(found) - len(sure)
    parts += [f"{open_} {'is' if open_ == 1 else 'are'} not distinguishable"] if open_ else []
    correction = ", corrected for their number (Holm)" if len(found) > 1 else ""
    return f"Of {len(found)} task{'s' if len(found) > 1 else ''}{correction}: {'; '.join(parts)}."


def unshared_sentence(a: Sequence[TaskResult], b: Sequence[TaskResult], names: tuple[str, str]) -> str:
    """Return a sentence with the tasks that no comparison covers: those of one model, and those without pairs; or ""."""
    tasks = [[result.task for result in results] for results in (a, b)]
    alone = [[name for name in own if name not in other] for own, other in (tasks, tasks[::-1])]
    parts = [f"{', '.join(own)} (only {name})" for own, name in zip(alone, names, strict=True) if own]
    others = {result.task: result for result in b}
    empty = [r.task for r in a if r.task in others and not _has_pairs(r, others[r.task])]
    parts += [f"{', '.join(empty)} (no item has a score from both)"] if empty else []
    return f"Not compared: {'; '.join(parts)}." if parts else ""


def _compare_task(first: TaskResult, second: TaskResult, margin: float) -> TaskComparison:
    measure = _compared_measure(first)
    sign = -1.0 if measure.higher_is_better is False else 1.0
    results = [first.items, second.items]
    outside = {item.item for items in results for item in items if _lacks(item, measure.metric)}
    a, b = (
        _signed([item for item in items if item.item not in outside], measure.metric, sign)
        for items in results
    )
    share = measure.unit == "share"
    worst, best = (0.0, 1.0) if sign > 0 else (-1.0, 0.0)
    found = compare(
        a,
        b,
        measure.metric,
        margin=margin,
        worst=worst if share else -math.inf,
        best=best if share else math.inf,
    )
    return TaskComparison(
        first.task, measure.metric, found, 1.0, detectable_by(found.paired), "", measure.unit
    )


def _has_pairs(first: TaskResult, second: TaskResult) -> bool:
    """Return whether an item has a value of the compared metric from both models."""
    metric = _compared_measure(first).metric
    a, b = (
        {item.item for item in result.items if math.isfinite(item.scores.get(metric, math.nan))}
        for result in (first, second)
    )
    return not a.isdisjoint(b)


def _lacks(item: ItemResult, metric: str) -> bool:
    """Return whether an item was scored, but not by this metric, such as an item of a judge's gold set."""
    return item.outcome not in ("missing", "error") and metric not in item.scores


def _compared_measure(result: TaskResult) -> TaskMeasure:
    """Return the first shown figure of which one direction is better. Raises DataError."""
    for name in result.metrics:
        measure = next((m for m in result.measures if m.metric == name), None)
        if measure is not None and measure.higher_is_better is not None:
            return measure
    raise DataError(
        f"task {result.task} has no metric that is better in one direction", expected="such a metric"
    )


def _signed(items: Sequence[ItemResult], metric: str, sign: float) -> list[ItemResult]:
    """Return the items with values whose plain mean is the weighted one, larger being better."""
    has = [item for item in items if math.isfinite(item.scores.get(metric, math.nan))]
    mean_weight = sum(item.weights.get(metric, 1.0) for item in has) / max(1, len(has))
    found = []
    for item in items:
        value = item.scores.get(metric, math.nan)
        scores = (
            {metric: sign * value * item.weights.get(metric, 1.0) / mean_weight}
            if math.isfinite(value)
            else {}
        )
        found.append(replace(item, scores=scores))
    return found


def _text(each: TaskComparison, p_adjusted: float, tasks: int, names: tuple[str, str]) -> str:
    text = f"{each.task}, {each.metric}: {describe(each.comparison, *names)}"
    paired = each.comparison.paired
    if part := LOGARITHMS.get(each.metric):
        ratio = math.exp(min(paired.difference, 700.0))  # a float ends at e^709
        text += f" All differences are of logarithms, in nats per {part}:"
        text += f" the perplexity of {names[1]} is {ratio:.4g} times that of {names[0]}."
    if each.comparison.verdict in ("better", "worse") and tasks > 1 and p_adjusted > ALPHA:
        text += f" With {tasks} tasks this may be chance: adjusted p = {p_adjusted:.2g}."
    if each.comparison.verdict in ("not distinguishable", "no worse") and math.isfinite(each.detectable):
        if each.unit == "share" and each.detectable >= 1:
            text += f" These {paired.n} items are too few to show any difference."
        else:
            text += f" These {paired.n} items would show a difference of {each.detectable:.4f} in four of five tries."
    return text
