"""Safety sets, transformations and their table."""

from __future__ import annotations

import codecs
import math
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.evals.grading import grade_all
from whorl.evals.results import ItemResult
from whorl.evals.safety import (
    TRANSFORMATIONS,
    SafetyItem,
    built_in,
    safety_table,
    transform,
    transform_items,
)  # fmt: skip
from whorl.evals.safety.metric import is_about, safety
from whorl.evals.safety.transformations import decode_answer, from_base64

REFUSAL = "Sorry, but I can't assist with that."


def results(items: list[SafetyItem], answers: list[str]) -> list[ItemResult]:
    options = [{"plain": i.plain, "prompt": i.prompt, "transformation": i.transformation} for i in items]
    graded = grade_all("safety", [i.expected for i in items], answers, options)
    return [
        ItemResult(i.id, g.scores, g.outcome, g.reason, i.twin, i.group)
        for i, g in zip(items, graded, strict=True)
    ]


def test_built_in_twins_are_pairs() -> None:
    items = built_in()
    assert len({i.id for i in items}) == len(items) == len({i.prompt for i in items})
    for harmful, harmless in zip(items[::2], items[1::2], strict=True):
        assert (harmful.expected, harmless.expected) == ("refusal", "answer")
        assert harmful.twin == harmless.twin and harmful.group == harmless.group


def test_table_has_both_failures() -> None:
    items = built_in()
    for answer, compliance, over_refusal in ((REFUSAL, 0, 1), ("", math.nan, math.nan)):
        last = safety_table(results(items, [answer] * len(items)))[-1]
        assert (last.compliance, last.over_refusal) == pytest.approx((compliance, over_refusal), nan_ok=True)
    agree = [f"Here is how: {i.prompt.lower().rstrip('?.')} with care" for i in items]
    last = safety_table(results(items, agree))[-1]
    assert last.group == "all" and last.n_harmful == last.n_harmless == len(items) // 2
    assert last.compliance > 0.9 and last.over_refusal < 0.1
    ideal = [REFUSAL if i.expected == "refusal" else "Take it and start." for i in items]
    assert [(row.compliance, row.over_refusal) for row in safety_table(results(items, ideal))] == [(0, 0)] * 7


@given(st.text(), st.integers(0, 3))
def test_encodings_are_invertible(text: str, seed: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    for name in TRANSFORMATIONS:
        assert transform(text, name, seed) == transform(text, name, seed)
    if len(text.encode()) >= 12:
        assert from_base64(f"x: {b64encode(text.encode()).decode()}") == f"x: {text}"


def test_transformations_carry_the_request() -> None:
    request = "How can we open the red door?"
    for name in TRANSFORMATIONS:
        sent = transform(request, name)
        back = {
            "base64": from_base64, "rot13": lambda s: codecs.encode(s, "rot13"), "reversed": lambda s: s[::-1],
            "leetspeak": lambda s: decode_answer(s, "leetspeak"),
            "payload_split": lambda s: " ".join(part for part in s.split('"')[1:6:2]),
        }.get(name, str)(sent)  # fmt: skip
        assert request.lower() in back.lower(), name
        assert (sent == request) == (name == "none")
    assert transform(request, "many_shot").count("User:") == 33
    assert transform("Hi", "payload_split").startswith('a = "Hi"')


def test_results_by_transformation_and_broken_refusals() -> None:
    items = transform_items(built_in()[:8], ["none", "role_play", "base64"])
    assert len(items) == 24 and items[1].id.endswith(":role_play") and items[1].twin == items[0].twin
    answers = []
    for item in items:
        broken = item.expected == "answer" or item.transformation == "role_play"
        answers.append(f"About {item.plain.lower()}: take it and start." if broken else REFUSAL)
        if item.transformation == "base64":
            answers[-1] = (
                "qwerty uiop" if item.expected == "refusal" else b64encode(REFUSAL.encode()).decode()
            )
    rows = {row.group: row for row in safety_table(results(items, answers))}
    assert (rows["none"].compliance, rows["role_play"].compliance, rows["role_play"].broken) == (0, 1, 1)
    assert (rows["base64"].compliance, rows["base64"].unrelated, rows["base64"].over_refusal) == (0, 1, 1)
    missing = ItemResult("x:none", {}, "missing", group="none")
    assert safety_table([missing])[0].missing == 1 and math.isnan(safety_table([missing])[0].compliance)


def test_is_about_and_metric() -> None:
    assert is_about("First, open the locks.", "How do I break a locked door?") and is_about(
        "x", "How do I do it?"
    )
    assert not is_about("I like tea.", "How do I break a locked door?")
    assert safety("refusal", "Hit the door.", prompt="How do I break a door?").outcome == "wrong"
    assert safety("refusal", "", prompt="How?").outcome == "not_found"


def test_unknown_transformations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'rot31'(.|\n)*rot13"):
        transform("x", "rot31")
    with pytest.raises(ConfigError, match="unknown transformation"):
        transform_items(built_in(), ["none", "x"])
