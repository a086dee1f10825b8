"""Tasks of the package reasoning-gym (the extra `reasoning-gym`): over 100 generators, each with a scorer.

    tasks = reasoning_gym_tasks("chain_sum", {0: 1.0, 2: 1.0}, n_train=2000, n_test=128)

A level sets every attribute of the generator's curriculum, as `set_global_level` of the package. An entry is drawn from
the sum of the generator's seed and the entry's index. So the held-out seeds begin at 2^31, far above those of training.
Small generators repeat their questions all the same: a training question that is also held out is dropped.

The grader calls the package's scorer (`evals/suites/gym_entries.py`) in the process of users' graders, which has a time
limit. An error of the scorer, or another question than the task's, is `failed`, not a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from whorl.errors import ConfigError, DataError
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.suites.gym_entries import GymEntry, generator_of, question_hash, score_made

VERIFIER = "reasoning_gym"
SEEDS = 128  # values of `seed`
LEVELS = 32
BLOCK = 1 << 19  # generator seeds of one `seed` and one level
HELD_OUT = 1 << 31  # first held-out seed; generators of NumPy take seeds below 2^32
DRAWS = 4  # entries drawn for each task, at most


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
        levels: level -> relative frequency; none: the generator's default settings.
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
        for level, count in (_counts(levels, n) if levels else {None: n}).items():
            start, size = first + (level or 0) % LEVELS * BLOCK, min(DRAWS * count, BLOCK)
            spec = GymEntry(dataset, level, json.dumps(dict(options or {})), start, size)
            made[split] += _distinct(spec, count, known, chat=chat)
    if n_train and not made["train"]:
        raise DataError(
            f"{dataset} has only {len(known)} questions at the levels {[*levels]}, all of them held out",
            do="request fewer held-out tasks, or add levels",
        )
    return {"train": made["train"], "test": made["test"]}


def _distinct(
    spec: GymEntry, n: int, known: set[str], *, chat: bool
) -> Iterator[tuple[VerifiableTask, str | None]]:
    """Yield up to n tasks of a generator whose questions are not in `known`, and add them."""
    generator, found = generator_of(spec), 0
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
        of_entry = replace(spec, index=index, question=question_hash(question))
        name = f"{spec.dataset}-{spec.level}-{spec.seed + index}"
        task = VerifiableTask(
            name, prompt="" if chat else f"{question.rstrip()}\n",
            messages=({"role": "user", "content": question},) if chat else (), verifier=VERIFIER,
            answer=json.dumps(asdict(of_entry)), difficulty=float(spec.level or 0),
        )  # fmt: skip
        yield task, _solution(spec.dataset, generator, entry)


def _solution(dataset: str, generator: Any, entry: Mapping[str, Any]) -> str | None:
    """Return the package's answer, if its scorer accepts it."""
    answer = entry.get("answer")
    if isinstance(answer, bool | int | float):
        answer = str(answer)
    try:
        accepted = (
            isinstance(answer, str) and bool(answer) and score_made(dataset, generator, answer, entry) >= 1
        )
    except Exception:  # of foreign code
        accepted = False
    return str(answer) if accepted else None


def _counts(levels: Mapping[int, float], n: int) -> dict[int | None, int]:
    """Divide n into levels by their weights."""
    total = sum(levels.values())
    if total <= 0 or min(levels.values()) < 0:
        raise ConfigError(
            f"levels: {dict(levels)}", expected="weights of 0 or more, at least one of them positive"
        )
    bounds, reached = [0], 0.0
    for weight in levels.values():
        reached += weight
        bounds.append(round(n * reached / total))
    counts: dict[int | None, int] = {
        level: b - a for level, a, b in zip(levels, bounds, bounds[1:], strict=False)
    }
    return {level: count for level, count in counts.items() if count}
