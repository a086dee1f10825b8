"""Tasks of the package reasoning-gym (the extra `reasoning-gym`): over 100 generators, each with a scorer.

    tasks = reasoning_gym_tasks("chain_sum", {0: 1.0, 2: 1.0}, n_train=2000, n_test=128)

A level sets every attribute of the generator's curriculum, as `set_global_level` of the package. An entry is drawn from
the sum of the generator's seed and the entry's index. So the held-out seeds begin at 2^31, far above those of training.
Small generators repeat their questions all the same: a training question that is also held out is dropped.

The verifier calls the package's scorer in the process of custom verifiers, which has a time limit. A task stores how
its entry is generated, not the entry, because scorers read metadata of types that JSON would change.

The subtle point is a generator that gives another entry in the other process, as another version of the package does. A
task therefore has a hash of its question, and a difference is an error of the verifier (`failed`), not a wrong answer.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from whorl.errors import ConfigError, DataError, one_of
from whorl.evals.verify.task import Verdict, VerifiableTask

VERIFIER = f"custom:{__name__}:score_completion"
SEEDS = 128  # values of `seed`
LEVELS = 32
BLOCK = 1 << 19  # generator seeds of one `seed` and one level
HELD_OUT = 1 << 31  # first held-out seed; generators of NumPy take seeds below 2^32
DRAWS = 4  # entries drawn for each task, at most


@dataclass(frozen=True)
class GymEntry:
    """How an entry is generated. size: of the generator. options: JSON of its settings. question: hash of the text."""

    dataset: str
    level: int
    options: str
    seed: int
    size: int
    index: int = 0
    question: str = ""


def reasoning_gym_tasks(
    dataset: str,
    levels: Mapping[int, float],
    *,
    n_train: int,
    n_test: int,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    chat: bool = False,
) -> dict[str, list[tuple[VerifiableTask, str | None]]]:
    """Return the tasks of both splits, each with its solution.

    Args:
        dataset: name of a generator.
        levels: level -> relative frequency.
        n_train, n_test: distinct questions, at most.
        options: settings of the generator that no level sets.
        chat: prompts are conversations, otherwise a text to continue. A solution is None if the package has none that
            its own scorer accepts.

    Raises:
        ConfigError: the package is not installed, or it rejects the name, a level or an option; a seed above 127.
        DataError: an entry of the generator has no question, or all questions are held out.
    """
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"the seed of reasoning-gym tasks is {seed}", expected=f"0 to {SEEDS - 1}")
    known: set[str] = set()
    made: dict[str, list[tuple[VerifiableTask, str | None]]] = {}
    for split, n in (
        ("test", n_test),
        ("train", n_train),
    ):  # held-out tasks do not depend on the number of others
        first = HELD_OUT * (split == "test") + seed * LEVELS * BLOCK
        made[split] = []
        for level, count in _counts(levels, n).items():
            start, size = first + level % LEVELS * BLOCK, min(DRAWS * count, BLOCK)
            spec = GymEntry(dataset, level, json.dumps(dict(options or {})), start, size)
            made[split] += _distinct(spec, count, known, chat=chat)
    if n_train and not made["train"]:
        raise DataError(
            f"{dataset} has only {len(known)} questions at the levels {sorted(levels)}, all of them held out",
            do="request fewer held-out tasks, or add levels",
        )
    return {"train": made["train"], "test": made["test"]}


def score_completion(task: VerifiableTask, completion: str) -> Verdict:
    """Return the verdict of the package's scorer on the text in the last <answer> tags, or on the whole text.

    Raises:
        DataError: the generator gives another question, or the score is not a number in [0, 1].
    """
    extract_answer = importlib.import_module("reasoning_gym.utils").extract_answer

    spec = GymEntry(**json.loads(task.answer))
    entry = _entry(spec)
    if _hash(entry["question"]) != spec.question:
        raise DataError(
            f"{spec.dataset} gives another question for {task.id}", expected="the package that made it"
        )
    answer = extract_answer(completion)
    reward = _score(
        _generator(replace(spec, index=0, question="")),
        completion.strip() if answer is None else answer,
        entry,
    )
    return Verdict(reward, reward >= 1.0, "passed" if reward >= 1.0 else f"wrong: score {reward:.3g}")


def _distinct(
    spec: GymEntry, n: int, known: set[str], *, chat: bool
) -> Iterator[tuple[VerifiableTask, str | None]]:
    """Yield up to n tasks of a generator whose questions are not in `known`, and add them."""
    generator, found = _generator(spec), 0
    for index in range(spec.size):
        if found == n:
            return
        entry = generator[index]
        question = entry.get("question") if isinstance(entry, Mapping) else None
        if not isinstance(question, str) or not question.strip():
            raise DataError(
                f"entry {index} of {spec.dataset} has the question {question!r}"[:200], expected="a text"
            )
        if question in known:
            continue
        known.add(question)
        found += 1
        of_entry = replace(spec, index=index, question=_hash(question))
        name = f"{spec.dataset}-{spec.level}-{spec.seed + index}"
        task = VerifiableTask(
            name, prompt="" if chat else f"{question.rstrip()}\n",
            messages=({"role": "user", "content": question},) if chat else (), verifier=VERIFIER,
            answer=json.dumps(asdict(of_entry)), difficulty=float(spec.level),
        )  # fmt: skip
        yield task, _solution(generator, entry)


def _solution(generator: Any, entry: Mapping[str, Any]) -> str | None:
    """Return the package's answer, if its scorer accepts it."""
    answer = entry.get("answer")
    if isinstance(answer, bool | int | float):
        answer = str(answer)
    try:
        accepted = isinstance(answer, str) and bool(answer) and _score(generator, answer, entry) >= 1.0
    except Exception:  # of foreign code
        accepted = False
    return str(answer) if accepted else None


