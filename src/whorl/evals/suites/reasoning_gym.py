"""The suite `reasoning-gym`: the task families of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), if installed.

One task for each family (algebra, algorithmic, games, logic, ...), with figures by data set. A seed generates the items.
The package's own `score_answer` decides, because many items have several right answers; it gives parts of a point to some
wrong ones, which count as wrong here.

    solved_lenient   the final answer, in any form
    solved_strict    the answer in <answer> tags, as the prompt demands

The subtle point is that nine data sets evaluate an answer as Python, with `eval` or SymPy's `parse_expr`. So their
answers are checked first: literals and plain text only for the former; numbers, operators and a few functions for the
latter. Any other answer to them is wrong, and is not evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from whorl.errors import ConfigError
from whorl.evals.kinds.kind import Metric
from whorl.evals.metrics.result import Graded
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks import EvalTask, make_task
from whorl.evals.tasks.config import parse_task
from whorl.evals.verify.final_answer import find_final_answer

ITEMS = 10  # of each data set
TEMPLATE = "{{ question }}\n\nWrite the final answer between <answer> and </answer>."
COMPOSED = ("composite",)  # needs a choice of other data sets
LITERALS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
EXPRESSIONS = (
    "simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown",
)  # fmt: skip
_PLAIN = re.compile(r"[\w\s.,_-]{0,4000}")
_EXPRESSION = re.compile(
    r"(?:\d+\.?\d*|[\s+*/^(),=-]|\b[a-zA-Z]\b|\b(?:a?sin|a?cos|a?tan|exp|log|ln|sqrt|pi)\b){1,1000}"
)
_LARGE_POWER = re.compile(r"(?:\*\*|\^)\s*(?:\d{3}|[^\s\da-zA-Z(-]|[^+]*(?:\*\*|\^)[^+]*(?:\*\*|\^))")
_TAGS = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def reasoning_gym_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return one task for each family. The limit counts the items of a family.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    families: dict[str, list[str]] = {}
    for name, (made, *_) in sorted(_gym("reasoning_gym.factory").DATASETS.items()):
        if name not in COMPOSED:
            families.setdefault(made.__module__.split(".")[1], []).append(name)
    return [_task(family, names, inputs) for family, names in sorted(families.items())]


def _task(family: str, names: list[str], inputs: SuiteInputs) -> EvalTask:
    each = ITEMS if inputs.limit is None else -(-inputs.limit // len(names))
    sets = {name: _gym("reasoning_gym").create_dataset(name, seed=inputs.seed, size=each) for name in names}
    records = [
        {"id": f"{name}-{n}", "data_set": name, "question": made[n]["question"], "entry": dict(made[n])}
        for n in range(each)
        for name, made in sets.items()
    ]
    config = parse_task(
        {
            "name": f"gym-{family}", "version": "1", "kind": "generate", "template": TEMPLATE, "chat": True,
            "about": f"reasoning-gym: {family}", "gold": "{'data_set': data_set, 'entry': entry}",
            "data": {"group": "data_set"}, "generation": {"max_tokens": 1024},
            "options": {"metric": f"{__name__}:solved"},
        },
        "suite reasoning-gym",
    )  # fmt: skip
    return make_task(config, records, limit=inputs.limit)


def solved(gold: Mapping[str, Any], text: str, *, finish: str = "stop") -> Graded:
    """Return whether an answer solves an item; see the top of this file.

    Args:
        gold: "data_set" and "entry", the generated record.
        finish: "length" if the limit of tokens cut the text.
    """
    name, entry = gold["data_set"], gold["entry"]
    found = find_final_answer(text)
    tagged = _TAGS.findall(text)[-1:]
    readings = list(tagged)
    if found.explicit or finish != "length":
        readings += [form for reading in found.readings for form in (reading, reading.rstrip(".,;:!"))]
    right = next((reading for reading in readings if _score(name, reading, entry)), None)
    strict = bool(tagged) and _score(name, tagged[0], entry)
    scores = {"solved_lenient": float(right is not None), "solved_strict": float(strict)}
    if right is not None:
        return Graded(scores, "right", f"form of the answer: {found.form}", right)
    if readings:
        return Graded(scores, "wrong", "another answer", readings[0])
    if finish == "length":
        return Graded(scores, "truncated", "the limit of tokens cut the text before its answer")
    return Graded(scores, "not_found", "no answer was found")


solved.scores = {  # type: ignore[attr-defined]
    "solved_lenient": Metric("items solved, in any form"),
    "solved_strict": Metric("items solved, in <answer> tags"),
}


def is_safe(name: str, answer: str) -> bool:
    """Return whether an answer to an item of a data set may be evaluated."""
    if name in EXPRESSIONS:
        return _EXPRESSION.fullmatch(answer) is not None and _LARGE_POWER.search(answer) is None
    if name not in LITERALS or _PLAIN.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _score(name: str, answer: str, entry: Mapping[str, Any]) -> bool:
    return is_safe(name, answer) and _scorer(name).score_answer(answer=answer, entry=entry) >= 1


@cache
def _scorer(name: str) -> Any:
    return _gym("reasoning_gym").create_dataset(name, seed=0, size=1)


def _gym(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            "the suite reasoning-gym needs the package of this name", expected="reasoning-gym 0.1.20 or later",
            do="pip install reasoning-gym",
        ) from error  # fmt: skip
