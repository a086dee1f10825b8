"""The suite `reasoning-gym`: the task families of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), if installed.

One task for each family (algebra, algorithmic, games, logic, ...), with figures by data set. A seed generates the items;
data sets whose entries a seed does not determine are left out.
The package's own `score_answer` decides, because many items have several right answers; it gives parts of a point to some
wrong ones, which count as wrong here.

    solved_lenient   the final answer, in any form
    solved_strict    the answer in <answer> tags, as the prompt demands

The scorers run in the process of custom verifiers, with its time limit (`evals/verify/reasoning_gym.py`). An item whose
scorer hangs or raises has the outcome "error", and counts as missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from whorl.evals.kinds.kind import Metric
from whorl.evals.metrics.result import Graded
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks import EvalTask, make_task
from whorl.evals.tasks.config import parse_task
from whorl.evals.verify.custom_verifier import CALL_SECONDS, verify_custom
from whorl.evals.verify.final_answer import find_final_answer
from whorl.evals.verify.reasoning_gym import (
    HASH_SEED,
    GymEntry,
    data_sets,
    generator_of,
    is_reproducible,
    question_hash,
    score_answer,
)
from whorl.evals.verify.task import Verdict, VerifiableTask

ITEMS = 10  # of each data set
TEMPLATE = "{{ question }}\n\nWrite the final answer between <answer> and </answer>."
COMPOSED = ("composite",)  # needs a choice of other data sets
SECONDS = CALL_SECONDS  # time of one scorer
VERIFIER = f"{__name__}:score_reading"
_TAGS = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def reasoning_gym_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return one task for each family. The limit counts the items of a family.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    families: dict[str, list[str]] = {}
    left_out = []
    for name, (made, *_) in sorted(data_sets().items()):
        if not is_reproducible(name):
            left_out.append(name)
        elif name not in COMPOSED:
            families.setdefault(made.__module__.split(".")[1], []).append(name)
    if left_out:
        inputs.log(
            f"left out, as no seed determines their items: {', '.join(left_out)} (most need {HASH_SEED}=0)"
        )
    return [_task(family, names, inputs) for family, names in sorted(families.items())]


def _task(family: str, names: list[str], inputs: SuiteInputs) -> EvalTask:
    each = ITEMS if inputs.limit is None else -(-inputs.limit // len(names))
    entries = [GymEntry(name, seed=inputs.seed, size=each, index=n) for n in range(each) for name in names]
    records = [_record(entry) for entry in entries]
    config = parse_task(
        {
            "name": f"gym-{family}", "version": "2", "kind": "generate", "template": TEMPLATE, "chat": True,
            "about": f"reasoning-gym: {family}", "gold": "{'answer': answer, 'entry': entry}",
            "data": {"group": "data_set"}, "generation": {"max_tokens": 1024},
            "options": {"metric": "reasoning_gym"},
        },
        "suite reasoning-gym",
    )  # fmt: skip
    return make_task(config, records, limit=inputs.limit)


def _record(entry: GymEntry) -> dict[str, Any]:
    made = generator_of(entry)[entry.index]
    question = str(made["question"])
    return {
        "id": f"{entry.dataset}-{entry.index}", "data_set": entry.dataset, "question": question,
        "answer": str(made["answer"]), "entry": {**asdict(entry), "question": question_hash(question)},
    }  # fmt: skip


def solved(gold: Mapping[str, Any], text: str, *, finish: str = "stop") -> Graded:
    """Return whether an answer solves an item; see the top of this file.

    Args:
        gold: "answer", the package's own, and "entry", the settings of a `GymEntry`.
        finish: "length" if the limit of tokens cut the text.
    """
    found = find_final_answer(text)
    tagged = _TAGS.findall(text)[-1:]
    readings = list(tagged)
    if found.explicit or finish != "length":
        readings += [form for reading in found.readings for form in (reading, reading.rstrip(".,;:!"))]
    strict = right = False
    for reading in dict.fromkeys(readings):
        verdict = _verdict(gold["entry"], reading)
        if verdict.failed:
            return Graded({}, "error", verdict.reason, reading)
        if verdict.passed:
            strict, right = tagged == [reading], True
            break
    scores = {"solved_lenient": float(right), "solved_strict": float(strict)}
    if right:
        return Graded(scores, "right", f"form of the answer: {found.form}", reading)
    if readings:
        return Graded(scores, "wrong", "another answer", readings[0])
    if finish == "length":
        return Graded(scores, "truncated", "the limit of tokens cut the text before its answer")
    return Graded(scores, "not_found", "no answer was found")


solved.scores = {  # type: ignore[attr-defined]
    "solved_lenient": Metric("items solved, in any form"),
    "solved_strict": Metric("items solved, in <answer> tags"),
}


def _verdict(entry: Mapping[str, Any], answer: str) -> Verdict:
    task = VerifiableTask(entry["dataset"], prompt=" ", verifier=VERIFIER, answer=json.dumps(dict(entry)))
    return verify_custom([(VERIFIER, task, answer)], SECONDS)[0]


def score_reading(task: VerifiableTask, answer: str) -> float:
    """Return the package's score of an answer; called in the process of custom verifiers."""
    return score_answer(GymEntry(**json.loads(task.answer)), answer)