def _score(generator: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the package's score.

    Raises:
        DataError: it is not a number in [0, 1].
    """
    score = generator.score_answer(answer, deepcopy(dict(entry)))
    try:
        reward = float(score)
    except (TypeError, ValueError):
        reward = math.nan
    if isinstance(score, str) or not 0.0 <= reward <= 1.0:
        raise DataError(f"the scorer returned {score!r}"[:200], expected="a number from 0 to 1")
    return reward


@lru_cache(maxsize=1024)
def _entry(spec: GymEntry) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = _generator(replace(spec, index=0, question=""))[spec.index]
    return entry


@lru_cache(maxsize=64)
def _generator(spec: GymEntry) -> Any:
    """Return a dataset of the package. Raises ConfigError as `reasoning_gym_tasks`."""
    try:
        importlib.import_module("reasoning_gym")
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym cannot be imported: {error}", expected="the extra 'reasoning-gym'",
            do="pip install 'whorl[reasoning-gym]'",
        ) from error  # fmt: skip
    if spec.dataset not in factory.DATASETS:
        names = sorted(factory.DATASETS)
        raise ConfigError(f"reasoning-gym has no {spec.dataset!r}", expected=one_of(spec.dataset, names))
    options = json.loads(spec.options)
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
    if taken := sorted(by_level & options.keys()):
        raise ConfigError(
            f"{spec.dataset}: the level sets {taken[0]}", do=f"leave {taken[0]} out of the options"
        )
    curriculum.set_global_level(spec.level)
    try:
        config = curriculum.generate_configuration({**options, "seed": spec.seed, "size": spec.size})
        generator = factory.DATASETS[spec.dataset][0](config=config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{spec.dataset} rejects level {spec.level} with the options {options}: {error}"
        ) from error
    return generator


def _counts(levels: Mapping[int, float], n: int) -> dict[int, int]:
    """Divide n into levels by their weights."""
    total = sum(levels.values())
    if not levels or total <= 0 or min(levels.values()) < 0:
        raise ConfigError(
            f"levels: {dict(levels)}", expected="weights of 0 or more, at least one of them positive"
        )
    bounds, reached = [0], 0.0
    for weight in levels.values():
        reached += weight
        bounds.append(round(n * reached / total))
    counts = {level: b - a for level, a, b in zip(levels, bounds, bounds[1:], strict=False)}
    return {level: count for level, count in counts.items() if count}


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
