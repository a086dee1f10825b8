"""What passing means, in words, for every verifier."""

from __future__ import annotations

import pytest

from whorl.evals.grading import GRADERS, VerifiableTask, pass_criterion
from whorl.evals.grading.registry import PASS_CRITERIA
from whorl.registry import permit_code


def task(verifier: str) -> VerifiableTask:
    return VerifiableTask(id=verifier, prompt="p", verifier=verifier, answer="1")


@pytest.mark.parametrize(
    ("verifiers", "text"),
    [
        (["compiles"] * 2, "the code parses and has an effect, right or wrong"),
        (
            ["0.1 format(<a>) + 0.9 numeric"],
            "the text has the required form and the number equals the expected one",
        ),
        (["custom:mine:check"], "custom:mine:check passes"),
        (["exact", "exact", "compiles"], "the answer equals the expected text (2 tasks); the code parses"),
    ],
)
def test_criterion_is_said_in_words(verifiers: list[str], text: str) -> None:
    permit_code("mine:check")
    assert pass_criterion([task(verifier) for verifier in verifiers]).startswith(text)


def test_criteria_are_those_of_graders() -> None:
    assert PASS_CRITERIA.keys() <= GRADERS.entries.keys()
