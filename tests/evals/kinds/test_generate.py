"""Generated answers: strict beside lenient, outcomes, samples, programs, constraints."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend, by_text

from whorl.errors import WhorlError
from whorl.evals.grading import Grade, VerifiableTask, grade_tasks
from whorl.evals.kinds.kind import Metric
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response
from whorl.evals.runner import evaluate
from whorl.evals.statistics.seeds import variance_components
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task
from whorl.registry import permit_code

SUMS = [{"id": str(i), "q": f"{i} + {i} =", "a": f"#### {2 * i}"} for i in range(6)]


def task(records: Any, **fields: Any) -> Any:
    given = {
        "name": "sums", "kind": "generate", "template": "{{ q }}", "gold": "a",
        "options": {"metric": "numeric"},
    }  # fmt: skip
    return make_task(parse_task(given | fields, "sums.toml"), records)


def test_strict_lenient_and_outcomes_stand_apart() -> None:
    answers = {
        "0 + 0 =": "0", "1 + 1 =": "The answer is 2.", "2 + 2 =": "5", "3 + 3 =": "I cannot help with that.",
        "4 + 4 =": Completion("First we add", finish="length"), "5 + 5 =": Missing("timed out"),
    }  # fmt: skip
    result = evaluate(by_text(lambda prompt: answers[prompt]), [task(SUMS)])[0]
    assert result.outcomes == {"right": 2, "wrong": 1, "refused": 1, "truncated": 1, "missing": 1}
    lenient, strict = result.measure("numeric_lenient"), result.measure("numeric_strict")
    assert (lenient.value, strict.value) == (2 / 5, 1 / 5)
    assert lenient.bounds == (2 / 6, 3 / 6)  # the missing item wrong, and right
    assert result.measure("refused").value == result.measure("truncated").value == 1 / 5
    assert result.items[5].scores == {} and result.items[5].reason == "timed out"


def test_samples_of_each_item_have_their_own_seeds() -> None:
    def seeds(temperature: float) -> list[int]:
        generation = {"samples": 2 if temperature else 1, "temperature": temperature, "seed": 3}
        kind = task(SUMS, generation=generation).kind
        return [request.seed for item in kind.task.items for request in kind.requests(item)]

    assert len(set(seeds(0.5))) == 12 and seeds(0.5) == seeds(0.5) and max(seeds(0.5)) < 1 << 31
    assert set(seeds(0.0)) == {3}  # equal greedy requests are sent once


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    pattern = [True, False, False, True, False]  # of the samples of each item

    def answer(request: Request) -> Completion:
        assert isinstance(request, GenerateRequest) and request.temperature == 0.5
        seeds.append(request.seed)
        number = int(str(request.prompt).split()[0])
        return Completion(str(2 * number if pattern[len(set(seeds)) - 1] else 99))

    seeds: list[int] = []
    generation = {"samples": 5, "temperature": 0.5}
    made = task(SUMS[1:2], generation=generation, options={"metric": "numeric", "k": [1, 2, 5]})
    result = evaluate(FakeBackend(answer), [made])[0]
    assert len(set(seeds)) == 5
    for k in (1, 2, 5):
        subsets = list(combinations(pattern, k))
        assert result.measure(f"pass@{k}").value == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert result.items[0].scores["majority"] == 0.0 and len(result.items[0].answers) == 5


def test_samples_and_items_are_separate_sources_of_error() -> None:
    table = {"0": [1, 1, 1], "1": [0, 0, 0], "2": [1, 0, 1], "3": [1, 0, 1]}  # right or not, of each sample
    asked: dict[str, int] = {}

    def answer(request: Request) -> Response:
        assert isinstance(request, GenerateRequest)
        number = str(request.prompt).split()[0]
        sample = asked[number] = asked.get(number, -1) + 1
        return Completion(str(2 * int(number) if table[number][sample] else 99))

    made = task(SUMS[:4], generation={"samples": 3, "temperature": 1.0})
    result = evaluate(FakeBackend(answer), [made])[0]
    assert [list(item.details["samples"]) for item in result.items] == [
        table[item.item] for item in result.items
    ]
    expected = variance_components([*table.values()])
    assert len(result.notes) == 1 and result.notes[0].startswith(
        f"numeric_lenient: the standard error is {expected.se:.2%} for new items and samples, {expected.se_rerun:.2%} for"
    )
    assert not evaluate(FakeBackend(lambda _: Completion("1")), [task(SUMS)])[0].notes


def test_programs_run_with_their_tests() -> None:
    test = "def check(candidate):\n    assert candidate(2) == 4\n"
    records = [
        {"id": "0", "prompt": "def double(x):\n", "entry_point": "double", "test": test},
        {"id": "1", "prompt": "def half(x):\n", "entry_point": "half", "test": test},
    ]
    made = task(
        records, kind="program", template="{{ prompt }}", gold="item.fields", options={"seconds": 2.0}
    )
    result = evaluate(
        by_text(lambda prompt: "    return 2 * x\n" if "double" in prompt else "    return x / 2\n"), [made]
    )[0]
    assert [item.outcome for item in result.items] == ["right", "wrong"]
    assert result.measure("passed").value == 0.5


def test_constraints_count_instructions() -> None:
    gold = [{"kind": "punctuation:no_comma"}, {"kind": "change_case:english_lowercase"}]
    made = task([{"id": "0", "q": "Write.", "a": gold}], kind="constraints", options={})
    result = evaluate(by_text(lambda _: "All is well and no mark is here."), [made])[0]
    assert (
        result.measure("constraints_strict").value == 0 and result.measure("instructions_strict").value == 0.5
    )


def vowels(gold: Any, text: str, *, finish: str = "stop") -> Grade:
    return Grade.of({"vowels": float(sum(c in "aeiou" for c in text))}, "right")


vowels.scores = {"vowels": Metric("vowels", "letters", None, 0.0, None)}  # type: ignore[attr-defined]


def test_metric_of_a_user_and_conversations() -> None:
    permit_code(f"{__name__}:vowels")
    made = task(SUMS[:1], chat=True, options={"metric": f"custom:{__name__}:vowels"})
    result = evaluate(by_text(lambda _: "aeroplane"), [made])[0]
    assert result.measure("vowels").value == 5 and result.measure("vowels").unit == "letters"
    assert result.items[0].prompt == "[user]\n0 + 0 ="


def test_a_users_grader_is_metric_and_reward() -> None:
    path = "tests.support.evals.grading_functions:length"
    permit_code(path)
    made = task(SUMS[:1], options={"metric": f"custom:{path}"})
    result = evaluate(by_text(lambda _: "five5"), [made])[0]
    reward = VerifiableTask("t", "?", verifier=f"2 custom:{path}")
    assert result.measure("length").value == 0.5 and result.outcomes == {"wrong": 1}
    assert grade_tasks([reward], ["five5"])[0].value == 1.0
    options = {
        "metric": "custom:tests.support.evals.grading_functions:cites",
        "metric_options": {"word": "5"},
    }
    permit_code("tests.support.evals.grading_functions:cites")
    assert evaluate(by_text(lambda _: "five5"), [task(SUMS[:1], options=options)])[0].outcomes == {"right": 1}


@pytest.mark.parametrize(
    ("records", "fields", "words"),
    [
        ([{"q": "a", "a": None}], {}, "item '1' has no gold answer"),
        ([{"q": "a", "a": ["1", "2"]}], {}, "item '1' has 2 gold answers"),
        ([{"q": "a", "a": "many"}], {}, "item '1': the gold answer 'many' has no number"),
        (SUMS, {"options": {"metric": "numerical"}}, "no grader 'numerical'"),
        (SUMS, {"options": {"metric": "numeric", "metric_options": {"shape": 1}}}, "has no option 'shape'"),
        (SUMS, {"generation": {"samples": 4}}, "4 samples at temperature 0 are equal"),
        (SUMS, {"options": {"metric": "numeric", "k": [2]}}, "pass@2 of 1 samples"),
        ([{"q": "a", "a": "x = 1"}], {"kind": "program", "options": {}}, "the tests check nothing"),
        ([{"q": "a", "a": [{"kind": "no_such"}]}], {"kind": "constraints", "options": {}}, "unknown kind of constraint"),
    ],
)  # fmt: skip
def test_wrong_tasks_are_refused_before_any_request(records: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(WhorlError) as caught:
        task(records, **fields)
    assert words in str(caught.value), str(caught.value)
