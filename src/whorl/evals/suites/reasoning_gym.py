"""The suite `reasoning-gym`: the task families of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), if installed.

One task for each family (algebra, algorithmic, games, logic, ...), with figures by data set. A seed generates the items;
data sets whose entries a seed does not determine are left out.
The package's own `score_answer` decides, because many items have several right answers; it gives parts of a point to some
wrong ones, which count as wrong here.

    solved_lenient   the final answer, in any form
    solved_strict    the answer in <answer> tags, as the prompt demands

The grader runs in the process of users' graders, with its time limit (`evals/grading/custom.py`). An item whose
scorer hangs or raises has the outcome "error", and counts as missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from whorl.evals.grading.final_answer import after_thinking, find_final_answer
from whorl.evals.grading.grade import Grade
from whorl.evals.kinds.kind import EvalTask, Metric
from whorl.evals.suites.gym_entries import (
    HASH_SEED,
    GymEntry,
    data_sets,
    generator_of,
    is_reproducible,
    question_hash,
    score_answer,
)
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

ITEMS = 10  # of each data set
TEMPLATE = "{{ question }}\n\nWrite the final answer between <answer> and </answer>."
COMPOSED = ("composite",)  # needs a choice of other data sets
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


def solved(gold: Mapping[str, Any] | str, text: str, *, finish: str = "stop") -> Grade:
    """Return the grade of an answer to an item; see the top of this file. Its value is the package's score.

    Args:
        gold: "entry", the settings of a `GymEntry`, as a record or its JSON.
        finish: "length" if the limit of tokens cut the text.

    Raises:
        DataError: the generator gives another question, or the score is not a number in [0, 1].
    """
    entry = GymEntry(**(json.loads(gold) if isinstance(gold, str) else gold["entry"]))
    found = find_final_answer(text)
    tagged = _TAGS.findall(text)[-1:]
    readings = list(tagged)
    if found.explicit or finish != "length":
        whole = () if found.explicit else (after_thinking(text).strip(),)
        readings += [form for r in (*whole, *found.readings) for form in (r, r.rstrip(".,;:!"))]
    value, best = 0.0, ""
    readings = [reading for reading in dict.fromkeys(readings) if reading]
    for reading in readings:
        score = score_answer(entry, reading)
        if score > value or not best:
            value, best = score, reading
        if value >= 1:
            break
    right = value >= 1
    scores = {"solved_lenient": float(right), "solved_strict": float(right and tagged == [best])}
    if right:
        return Grade.of(scores, "right", f"passed: {found.form}", best)
    if readings:
        return Grade(value, False, f"another answer: score {value:.3g}", scores, answer=best)
    if finish == "length":
        return Grade.of(scores, "truncated", "the limit of tokens cut the text before its answer")
    return Grade.of(scores, "not_found", "no answer")


solved.scores = {  # type: ignore[attr-defined]
    "solved_lenient": Metric("items solved, in any form"),
    "solved_strict": Metric("items solved, in <answer> tags"),
}
