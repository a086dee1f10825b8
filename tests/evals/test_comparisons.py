"""Two evaluations side by side: verdicts in words, weights, corrections, refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from whorl.errors import WhorlError
from whorl.evals.comparisons import compare_results, summary_sentence, unshared_sentence
from whorl.evals.results import ItemResult, TaskMeasure, TaskResult


def result(
    values: list[float], task: str = "t", weights: list[float] | None = None, **measure: object
) -> TaskResult:
    name = "acc" if not weights else "bits"
    items = [
        ItemResult(str(i), {name: v}, "right" if v else "wrong", weights={name: w})
        for i, (v, w) in enumerate(zip(values, weights or [1.0] * len(values), strict=True))
    ]
    shown = TaskMeasure(name, 0.5, 0.4, 0.6, len(values), **measure)  # type: ignore[arg-type]
    return TaskResult(task, "choice", "1", "hash", "", "m", "address", (name,), (shown,), {}, tuple(items))


def draws(p: float, n: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [float(rng.random() < p) for _ in range(n)]


def test_better_model_is_named_with_size_and_interval() -> None:
    good, bad = [result(draws(0.9, 300, 1))], [result(draws(0.5, 300, 2))]
    found = compare_results(good, bad, ("new", "old"))
    assert found[0].comparison.verdict == "better" and "new" in found[0].text and "95" in found[0].text
    assert "new is better on 1" in summary_sentence(found, ("new", "old"))
    turned = compare_results(bad, good, ("old", "new"))
    assert "new is better on 1" in summary_sentence(turned, ("old", "new"))


def test_no_worse_needs_a_margin_that_the_interval_excludes() -> None:
    a = [1.0] * 9 + [0.0] * 3 + [1.0] * 188  # 9 items that A alone has right, 3 that B alone has
    b = [0.0] * 9 + [1.0] * 3 + [1.0] * 188
    found = compare_results([result(a)], [result(b)], margin=0.05)[0]
    assert found.comparison.verdict == "no worse" and "0.05" in found.text
    assert compare_results([result(a)], [result(b)])[0].comparison.verdict == "not distinguishable"


def test_lower_is_better_turns_the_sign_and_weights_count() -> None:
    weights = [1.0, 3.0] * 50
    rng = random.Random(4)
    a = [1.0 + rng.random() / 10 for _ in weights]
    b = [v + 0.2 + rng.random() / 100 for v in a]
    unit = {"unit": "bits", "higher_is_better": False}
    found = compare_results([result(a, weights=weights, **unit)], [result(b, weights=weights, **unit)])[0]
    mean = sum((y - x) * w for x, y, w in zip(a, b, weights, strict=True)) / sum(weights)
    assert math.isclose(found.comparison.paired.difference, mean, rel_tol=1e-9)
    assert found.comparison.verdict == "better"


def test_many_tasks_correct_a_chance_finding() -> None:
    first = [1.0] * 9 + [0.0] + draws(0.6, 90, 5)
    near = [0.0] * 9 + [1.0] + first[10:]  # 9 items to 1
    pairs = [(result(first, "found"), result(near, "found"))]
    same = [(result(first, f"t{k}"), result(draws(0.6, 100, 50 + k), f"t{k}")) for k in range(20)]
    alone = compare_results([pairs[0][0]], [pairs[0][1]])[0]
    assert alone.comparison.verdict == "better" and alone.p_adjusted < 0.05
    many = compare_results(*([list(x) for x in zip(*pairs, *same, strict=True)]))
    assert many[0].p_adjusted > alone.p_adjusted and "may be chance" in many[0].text


def test_few_items_can_show_no_difference() -> None:
    few = [result([1.0, 0.0, 1.0])]
    assert "These 3 items are too few to show any difference." in compare_results(few, few)[0].text
    many = [result(draws(0.5, 400, 1))]
    assert "These 400 items would show a difference of 0.0" in compare_results(many, many)[0].text


def test_other_tasks_or_versions_are_refused() -> None:
    a = result([1.0, 0.0] * 10)
    with pytest.raises(WhorlError, match="share no task"):
        compare_results([a], [replace(a, task="other")])
    with pytest.raises(WhorlError, match="the hashes hash and new differ"):
        compare_results([a], [replace(a, hash="new")])


def test_items_outside_of_the_metric_are_not_missing() -> None:
    a, b = result(draws(0.9, 50, 1)), result(draws(0.5, 50, 2))
    gold = ItemResult("gold", {"agreement": 1.0}, "right")
    found = compare_results([replace(a, items=(*a.items, gold))], [replace(b, items=(*b.items, gold))])[0]
    assert found == compare_results([a], [b])[0]
    lost = replace(a.items[0], scores={}, outcome="missing")
    assert "Missing values: 1 of A" in compare_results([replace(a, items=(lost, *a.items[1:]))], [b])[0].text


def test_verdicts_of_different_judges_are_refused() -> None:
    a, b = (replace(result(draws(0.5, 20, 1)), settings={"judge": name}) for name in ("x", "y"))
    with pytest.raises(WhorlError, match="the judge of A is x, that of B is y"):
        compare_results([a], [b])
    assert compare_results([a], [a])


def test_one_item_or_cluster_gives_no_interval() -> None:
    one = compare_results([result([1.0])], [result([0.0])])[0].text
    assert "(1 item; one item gives no interval)" in one and "inf" not in one
    pair = [
        replace(r, items=tuple(replace(i, cluster="c") for i in r.items)) for r in (result([1.0, 0.0]),) * 2
    ]
    text = compare_results([pair[0]], [pair[1]])[0].text
    assert "(2 items in 1 cluster; items of one cluster give no interval)" in text and "inf" not in text


def test_perplexity_is_compared_by_its_logarithm() -> None:
    first, second = (
        replace(
            result([value] * 40),
            metrics=("perplexity",),
            measures=(TaskMeasure("perplexity", math.exp(value), 1, 9, 40, unit="", higher_is_better=False),),
        )
        for value in (1.0, 1.5)
    )
    first, second = (
        replace(
            r,
            items=tuple(
                replace(i, scores={"perplexity": i.scores["acc"] + int(i.item) % 3 / 100}) for i in r.items
            ),
        )
        for r in (first, second)
    )
    text = compare_results([first], [second], ("new", "old"))[0].text
    assert "new is better than old by 0.5000" in text
    assert "logarithms, in nats per token: the perplexity of old is 1.649 times that of new" in text


def test_task_without_pairs_is_named_and_others_compare() -> None:
    good, bad = result(draws(0.9, 50, 1), "good"), result(draws(0.5, 50, 2), "bad")
    lost = replace(bad, items=tuple(replace(i, scores={}, outcome="missing") for i in bad.items))
    assert [each.task for each in compare_results([good, lost], [good, bad])] == ["good"]
    sentence = unshared_sentence([good, lost], [good, bad], ("A", "B"))
    assert sentence == "Not compared: bad (no item has a score from both)."
    with pytest.raises(WhorlError, match="no item has a value of acc from both models"):
        compare_results([lost], [bad])


def test_interval_of_shares_ends_at_one() -> None:
    text = compare_results([result([1.0, 1.0, 1.0])], [result([0.0, 1.0, 0.0])])[0].text
    assert "to +1.0000, 3 items" in text and "interval -1.0000" in text
