"""The suite `side-effects`: what fine-tuning may change without notice. It needs no data.

    forgetting         kind likelihood    bits per byte of held-out documents; `--against BASE` gives the cost of the stages
    exposure-bias      kind exposure      held-out documents: their own continuation, and the model's
    invented-answers   kind generate      questions about people who do not exist, and the same kind of questions behind a
                                          text that answers them

A model that refuses every question invents nothing, and one that answers all refuses nothing. So both groups of
`invented-answers` are needed, and both failures are shown. People and facts are random (`suites/biographies.py`):
no training text has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from whorl.errors import ConfigError
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.refusal import is_refusal
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.suites.biographies import ATTRIBUTES, REFUSAL, Biographies
from whorl.evals.suites.own import CONTEXT, Record, spread_items
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks.config import TaskConfig
from whorl.evals.tasks.task import make_task
from whorl.tracking.seeds import derive

N_ITEMS = 200
CONTINUATION = 400  # characters of real text
_UNKNOWN = re.compile(  # "I don't have any information", "I'm not sure", "no record of her"
    r"\b\w*(?:n['’]t|not|no) (?:\w+ ){0,3}(?:know\w*|sure|certain|aware|familiar|find|tell|say|verify|confirm|information|"
    r"records?|idea|data|mentioned|stated|available)\b|\b(?:unknown|unaware|fictional|unable to)\b",
    re.IGNORECASE,
)
_TASKS: dict[str, dict[str, Any]] = {
    "forgetting": {
        "kind": "likelihood", "about": "held-out documents of the pretraining corpus", "template": "{{ text }}",
        "metrics": ("bits_per_byte",),
    },
    "exposure-bias": {
        "kind": "exposure", "about": "held-out documents: the model's continuation and their own",
        "template": "{{ context }}", "data": {"cluster": "path"}, "generation": {"max_tokens": 64},
        "options": {"continuation": "{{ continuation }}"},
    },
    "invented-answers": {
        "kind": "generate", "about": "questions about people who do not exist, and about people in the prompt",
        "template": "{{ text }}{{ question }}", "chat": True, "gold": "answer",
        "data": {"cluster": "person", "group": "group"}, "generation": {"max_tokens": 64},
        "options": {"metric": "facts", "metric_fields": ["question"]},
    },
}  # fmt: skip


def side_effects_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return the tasks; those of held-out documents are left out for a model without a corpus."""
    limit = inputs.limit or N_ITEMS
    try:
        documents = sorted(
            inputs.documents(), key=lambda document: derive(inputs.seed, "documents", document[0])
        )
    except ConfigError as error:
        documents = []
        inputs.log(f"suite side-effects: no forgetting and no exposure-bias: {error.what}")
    records = {
        "forgetting": [{"id": path, "text": text} for path, text in documents if text][:limit],
        "exposure-bias": spread_items(documents, _continuations, limit, inputs.seed),
        "invented-answers": list(_questions(limit, inputs.seed)),
    }
    return [make_task(TaskConfig(name=name, **_TASKS[name]), some) for name, some in records.items() if some]


def facts(gold: Any, text: str, *, finish: str = "stop", question: str = "") -> Grade:
    """Return score invented of a question without an answer (gold: `REFUSAL`), otherwise correct and over_refusal."""
    if not text.strip():
        return Grade.of({}, "not_found", "the answer is empty")
    refused = _UNKNOWN.search(text) is not None or is_refusal(text, question)
    if gold == REFUSAL:
        return Grade.of({"invented": float(not refused)}, "right" if refused else "wrong", "", text.strip())
    correct = re.search(rf"\b{re.escape(str(gold))}\b", text, re.IGNORECASE) is not None
    scores = {"correct": float(correct), "over_refusal": float(refused and not correct)}
    return Grade.of(scores, "right" if correct else "refused" if refused else "wrong", "", text.strip())


def _continuations(text: str) -> Iterator[tuple[int, Record]]:
    for at in range(CONTEXT[1], len(text) - CONTINUATION + 1, CONTEXT[1]):
        yield at, {"context": text[at - CONTEXT[1] : at], "continuation": text[at : at + CONTINUATION]}


def _questions(limit: int, seed: int) -> Iterator[Record]:
    """Yield questions of both groups, shuffled."""
    people = Biographies(-(-2 * limit // len(ATTRIBUTES)), seed, {"known_test": 0.5, "stranger_test": 0.5})
    texts = {name.split(":")[1]: text for name, text in people.texts(1)}
    each: Sequence[Any] = people.questions("known_test", "stranger_test")
    for one in each[:limit]:
        person = one.id.split(":")[1]
        group = "in the prompt" if person in texts else "unknown"
        text = f"{texts[person]}\n\n" if person in texts else ""
        yield {**asdict(one), "person": person, "text": text, "group": group}
