"""Preferences that a program computes: to simulate raters, and to grade models that learn from such raters.

compiles    the prompt is the header of a Python function; an answer is good if the two parse as one function
brackets    the prompt opens brackets; the fewer are closed wrongly or left open, the better
shorter     the prompt is the header of a Python function; the shorter answer is the better one
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from whorl.errors import ConfigError, one_of
from whorl.evals.grading import VerifiableTask, grade_tasks
from whorl.evals.suites.code_tasks import body_tasks
from whorl.evals.suites.python_functions import extract_functions, stable_hash

OPEN, CLOSE = "([{<", ")]}>"
MAX_FILES = 300  # of the standard library, from which prompts are drawn


@dataclass(frozen=True)
class KnownPreference:
    """prompts: of a seed, shuffled. scores: of prompts and answers, higher is better. good: lowest score that is liked."""

    prompts: Callable[[int], list[str]]
    scores: Callable[[Sequence[str], Sequence[str]], list[float]]
    good: float
    max_tokens: int


def known_preference(name: str) -> KnownPreference:
    """Return a preference by its name. Raises ConfigError: no such name."""
    if name not in PREFERENCES:
        raise ConfigError(f"no known preference {name!r}", expected=one_of(name, list(PREFERENCES)))
    return PREFERENCES[name]


def faults(prompt: str, completion: str) -> int:
    """Return the number of brackets that are closed by another kind, closed without being open, or not closed."""
    opened, found = list(prompt), 0
    for c in completion:
        if c in OPEN:
            opened.append(c)
        elif c not in CLOSE or not opened:
            found += 1
        else:
            found += CLOSE[OPEN.index(opened.pop())] != c
    return found + len(opened)


def _bracket_prompts(seed: int) -> list[str]:
    prompts = ["".join(p) for n in (4, 5, 6) for p in itertools.product(OPEN, repeat=n)]
    return sorted(prompts, key=lambda prompt: stable_hash(seed, prompt))


def _function_headers(seed: int) -> list[str]:
    """Return headers of functions of this interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if not {"site-packages", "test", "idlelib"} & {*p.parts}]
    paths = sorted(paths, key=lambda path: stable_hash(seed, str(path.relative_to(root))))[:MAX_FILES]
    files = (
        (str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace")) for path in paths
    )
    found = extract_functions(files, seed=seed, body_bytes=(20, 240), header_bytes=600)
    return [made.task.prompt for made in body_tasks(one for one in found if ">>>" not in one.docstring)]


def _compiles(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    tasks = [VerifiableTask(str(n), prompt, verifier="compiles") for n, prompt in enumerate(prompts)]
    return [float(grade.passed) for grade in grade_tasks(tasks, answers)]


PREFERENCES = {
    "compiles": KnownPreference(_function_headers, _compiles, 1.0, 96),
    "brackets": KnownPreference(
        _bracket_prompts, lambda prompts, answers: [-float(faults(*pair)) for pair in zip(prompts, answers, strict=True)],
        0.0, 20,
    ),
    "shorter": KnownPreference(
        _function_headers, lambda prompts, answers: [-float(len(answer)) for answer in answers], -60.0, 96
    ),
}  # fmt: skip
