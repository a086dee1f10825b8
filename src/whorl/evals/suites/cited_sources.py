"""The suite `sources`: questions about random facts of random people, with numbered sources and without.

    cited-answers    kind generate    one of 1 to MAX_SOURCES passages states the fact; right is "Oslo" with [2]
    closed-book      kind generate    the same questions alone: it measures chance

The facts of a question are random, and no name of the test split occurs in a training text. So the answer comes from the
sources. The other passages are about people with one of the two names, or other facts of the same person.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from whorl.evals.grading.grade import Grade
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.suites.biographies import ATTRIBUTES, FIRST, N_NAMES, QUESTIONS, person_name, statement
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks.config import TaskConfig
from whorl.evals.tasks.task import make_task
from whorl.search.numbered_sources import SourcePassage, with_sources
from whorl.tracking.seeds import numpy_rng

MAX_SOURCES = 4
HELD_OUT = 11  # names whose number divided by this leaves no remainder are of the test split
N_ITEMS = 300
_TASK: dict[str, Any] = {
    "kind": "generate", "about": "random facts that a source states", "chat": True, "gold": "answer",
    "data": {"group": "sources"}, "generation": {"max_tokens": 32}, "options": {"metric": "cited"},
}  # fmt: skip


def sources_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return the two tasks, with the same questions."""
    records = cited_questions(inputs.limit or N_ITEMS, inputs.seed, held_out=True)
    return [
        make_task(TaskConfig(name=name, template=f"{{{{ {field} }}}}", **_TASK), records)
        for name, field in (("cited-answers", "prompt"), ("closed-book", "question"))
    ]


def cited_questions(n: int, seed: int, *, held_out: bool) -> list[dict[str, Any]]:
    """Return n records: id, question, prompt (with sources), reply (a sentence), answer ("Oslo [2]"), number of sources.

    held_out: of people in no other split.
    """
    rng = numpy_rng(seed, "cited-sources", int(held_out))
    return [_question(rng, f"{'test' if held_out else 'train'}-{seed}-{i}", held_out) for i in range(n)]


def cited(gold: str, text: str, *, finish: str = "stop") -> Grade:
    """Return scores correct (the answer has the fact), and cited of correct ones: it cites the right source and no other.

    gold: fact and source, "Oslo [2]". An answer has passed if it is correct and cited.
    """
    fact, _, number = gold.rpartition(" ")
    correct = re.search(rf"\b{re.escape(fact)}\b", text, re.IGNORECASE) is not None
    right = correct and set(re.findall(r"\[\d+\]", text)) == {number}
    scores = {"correct": float(correct)} | ({"cited": float(right)} if correct else {})
    reason = "passed" if right else "another citation" if correct else "another answer"
    return Grade.of(scores, "right" if right else "wrong", reason, text.strip())


def _question(rng: np.random.Generator, id: str, held_out: bool) -> dict[str, Any]:
    total, person = int(rng.integers(1, MAX_SOURCES + 1, 2).max()), _person(rng, held_out)
    facts = dict[tuple[int, str], str]()
    while len(facts) < total:
        key = _person(rng, held_out, person) if facts else person, _one_of(rng, [*ATTRIBUTES])
        facts.setdefault(key, _one_of(rng, ATTRIBUTES[key[1]]))
    known = [(person_name(who), what, value) for (who, what), value in facts.items()]
    sources = [SourcePassage(statement(rng, *fact)) for fact in known]
    n = int(rng.integers(total))
    name, what, value = known[n]
    question = _one_of(rng, QUESTIONS[what]).format(name=name)
    return {
        "id": id, "question": question, "prompt": with_sources(question, sources), "sources": total,
        "reply": f"{statement(None, *known[n])} [{n + 1}]", "answer": f"{value} [{n + 1}]",
    }  # fmt: skip


def _person(rng: np.random.Generator, held_out: bool, like: int | None = None) -> int:
    """Return the number of a name of the split; a quarter of those `like` another share a name or both."""
    kind = 3 if like is None else int(rng.integers(12))
    while True:
        rest, first = divmod(int(rng.integers(N_NAMES)), len(FIRST))
        if like is not None and kind < 3:
            rest, first = (like // len(FIRST) if kind else rest), (like % len(FIRST) if kind != 1 else first)
        found = rest * len(FIRST) + first
        if (found % HELD_OUT == 0) == held_out:
            return found


def _one_of(rng: np.random.Generator, values: Any) -> str:
    return str(values[int(rng.integers(len(values)))])
