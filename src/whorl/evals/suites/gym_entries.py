"""Entries of the package reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), and the scores of its scorers.

    entry = GymEntry("chain_sum", level=0, seed=7, size=10, index=3)
    score_answer(replace(entry, question=question_hash(text)), "42")      1.0 for a right answer

A task stores how its entry is generated, not the entry, because scorers read metadata of types that JSON would change.
A generator may give another entry in another process, as another version of the package does. So an entry has a hash of
its question, and a difference is an error. Three generators iterate over sets of strings, whose order differs from
process to process, and one draws from the global generator: `is_reproducible`.

Scorers may hang, so the grader runs in the process of users' graders, which has a time limit (`evals/grading/custom.py`).
The subtle point is that nine data sets evaluate an answer as Python, with `eval` or SymPy's `parse_expr`. Their answers are
screened first: literals and plain text for the former; numbers, operators and a few
functions for the latter. Any other answer to them scores 0 and is not evaluated. An unevaluated `Integral(...)` is among
those, which the package accepts as its own solution, and gives as reference answer in place of an antiderivative.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from whorl.errors import ConfigError, DataError, one_of

LITERALS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
EXPRESSIONS = (
    "simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown",
)  # fmt: skip
HASH_ORDERED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")  # in 0.1.25
UNSEEDED = ("list_functions",)
HASH_SEED = "PYTHONHASHSEED"
_PLAIN = re.compile(r"[\w\s.,_-]{0,4000}")
_FUNCTION = r"(?:a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|[aA]bs|pi)"
_EXPRESSION = re.compile(rf"(?:\d+\.?\d*|[\s+*/^(),=-]|\b[a-zA-Z]\b|\b{_FUNCTION}\b){{1,1000}}")
_POWER = r"(?:\*\*|\^)"
_LARGE_POWER = re.compile(  # an exponent of three digits, or one that has a power
    rf"{_POWER}\s*-?\s*(?:\d{{3}}|[\w.]+\s*{_POWER}|\([^()]*{_POWER}|[^\s\w(])"
)


@dataclass(frozen=True)
class GymEntry:
    """How an entry is generated.

    Attributes:
        dataset: name of a generator.
        level: of its curriculum; None: the generator's default settings.
        options: JSON of further settings.
        seed, size: of the generator.
        index: of the entry.
        question: hash of its text (`question_hash`).
    """

    dataset: str
    level: int | None = None
    options: str = "{}"
    seed: int = 0
    size: int = 1
    index: int = 0
    question: str = ""


def data_sets() -> Mapping[str, Any]:
    """Return the generators of the package: name -> (class, configuration, ...).

    Raises:
        ConfigError: the package cannot be imported.
    """
    try:
        importlib.import_module("reasoning_gym")
        found: Mapping[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym cannot be imported: {error}", expected="the extra 'reasoning-gym'",
            do="pip install 'whorl[reasoning-gym]'",
        ) from error  # fmt: skip
    return found


def is_reproducible(dataset: str) -> bool:
    """Return whether a generator gives the same entries in every process, in this environment."""
    if dataset in HASH_ORDERED:
        return os.environ.get(HASH_SEED, "random") != "random"
    return dataset not in UNSEEDED


def question_hash(question: str) -> str:
    """Return a hash that identifies a question."""
    return blake2b(question.encode(), digest_size=8).hexdigest()


def generator_of(entry: GymEntry) -> Any:
    """Return the data set of the package that gives an entry.

    Raises:
        ConfigError: the package is not installed, or it rejects the name, the level or an option; or a seed does not
            determine the entries.
    """
    return _generator(replace(entry, index=0, question=""))


def score_answer(entry: GymEntry, answer: str) -> float:
    """Return the package's score of an answer, 1 if it is right; 0 for an answer that may not be evaluated.

    Raises:
        DataError: the generator gives another question, or the score is not a number in [0, 1].
    """
    made = _entry(entry)
    if question_hash(made["question"]) != entry.question:
        raise DataError(
            f"{entry.dataset} gives another question for entry {entry.seed + entry.index}",
            expected="the version of reasoning-gym that made it",
        )
    return score_made(entry.dataset, generator_of(entry), answer, made)


def score_made(dataset: str, generator: Any, answer: str, made: Mapping[str, Any]) -> float:
    """Return the same for an entry that its generator has made. Raises DataError: no number in [0, 1]."""
    if not is_safe(dataset, answer):
        return 0.0
    score = generator.score_answer(answer, deepcopy(dict(made)))
    try:
        reward = float(score)
    except (TypeError, ValueError):
        reward = math.nan
    if isinstance(score, str) or not 0.0 <= reward <= 1.0:
        raise DataError(f"the scorer returned {score!r}"[:200], expected="a number from 0 to 1")
    return reward


def is_safe(dataset: str, answer: str) -> bool:
    """Return whether an answer to an item of a data set may be evaluated."""
    if dataset in EXPRESSIONS:
        return _EXPRESSION.fullmatch(answer) is not None and _LARGE_POWER.search(answer) is None
    if dataset not in LITERALS or _PLAIN.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


@lru_cache(maxsize=1024)
def _entry(entry: GymEntry) -> Mapping[str, Any]:
    made: Mapping[str, Any] = generator_of(entry)[entry.index]
    return made


@lru_cache(maxsize=64)
def _generator(spec: GymEntry) -> Any:
    """Return a data set of the package. Raises ConfigError as `generator_of`."""
    known = data_sets()
    if spec.dataset not in known:
        raise ConfigError(
            f"reasoning-gym has no {spec.dataset!r}", expected=one_of(spec.dataset, sorted(known))
        )
    if not is_reproducible(spec.dataset):
        raise ConfigError(
            f"the seed does not determine the entries of {spec.dataset}",
            do="choose another data set" + f", or set {HASH_SEED}=0" * (spec.dataset in HASH_ORDERED),
        )
    factory = importlib.import_module("reasoning_gym.factory")
    settings = {**json.loads(spec.options), "seed": spec.seed, "size": spec.size}
    if spec.level is None:
        return _made(spec, lambda: factory.create_dataset(spec.dataset, **settings))
    try:
        curriculum = factory.create_curriculum(spec.dataset)
    except ValueError as error:
        raise ConfigError(
            f"{spec.dataset} of reasoning-gym has no levels: {error}", expected="one with a curriculum"
        ) from error
    highest = max((len(a.levels) for a in curriculum.attributes.values()), default=1) - 1
    if not 0 <= spec.level <= highest:
        raise ConfigError(f"{spec.dataset} has no level {spec.level}", expected=f"0 to {highest}")
    fields = ("field_name", "lower_field_name", "upper_field_name")
    by_level = {getattr(a, field, None) for a in curriculum.attributes.values() for field in fields}
    if taken := sorted(settings.keys() & by_level):
        raise ConfigError(
            f"{spec.dataset}: the level sets {taken[0]}", do=f"leave {taken[0]} out of the options"
        )
    curriculum.set_global_level(spec.level)
    return _made(spec, lambda: known[spec.dataset][0](config=curriculum.generate_configuration(settings)))


def _made(spec: GymEntry, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (AssertionError, TypeError, ValueError) as error:
        level = "its default settings" if spec.level is None else f"level {spec.level}"
        raise ConfigError(
            f"{spec.dataset} rejects {level} with the options {json.loads(spec.options)}: {error}"
        ) from error
